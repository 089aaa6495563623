"""Reports of agents survive encoding and decoding, and evidence combines the reports of all hosts."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lockstep.base.wait_state import WaitRecord
from lockstep.watch.agent.report_messages import (
    DIGEST_RECORD,
    Roster,
    RosterCommunicator,
    RosterMember,
    StateReport,
    WaitReport,
    decode_report,
    encode_report,
    pack_calls,
    pack_member,
    pack_process,
    wait_report,
)
from lockstep.watch.diagnosis.evidence_types import (
    UNKNOWN,
    CollectiveCall,
    CommunicatorInfo,
    Liveness,
    ProcessInfo,
    ProcessNote,
    WaitAlias,
    WaitCondition,
)
from lockstep.watch.supervisor.agent_connections import parse_report
from lockstep.watch.supervisor.message_store import MessageStore

FSDP = CommunicatorInfo("fsdp", "sharding", "gloo")


def roster(host: str, ranks: list[int], number: int = 1, size: int = 4) -> Roster:
    return Roster(
        host,
        number,
        tuple(ProcessInfo(f"policy-{rank}", "policy", rank, host, 100 + rank) for rank in ranks),
        (RosterCommunicator("policy/fsdp", FSDP, size),),
        tuple(RosterMember(i, 0, rank, size) for i, rank in enumerate(ranks)),
    )


def state(host: str, ranks: list[int], number: int = 1, entered: int = 7) -> StateReport:
    return StateReport(
        host,
        number,
        b"".join(pack_process(moved=1.5, active=0.5, same_stack=0.25) for _ in ranks),
        b"".join(pack_member(entered + rank, entered, 2.0, 3.0, blocked=rank == 0) for rank in ranks),
        tuple("train" for _ in ranks),
        calls=pack_calls((i, entered, 2**63 + rank) for i, rank in enumerate(ranks)),
    )


def parsed(report: Roster | StateReport) -> dict[str, object]:
    """The message of a report after encoding and parsing."""
    return parse_report(json.dumps(encode_report(report)).encode())


def test_a_frame_is_parsed_or_refused() -> None:
    report = json.dumps({**encode_report(state("b", [0])), "calm": True}).encode()
    assert parse_report(report)["calm"] is True
    assert decode_report(parse_report(report)) == decode_report(json.loads(report)) == state("b", [0])
    odd = parse_report(b'{"m": "state", "stages": [NaN]}')
    assert odd["m"] == "state" and math.isnan(odd["stages"][0])
    for broken in (b'{"m": "state", "processes": 3}', b'{"m": "state", "processes": "!"}', b'{"m": "state"}'):
        with pytest.raises(ValueError, match="not a report of an agent"):
            decode_report(parse_report(broken))
    with pytest.raises(ValueError, match="Expecting"):
        parse_report(b"{")


def test_a_report_survives_encoding_and_decoding() -> None:
    full = replace(
        state("b", [0, 1]),
        notes={1: ProcessNote("score() at reward.py:31", "ValueError: no", "storage_fault", True, 3.5)},
        waits=(
            WaitReport(0, "reward-0", "future", "scores of step 7", 4.0, 2.0, WaitCondition.ANY, False, True, "join"),
            WaitReport(1, "controller"),
        ),
        about={2**63: CollectiveCall("all_reduce", "[4]", "float32", None, "train.py:3 in step")},
        sites=((0, 7, "train.py:3 in step"),),
        digests=DIGEST_RECORD.pack(0, 1, 64, 2**64 - 1),
        differences=((0, 1, 37),),
        moved={1: 0.25},
    )
    again = decode_report(parsed(full))
    assert isinstance(again, StateReport)
    assert math.isnan(again.waits[1].since)
    assert again.waits[0] == full.waits[0]
    assert replace(again, waits=()) == replace(full, waits=())
    named = replace(roster("b", [0, 1]), communicators=(RosterCommunicator("k", FSDP, 4, (0, 2, 4, 6)),))
    assert decode_report(parsed(named)) == named


def test_evidence_combines_the_reports_of_all_hosts() -> None:
    store = MessageStore()
    for host, ranks, at in (("b", [2, 3], 11.0), ("a", [0, 1], 10.0)):
        assert store.receive(parsed(roster(host, ranks)), at)
        moved = {1: 0.25, 7: 1.0} if host == "b" else {}
        assert store.receive(parsed(replace(state(host, ranks), moved=moved)), at)
    seen = store.evidence(12.0)
    assert seen.processes.moved_at is not None
    np.testing.assert_equal(seen.processes.moved_at, [np.nan, np.nan, np.nan, 10.75])
    assert [each.name for each in seen.processes.info] == ["policy-0", "policy-1", "policy-2", "policy-3"]
    assert seen.processes.progressed_at.tolist() == [8.5, 8.5, 9.5, 9.5]
    assert seen.processes.seen_at is not None
    assert seen.processes.seen_at.tolist() == [10.0, 10.0, 11.0, 11.0]
    communicators = seen.communicators
    assert communicators.starts.tolist() == [0, 4]
    assert communicators.process.tolist() == [0, 1, 2, 3]
    assert communicators.entered.tolist() == [7, 8, 9, 10]
    assert communicators.entered_at.tolist() == [8.0, 8.0, 9.0, 9.0]
    assert communicators.blocked is not None
    assert communicators.blocked.tolist() == [1, 0, 0, 0]
    assert seen.calls.membership.tolist() == [0, 1, 2, 3]
    assert seen.calls.signature.tolist() == [2**63, 2**63 + 1, 2**63 + 2, 2**63 + 3]
    assert seen.processes.stage == ["train"] * 4


def test_unreported_members_are_included() -> None:
    store = MessageStore(expected=[ProcessInfo("policy-1", "policy", 1)])
    store.receive(parsed(roster("a", [0, 2])), 10.0)
    store.receive(parsed(state("a", [0, 2])), 10.0)
    seen = store.evidence(10.0)
    names = [seen.processes.info[i].name for i in seen.communicators.process]
    assert names == ["policy-0", "policy-1", "policy-2", "policy-3"]
    assert seen.communicators.entered.tolist() == [7, UNKNOWN, 9, UNKNOWN]
    liveness = {
        each.name: Liveness(value) for each, value in zip(seen.processes.info, seen.processes.liveness, strict=True)
    }
    assert liveness == {
        "policy-0": Liveness.RUNNING, "policy-1": Liveness.UNSEEN, "policy-2": Liveness.RUNNING,
        "policy-3": Liveness.UNSEEN,
    }  # fmt: skip


def test_ranks_of_a_communicator_show_which_are_missing() -> None:
    store = MessageStore()
    report = replace(
        roster("a", [4]), communicators=(RosterCommunicator("k", FSDP, 2, (4, 6)),), members=(RosterMember(0, 0, 0, 2),)
    )
    store.receive(parsed(report), 1.0)
    store.receive(parsed(state("a", [4])), 1.0)
    assert [each.rank for each in store.evidence(1.0).processes.info] == [4, 6]


def test_a_silent_host_is_lost_unless_all_are_silent() -> None:
    store = MessageStore(host_s=5.0)
    for host, ranks in (("a", [0, 1]), ("b", [2, 3])):
        store.receive(parsed(roster(host, ranks)), 0.0)
        store.receive(parsed(state(host, ranks)), 0.0)
    for second in range(7):
        store.receive(parsed(state("a", [0, 1])), float(second))
        assert Liveness.LOST not in store.evidence(float(second)).processes.liveness[:2]
    seen = store.evidence(7.0)
    assert seen.processes.liveness.tolist() == [Liveness.RUNNING, Liveness.RUNNING, Liveness.LOST, Liveness.LOST]
    assert seen.gaps == ["no report from host b for 7 s"]
    for second in range(8, 14):
        seen = store.evidence(float(second))
    assert set(seen.processes.liveness.tolist()) == {Liveness.RUNNING}
    assert seen.at == 6.0


def test_a_supervisor_that_was_stopped_counts_no_host_as_silent() -> None:
    """Reports that arrived in the meantime have not been read yet."""
    store = MessageStore(host_s=5.0)
    for host, ranks in (("a", [0, 1]), ("b", [2, 3])):
        store.receive(parsed(roster(host, ranks)), 0.0)
        store.receive(parsed(state(host, ranks)), 0.0)
    store.evidence(0.1)
    store.receive(parsed(state("a", [0, 1])), 60.0)
    assert Liveness.LOST not in store.evidence(60.0).processes.liveness


def test_a_state_report_needs_its_roster() -> None:
    store = MessageStore()
    assert not store.receive(parsed(state("a", [0, 1])), 1.0)
    store.receive(parsed(roster("a", [0, 1], number=2)), 1.0)
    assert not store.receive(parsed(state("a", [0, 1], number=1)), 1.0)
    with pytest.raises(ValueError, match="expected 2 and 2 records"):
        store.receive(parsed(state("a", [0], number=2)), 1.0)
    with pytest.raises(ValueError, match="not a report"):
        store.receive({"m": "hello"}, 1.0)
    assert np.isnan(store.evidence(2.0).processes.progressed_at).all()


def test_targets_of_waits_are_resolved() -> None:
    store = MessageStore(aliases={"the scorers": WaitAlias("policy", WaitCondition.ANY)})
    store.receive(parsed(roster("a", [0, 1, 2, 3])), 1.0)
    names = ["policy-2", "policy-1, policy-2 and 4 more", "policy", "the scorers", "judge.example:80"]
    waits = tuple(WaitReport(0, waits_for, since=3.0) for waits_for in names)
    store.receive(parsed(replace(state("a", [0, 1, 2, 3]), waits=waits)), 10.0)
    found = [(edge.on, edge.needs, edge.outside) for edge in store.evidence(10.0).edges]
    assert found == [
        ((2,), WaitCondition.ALL, ""),
        ((1, 2), WaitCondition.ALL, ""),
        ((1, 2, 3), WaitCondition.ALL, ""),
        ((1, 2, 3), WaitCondition.ANY, ""),
        ((), WaitCondition.ALL, "judge.example:80"),
    ]
    assert store.evidence(10.0).edges[0].since == 7.0


@pytest.mark.parametrize(
    ("states", "on"),
    [
        ("dead dead running", (3,)),
        ("dead running dead", (2,)),
        ("dead dead dead", (2,)),
        ("lost exited stopped", (3,)),
        ("lost dead exited", (1,)),
    ],
)
def test_who_waits_for_a_role_does_not_wait_for_processes_that_were_replaced(states: str, on: tuple[int, ...]) -> None:
    """Three engines in succession, which ended 9, 2 and 4 seconds ago if they have ended."""
    names = ["controller", "engine-0", "engine-0.1", "engine-0.2"]
    infos = [ProcessInfo(name, "rollout" if rank else "controller", 0, "b") for rank, name in enumerate(names)]
    liveness = [Liveness[each.upper()] for each in ["running", *states.split()]]
    ended = [math.nan, *(age if state in (Liveness.DEAD, Liveness.EXITED) else math.nan
                         for age, state in zip((9.0, 2.0, 4.0), liveness[1:], strict=True))]  # fmt: skip
    store = MessageStore(aliases={"rollout engines": WaitAlias("rollout", WaitCondition.ANY)})
    store.receive(parsed(Roster("b", 1, tuple(infos))), 1.0)
    packed = b"".join(pack_process(state, ended=age) for state, age in zip(liveness, ended, strict=True))
    waits = tuple(WaitReport(0, target, since=1.0) for target in ("rollout engines", "rollout", "engine-0"))
    store.receive(parsed(StateReport("b", 1, packed, b"", ("",) * 4, waits=waits)), 10.0)
    assert [edge.on for edge in store.evidence(10.0).edges] == [on, on, (1,)]


def test_waiting_for_the_next_call_is_idle() -> None:
    record = WaitRecord("condition", "controller", "the next call", 1_000_000_000, None, 2_000_000_000, 1, "MainThread")
    assert wait_report(3, record, 4_000_000_000) == WaitReport(
        3, "controller", "condition", "the next call", 3.0, 2.0, idle=True
    )


def test_calls_are_kept_by_signature() -> None:
    store = MessageStore()
    store.receive(parsed(roster("a", [0])), 1.0)
    store.receive(parsed(replace(state("a", [0]), about={5: CollectiveCall("barrier")})), 1.0)
    store.receive(parsed(state("a", [0])), 2.0)
    assert store.evidence(2.0).calls.by_signature[5].operation == "barrier"


def test_a_rendezvous_waits_for_all_ranks_of_the_role() -> None:
    record = WaitRecord("rendezvous", "4 trainer ranks", "rank 1 joins policy-3", 10**9, None, 10**9, 1, "MainThread")
    store = MessageStore()
    store.receive(parsed(roster("a", [0, 1, 2, 3])), 1.0)
    store.receive(parsed(replace(state("a", [0, 1, 2, 3]), waits=(wait_report(1, record, 2 * 10**9),))), 10.0)
    edge = store.evidence(10.0).edges[0]
    assert (edge.on, edge.rendezvous, edge.outside) == ((0, 2, 3), "policy-3", "")
