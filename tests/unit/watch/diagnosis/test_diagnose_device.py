"""Verdicts on processes whose devices run what they issue in order (NCCL)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from test_diagnose import AT, NAN, Group, One, check, diagnose, policy, snapshot

from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.diagnosis.evidence_types import CALL_FROM_CPP, UNKNOWN, CollectiveCall, Liveness, ProcessNote
from lockstep.watch.diagnosis.verdict import VerdictKind

REFUSED = ProcessNote(error="lockstep.base.errors.CollectiveRefused: collective #7 on 'world' does not match")


def on_device(job: Evidence, issued_s: Sequence[float], started: Sequence[int] | None = None) -> Evidence:
    """`issued_s` says how many seconds ago each member issued its oldest unfinished collective; NaN: none is. `started`
    is the last collective that the device of each member has started."""
    members = job.communicators
    columns = {"on_device": np.ones(len(members.process), np.bool_), "pending_at": AT - np.array(issued_s)}
    if started is not None:
        columns["started"] = np.array(started)
    return replace(job, communicators=replace(members, **columns))


def test_collectives_that_a_device_has_not_reached_do_not_count_in_a_deadlock() -> None:
    """Rank 1 skips #12 of the world and waits in its pair; its peers have issued theirs of the pairs behind #12."""
    world = Group("world", [0, 1, 2, 3], [12, 11, 12, 12], [11] * 4)
    pairs = [Group(f"tp{i}", [2 * i, 2 * i + 1], [8, 8], [7, 7], description="tp") for i in (0, 1)]
    job = on_device(snapshot(policy(4), [world, *pairs]), [60.0, NAN, 60.0, 60.0, 59.9, 60.0, 59.9, 59.9])
    verdict = check(diagnose(job), VerdictKind.CYCLE, ["policy-1"])
    assert "has entered 8 collectives of 'tp0' where its peers have entered 7" in verdict.explanation


def test_the_rank_whose_device_is_missing_in_an_earlier_collective_made_the_wrong_call() -> None:
    """Rank 0 makes an extra call on the world, behind which its device does not reach the collective of rank 1 and 2;
    rank 3 is refused."""
    world = Group("world", [0, 1, 2, 3], [7, 6, 6, 7], [6] * 4)
    world.calls = {
        (0, 7): (CollectiveCall("reduce", "[16]", "float32", 0), ""),
        (3, 7): (CollectiveCall("all_reduce", "[1]", "float32"), ""),
    }
    left = Group("left", [0, 1, 2], [5] * 3, [4] * 3)
    refused = One("policy-3", Liveness.DEAD, 1, AT - 60, note=REFUSED)
    job = on_device(snapshot(policy(4, p3=refused), [world, left]), [60.0, NAN, NAN, 60.0, 59.9, 60.0, 60.0])
    assert 0.6 <= check(diagnose(job), VerdictKind.MISMATCH, ["policy-0"]).confidence < 0.8


def test_a_death_names_no_collective_that_its_peers_may_have_left_already() -> None:
    """Counts of devices are polled, so that they are older than the observation of the death."""
    killed = One("policy-1", Liveness.DEAD, -9, AT - 0.1)
    for issued_s, named in ((0.2, False), (5.0, True)):
        world = Group("world", [0, 1], [7, 6], [6, 6], issued_s)
        job = snapshot([One("policy-0", still=issued_s), killed], [world])
        assert check(diagnose(job), VerdictKind.DEAD, ["policy-1"]).collective is not None
        verdict = check(diagnose(on_device(job, [issued_s, NAN])), VerdictKind.DEAD, ["policy-1"])
        assert (verdict.collective is not None) == named


def messages(sender: int, receiver: int) -> Group:
    """The messages from one rank to another, of which both have issued #7."""
    return Group(f"pp {sender}->{receiver}", [sender, receiver], [7, 7], [6, 6])


def test_the_side_of_a_message_that_has_not_started_is_held_up() -> None:
    for sender_started, receiver_started, culprits in ((7, 6, [1]), (6, 7, [0])):
        job = on_device(snapshot(policy(2), [messages(0, 1)]), [60.0, 60.0], [sender_started, receiver_started])
        verdict = check(diagnose(job), VerdictKind.DEVICE_LAG, [f"policy-{each}" for each in culprits])
        assert "its device has not started it" in verdict.explanation


def test_messages_whose_starts_are_equal_or_unknown_are_in_flight() -> None:
    for started in ([7, 7], [6, 6], [7, UNKNOWN], None):
        job = on_device(snapshot(policy(2), [messages(0, 1)]), [60.0, 60.0], started)
        check(diagnose(job), VerdictKind.IN_FLIGHT, [])


def test_of_a_pipeline_only_the_stage_that_has_not_started_is_held_up() -> None:
    """Rank 1 has not started its batch; rank 2 has started its receive, behind which its send to rank 3 waits."""
    pairs = [messages(0, 1), messages(1, 2), messages(2, 3)]
    issued, started = [60.0, 60.0, 60.0, 60.0, 59.9, 60.0], [7, 6, 6, 7, 6, 7]
    job = on_device(snapshot(policy(4), pairs), issued, started)
    check(diagnose(job), VerdictKind.DEVICE_LAG, ["policy-1"])


def test_a_root_that_has_completed_a_call_of_unknown_kind_accuses_no_waiting_member() -> None:
    """#8 is a broadcast from C++, which beacons do not describe: its root may complete it while the others wait."""
    world = Group("world", [0, 1, 2, 3], [8] * 4, [8, 7, 7, 7])
    world.calls = {(process, 7): (CollectiveCall("all_reduce", "[4]", "float32"), "") for process in range(4)}
    verdicts = diagnose(on_device(snapshot(policy(4), [world]), [NAN, 60.0, 60.0, 60.0]))
    assert [each.kind for each in verdicts if each.culprits] == []
    check(verdicts, VerdictKind.IN_FLIGHT, [])


def test_the_only_member_whose_start_is_unknown_is_not_accused() -> None:
    """Beacons do not say what a device has ended since, so that it may have started."""
    world = Group("world", [0, 1, 2], [8] * 3, [7] * 3)
    job = on_device(snapshot(policy(3), [world]), [60.0] * 3, [8, UNKNOWN, 8])
    check(diagnose(job), VerdictKind.IN_FLIGHT, [])


def test_most_members_prove_that_the_others_lag_in_a_call_from_c() -> None:
    """Its operation is unknown, also if the waiting members report it as a call from C++."""
    world = Group("world", list(range(8)), [8] * 8, [7, 7, *[8] * 6])
    for calls in ({}, {(process, 8): (CALL_FROM_CPP, "") for process in (0, 1)}):
        world.calls = calls
        job = on_device(snapshot(policy(8), [world]), [60.0, 60.0, *[NAN] * 6])
        check(diagnose(job), VerdictKind.DEVICE_LAG, ["policy-0", "policy-1"])
