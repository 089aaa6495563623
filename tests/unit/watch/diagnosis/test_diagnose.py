"""Verdicts on hand-written snapshots, one or more for each kind of fault."""

import json
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.evidence import CallTable, Evidence, MembershipTable, ProcessTable, WaitEdge
from lockstep.watch.diagnosis.evidence_types import (
    NO_EXIT_CODE,
    UNKNOWN,
    CollectiveCall,
    CommunicatorInfo,
    Liveness,
    ProcessInfo,
    ProcessNote,
    WaitCondition,
)
from lockstep.watch.diagnosis.verdict import (
    MIN_ACTION_CONFIDENCE,
    StallThresholds,
    Verdict,
    VerdictKind,
    VerdictLevel,
)

AT = 1000.0
NAN = float("nan")
DOCS = Path(__file__).parents[4] / "docs" / "diagnosis.md"


@dataclass
class One:
    """A process that was last active `still` seconds ago."""

    name: str
    liveness: Liveness = Liveness.RUNNING
    code: int = NO_EXIT_CODE
    ended: float = NAN
    still: float = 60.0
    cpu: float | None = None
    stack: float | None = None
    stage: str = "train"
    host: str = "a"
    note: ProcessNote = field(default_factory=ProcessNote)


@dataclass
class Group:
    """A communicator with the counts of each member, unchanged for `since` seconds."""

    name: str
    members: list[int]
    entered: list[int]
    completed: list[int]
    since: float = 60.0
    description: str = ""
    ranks: list[int] | None = None
    blind: bool = False
    calls: dict[tuple[int, int], tuple[CollectiveCall, str]] = field(default_factory=dict)
    """Calls and call sites by (process, sequence number)."""


ALL = CollectiveCall("all_reduce", "[4]", "float32")


def policy(count: int, **odd: One) -> list[One]:
    """Ranks that have been inactive for a minute; `p1=...` replaces one."""
    return [odd.get(f"p{i}", One(f"policy-{i}")) for i in range(count)]


def snapshot(processes: list[One], groups: list[Group] | None = None, edges: list[WaitEdge] | None = None) -> Evidence:
    groups = groups or []
    who = []
    for each in processes:
        role, _, rank = each.name.rpartition("-")
        who.append(
            ProcessInfo(each.name, role or each.name, int(rank) if rank.isdigit() else 0, each.host, 100 + len(who))
        )
    ago = [each.still for each in processes]
    columns = {
        "progressed_at": [AT - s for s in ago],
        "active_at": [AT - (s if each.cpu is None else each.cpu) for s, each in zip(ago, processes, strict=True)],
        "same_stack_since": [AT - (s if e.stack is None else e.stack) for s, e in zip(ago, processes, strict=True)],
    }
    rows: list[tuple[int, int, int]] = []
    about: dict[int, CollectiveCall] = {}
    sites: dict[tuple[int, int], str] = {}
    first_row = 0
    for group in groups:
        for (process, seq), (call, site) in group.calls.items():
            member = first_row + group.members.index(process)
            signature = hash((call.operation, call.shapes, call.dtype, call.root)) & (2**63 - 1)
            rows.append((member, seq, signature))
            about[signature] = call
            if site:
                sites[member, seq] = site
        first_row += len(group.members)
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    flat = [(g, i) for g in groups for i in range(len(g.members))]
    return Evidence(
        AT,
        ProcessTable(
            info=who,
            liveness=np.array([each.liveness for each in processes], dtype=np.int8),
            exit_code=np.array([each.code for each in processes], dtype=np.int32),
            ended_at=np.array([each.ended for each in processes]),
            progressed_at=np.array(columns["progressed_at"]),
            active_at=np.array(columns["active_at"]),
            same_stack_since=np.array(columns["same_stack_since"]),
            stage=[each.stage for each in processes],
            notes={i: each.note for i, each in enumerate(processes)},
        ),
        MembershipTable(
            info=[CommunicatorInfo(g.name, g.description, "gloo") for g in groups],
            starts=np.cumsum([0, *(len(g.members) for g in groups)]),
            process=np.array([g.members[i] for g, i in flat], dtype=np.int64),
            entered=np.array([g.entered[i] for g, i in flat], dtype=np.int64),
            completed=np.array([g.completed[i] for g, i in flat], dtype=np.int64),
            entered_at=np.array([AT - g.since for g, _ in flat]),
            completed_at=np.array([AT - g.since - 1 for g, _ in flat]),
            member_list=np.array([-1 if g.ranks is None else g.ranks[i] for g, i in flat], dtype=np.int64),
            uncertain=np.array([g.blind for g, _ in flat], dtype=np.bool_),
        ),
        CallTable(table[:, 0], table[:, 1], table[:, 2].astype(np.uint64), about, sites),
        edges or [],
    )


def fsdp(late: int | None = 1, count: int = 4, seq: int = 412, since: float = 60.0) -> Group:
    """A communicator of which all members but `late` are in all_reduce #412."""
    entered = [seq - (i == late) for i in range(count)]
    calls = {(i, seq): (ALL, "train.py:40 in step") for i in range(count) if i != late}
    return Group("fsdp", list(range(count)), entered, [seq - 1] * count, since, calls=calls)


def only(verdicts: list[Verdict]) -> Verdict:
    assert len(verdicts) == 1, [(str(v.kind), v.explanation) for v in verdicts]
    return verdicts[0]


def names(verdict: Verdict) -> list[str]:
    return [each.name for each in verdict.culprits]


def check(
    verdicts: list[Verdict], kind: VerdictKind, culprits: list[str], level: VerdictLevel = VerdictLevel.CONFIRMED
) -> Verdict:
    verdict = only(verdicts)
    assert (verdict.kind, verdict.level, names(verdict)) == (kind, level, culprits), verdict.explanation
    return verdict


def wait(process: int, *on: int, since: float = 60.0, **more: object) -> WaitEdge:
    return WaitEdge(process, on, since=AT - since, progressed_at=AT - since, **more)  # type: ignore[arg-type]


# --- one process


def test_a_stopped_rank_is_the_culprit() -> None:
    job = snapshot(policy(4, p1=One("policy-1", Liveness.STOPPED, still=5.0, host="b")), [fsdp(since=5.0)])
    verdict = check(diagnose(job), VerdictKind.ABSENT, ["policy-1"])
    assert verdict.confidence >= 0.9
    assert verdict.explanation.startswith("rank 1 (policy, host b) is stopped by a signal or a debugger")
    assert verdict.collective is not None
    assert (verdict.collective.communicator, verdict.collective.seq) == ("fsdp", 412)
    assert verdict.collective.call_site == "train.py:40 in step"


def test_a_rank_stopped_inside_the_collective_is_the_culprit() -> None:
    group = Group("fsdp", [0, 1, 2], [412] * 3, [411] * 3, since=5.0)
    check(
        diagnose(snapshot(policy(3, p1=One("policy-1", Liveness.STOPPED, still=5.0)), [group])),
        VerdictKind.ABSENT,
        ["policy-1"],
    )


def test_a_rank_stopped_for_a_moment_is_not_reported() -> None:
    """py-spy stops the process that it samples, and the process may have been inactive for long before."""
    assert diagnose(snapshot(policy(4, p1=One("policy-1", Liveness.STOPPED, still=0.2)), [fsdp(since=1.0)])) == []
    idle = One("policy-1", Liveness.STOPPED, still=300.0, ended=AT - 0.1)
    assert diagnose(snapshot(policy(4, p1=idle), [fsdp(since=1.0)])) == []


def test_a_rank_stopped_at_an_old_observation_is_not_reported() -> None:
    """The agent's report is late, so it is unknown whether the process is still stopped."""
    job = snapshot(policy(4, p1=One("policy-1", Liveness.STOPPED, still=300.0, ended=AT - 8.5)), [fsdp(since=9.0)])
    looked = replace(job, processes=replace(job.processes, seen_at=np.full(4, AT - 8.0)))
    assert diagnose(looked) == []
    check(diagnose(job), VerdictKind.ABSENT, ["policy-1"])


def test_a_suspended_job_is_no_fault() -> None:
    job = snapshot([One(f"policy-{i}", Liveness.STOPPED) for i in range(4)], [fsdp()])
    assert all(each.level is VerdictLevel.NOTICE for each in diagnose(job))


def test_a_killed_rank_is_the_culprit() -> None:
    dead = One("policy-1", Liveness.DEAD, -9, AT - 0.5, still=0.5)
    verdict = check(diagnose(snapshot(policy(4, p1=dead), [fsdp(since=0.4)])), VerdictKind.DEAD, ["policy-1"])
    assert verdict.confidence >= 0.9
    assert verdict.cause == "unknown"
    assert {each.what for each in verdict.alternatives} == {"host_oom", "external_kill"}
    assert verdict.collective is not None


def test_an_exit_with_an_unknown_code() -> None:
    """This is a finished job that was observed too late, unless a process waits."""
    gone = {f"p{rank}": One(f"policy-{rank}", Liveness.DEAD, NO_EXIT_CODE, AT - 0.5, still=0.5) for rank in range(4)}
    assert diagnose(snapshot(policy(4, **gone), [])) == []
    assert diagnose(snapshot(policy(4, p1=gone["p1"]), [fsdp(since=0.4)])) == []
    check(diagnose(snapshot(policy(4, p1=gone["p1"]), [fsdp(since=8.0)])), VerdictKind.DEAD, ["policy-1"])


def test_a_rank_killed_for_memory_has_the_class_of_its_note() -> None:
    dead = One("policy-1", Liveness.DEAD, -9, AT - 1, note=ProcessNote(cause="host_oom"))
    verdict = check(diagnose(snapshot(policy(4, p1=dead), [fsdp()])), VerdictKind.DEAD, ["policy-1"])
    assert verdict.cause == "host_oom"
    assert "memory" in verdict.fix


def test_reset_connections_are_effects_of_an_exception() -> None:
    odd = {
        "p0": One("policy-0", Liveness.DEAD, 1, AT - 4.0, note=RESET),
        "p1": One("policy-1", Liveness.DEAD, 1, AT - 3.0, note=ProcessNote(error="ValueError: bad label 7")),
        "p2": One("policy-2", Liveness.DEAD, -6, AT - 2.0),
    }
    verdict = check(diagnose(snapshot(policy(4, **odd), [fsdp()])), VerdictKind.DEAD, ["policy-1"])
    assert verdict.cause == "rank_exception_masked"
    assert "ValueError: bad label 7" in verdict.explanation


RESET = ProcessNote(error="RuntimeError: [pair.cc:547] Connection closed by peer [10.0.0.2]:4242")
GIVEN_UP = ProcessNote(
    error="RuntimeError: [unbound_buffer.cc:84] Timed out waiting 60000ms for recv operation to complete"
)


FREED = ProcessNote(
    error="lockstep.base.errors.CollectiveStalled: rank 1 has ended (OSError: No space left on device)",
    cause="storage_fault",
)
REFUSED = ProcessNote(
    error="lockstep.base.errors.CollectiveRefused: collective #412 does not match: rank 0 is about to enter ...",
    cause="rank_exception_masked",
)


def test_a_rank_that_ended_with_a_verdict_of_lockstep_is_not_accused() -> None:
    """This holds whatever the verdict's text says, and also if no other process is left as a culprit."""
    freed = One("policy-0", Liveness.DEAD, 1, AT - 1, note=FREED)
    stopped = One("policy-1", Liveness.STOPPED, still=60.0)
    check(diagnose(snapshot(policy(3, p0=freed, p1=stopped), [fsdp(count=3)])), VerdictKind.ABSENT, ["policy-1"])
    assert diagnose(snapshot(policy(3, p0=freed, p2=replace(freed, name="policy-2")))) == []


def test_secondary_errors_are_effects_whatever_class_was_noted() -> None:
    died = One("policy-1", Liveness.DEAD, -9, AT - 2.0, note=ProcessNote(error="killed by SIGKILL"))
    reset = One("policy-0", Liveness.DEAD, 1, AT - 2.1, note=replace(RESET, cause="rank_exception_masked"))
    check(diagnose(snapshot(policy(3, p0=reset, p1=died), [fsdp(count=3)])), VerdictKind.DEAD, ["policy-1"])


def test_a_refused_or_aborted_rank_need_not_be_wrong() -> None:
    """The later of two ranks is refused, and gloo aborts the receiver: the calls show which rank was wrong."""
    for code, note in ((1, REFUSED), (-6, ProcessNote(error="ended by SIGABRT"))):
        later = One("policy-0", Liveness.DEAD, code, AT - 0.5, note=note)
        for size, wrong in ((4, ["policy-1"]), (2, ["policy-0", "policy-1"])):
            group = Group("fsdp", list(range(size)), [412] * size, [411] * size)
            group.calls = calls_of(
                *((p, [ALL, ALL, CollectiveCall("barrier") if p == 1 else ALL]) for p in range(size))
            )
            check(diagnose(snapshot(policy(size, p0=later), [group])), VerdictKind.MISMATCH, wrong)


def test_a_mismatch_is_not_confirmed_while_a_third_rank_may_decide_it() -> None:
    """Two of three calls differ, and the third rank has not reached the call yet."""
    group = Group("fsdp", [0, 1, 2], [412, 412, 411], [411, 411, 411], 1.0)
    group.calls = calls_of((0, [ALL, ALL, ALL]), (1, [ALL, ALL, CollectiveCall("barrier")]), (2, [ALL, ALL]))
    late = ((0.2, VerdictLevel.NOTICE), (5.0, VerdictLevel.NOTICE), (50.0, VerdictLevel.CONFIRMED))
    for still, level in late:  # on a loaded host, a rank may get no CPU for seconds
        verdicts = diagnose(snapshot(policy(3, p2=One("policy-2", still=still)), [replace(group, since=still)]))
        assert [each.level for each in verdicts if each.kind is VerdictKind.MISMATCH] == [level]
    waits = wait(2, 0, kind="remote call", why="scores")
    verdicts = diagnose(snapshot(policy(3, p2=One("policy-2", still=5.0)), [replace(group, since=5.0)], [waits]))
    assert {each.level for each in verdicts if each.kind is VerdictKind.MISMATCH} == {VerdictLevel.CONFIRMED}
    beyond = replace(group, entered=[412, 412, 413], since=0.2)
    beyond.calls = {key: call for key, call in group.calls.items() if key[0] != 2}
    verdicts = diagnose(snapshot(policy(3, p2=One("policy-2", still=0.2)), [beyond]))
    assert {each.level for each in verdicts if each.kind is VerdictKind.MISMATCH} == {VerdictLevel.NOTICE}
    later = One("policy-0", Liveness.DEAD, 1, AT - 0.5, note=REFUSED)
    moving = One("policy-2", still=0.2)
    assert {v.level for v in diagnose(snapshot(policy(3, p0=later, p2=moving), [group]))} == {VerdictLevel.NOTICE}


def test_a_rank_that_skipped_a_collective_in_which_another_waits_is_the_outlier() -> None:
    """Rank 1 went to the barrier at the end while rank 0 waits for it in their own communicator; rank 2 is refused."""
    world = Group("world", [0, 1, 2], [6, 7, 7], [6, 6, 6], 30.0)
    world.calls = {
        (1, 7): (CollectiveCall("barrier"), ""),
        (2, 7): (CollectiveCall("broadcast", "[32]", "float32", 0), ""),
    }
    left = Group("left", [0, 1], [10, 9], [9, 9], 30.0)
    refused = One("policy-2", Liveness.DEAD, 1, AT - 30, note=REFUSED)
    verdict = check(diagnose(snapshot(policy(3, p2=refused), [world, left])), VerdictKind.MISMATCH, ["policy-1"])
    assert 0.6 <= verdict.confidence < 0.8


def test_members_with_different_lists_wait_for_each_other_in_the_rendezvous() -> None:
    def making(process: int, members: str) -> WaitEdge:
        others = tuple(int(each) for each in members.split(", ") if int(each) != process)
        return wait(process, *others, kind="rendezvous", rendezvous="late (3)", members=members)

    lists = {0: "0, 1, 2", 1: "0, 1", 2: "0, 1, 2"}
    edges = [making(process, members) for process, members in lists.items()]
    verdict = check(diagnose(snapshot(policy(3), edges=edges)), VerdictKind.MISMATCH, ["policy-1"])
    assert "creates late (3) with ranks 0, 1, but the others with ranks 0, 1, 2" in verdict.explanation
    assert verdict.confidence >= 0.8
    two = diagnose(snapshot(policy(3), edges=[making(0, "0, 1"), making(1, "0, 1, 2")]))
    assert two[0].confidence < 0.8
    agreed = [making(process, "0, 1, 2") for process in range(3)]
    assert [each for each in diagnose(snapshot(policy(3), edges=agreed)) if each.culprits] == []


def test_a_member_that_has_created_a_communicator_with_its_own_list_is_the_culprit() -> None:
    """The others wait for rank 0 in the rendezvous. It has created the communicator with rank 1 and is inside the first
    collective; rank 1 waits with the others, or has created the communicator as they do."""
    for first, second, culprits in ((7, UNKNOWN, ["policy-0"]), (9, UNKNOWN, []), (7, 9, ["policy-0"])):
        edges = [
            wait(process, *{0, 1, 2} - {process}, kind="rendezvous", rendezvous="late (3)", members="0, 1, 2",
                 member_list=9)
            for process in ((1, 2) if second == UNKNOWN else (2,))
        ]  # fmt: skip
        taken = snapshot(policy(3), [Group("late", [0, 1], [1, 0], [0, 0], ranks=[first, second])], edges)
        about = [replace(taken.communicators.info[0], rendezvous="late (3)")]
        verdicts = diagnose(replace(taken, communicators=replace(taken.communicators, info=about)))
        found = [each for each in verdicts if each.kind is VerdictKind.MISMATCH]
        assert [[f"policy-{culprit.rank}" for culprit in each.culprits] for each in found] == [culprits] * len(culprits)
        said = "creates late (3) with other ranks, but the others with ranks 0, 1, 2"
        assert all(said in each.explanation and each.confidence >= 0.8 for each in found)


def meeting(lists: dict[int, tuple[int, str]], created: dict[int, int]) -> list[tuple[list[str], float]]:
    """The culprits of mismatches and their confidence. `lists` are the member lists with which processes wait in a
    rendezvous, `created` those with which others have created the communicator."""
    edges = [
        wait(p, *{*map(int, text.split(", "))} - {p}, kind="rendezvous", rendezvous="late", members=text, member_list=n)
        for p, (n, text) in lists.items()
    ]
    group = Group("late", [*created], [1] * len(created), [1] * len(created), ranks=[*created.values()])
    taken = snapshot(policy(5), [group], edges)
    about = [replace(taken.communicators.info[0], rendezvous="late")]
    verdicts = diagnose(replace(taken, communicators=replace(taken.communicators, info=about)))
    return [(sorted(names(each)), each.confidence) for each in verdicts if each.kind is VerdictKind.MISMATCH]


def test_two_unknown_member_lists_that_differ_are_no_majority() -> None:
    assert meeting({2: (9, "0, 1, 2")}, {0: 7, 1: 8}) == [(["policy-0", "policy-1", "policy-2"], 0.45)]


def test_processes_that_nobody_awaits_have_no_vote_on_a_member_list() -> None:
    assert meeting({0: (9, "0, 1"), 1: (5, "0, 1, 4")}, {2: 5, 3: 5}) == [(["policy-0", "policy-1"], 0.45)]


def test_a_process_ended_by_its_launcher_is_no_culprit() -> None:
    """torchrun ends all others with SIGTERM when one has failed."""
    ended = ProcessNote(error="ended by SIGTERM from outside", cause="external_kill")
    odd = {
        "p0": One("policy-0", Liveness.DEAD, -15, AT - 2.0, note=ended),
        "p1": One(
            "policy-1",
            Liveness.DEAD,
            1,
            AT - 3.0,
            note=ProcessNote(error="ValueError: bad", cause="rank_exception_masked"),
        ),
    }
    check(diagnose(snapshot(policy(3, **odd), [fsdp(count=3)])), VerdictKind.DEAD, ["policy-1"])


def test_ranks_ended_by_their_launcher_are_effects_of_an_exit_seen_at_the_same_time() -> None:
    """Of a job that Lockstep did not start, a rank's error is not known, and one sample sees the ends of all."""
    ended = ProcessNote(error="ended by SIGTERM from outside", cause="external_kill")
    odd = {f"p{rank}": One(f"policy-{rank}", Liveness.DEAD, -15, AT - 2.0, note=ended) for rank in (0, 2)}
    odd["p1"] = One("policy-1", Liveness.DEAD, 1, AT - 2.0)
    check(diagnose(snapshot(policy(3, **odd), [fsdp(count=3)])), VerdictKind.DEAD, ["policy-1"])


def test_resets_are_effects_of_an_exit() -> None:
    """The neighbours of a rank that exits early see reset connections; no rank may be left waiting for it."""
    left, fell = One("policy-1", Liveness.EXITED, 0, AT - 9), One("policy-0", Liveness.DEAD, 1, AT - 8.5, note=RESET)
    two = Group("fsdp", [0, 1], [412, 411], [412, 411], 9.0)
    check(diagnose(snapshot([fell, left], [two])), VerdictKind.DEAD, ["policy-1"])
    check(diagnose(snapshot(policy(4, p0=fell, p1=left), [fsdp(since=9.0)])), VerdictKind.DEAD, ["policy-1"])


def test_timeouts_are_effects_of_an_inactive_rank() -> None:
    ranks = [One(f"policy-{i}", Liveness.DEAD, 1, AT - 2, note=GIVEN_UP) for i in range(4)]
    ranks[1] = One("policy-1", still=62.0, note=ProcessNote(where="score() at reward.py:31"))
    group = replace(fsdp(since=62.0), completed=[412, 411, 412, 412])
    verdict = check(diagnose(snapshot(ranks, [group])), VerdictKind.ABSENT, ["policy-1"])
    assert "has not entered all_reduce #412 on 'fsdp', which others gave up on" in verdict.explanation
    ranks[1] = One("policy-1", Liveness.STOPPED, still=62.0)
    check(diagnose(snapshot(ranks, [group])), VerdictKind.ABSENT, ["policy-1"])


def test_exceptions_prove_failure_classes() -> None:
    for error, cause in (
        ("OSError: [Errno 28] No space left on device: 'step-7.safetensors'", "storage_fault"),
        ("OSError: [Errno 98] Address already in use", "port_in_use"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "rank_oom"),
        ("RuntimeError: unable to write to file </dev/shm/x>: No space left on device (28)", "shm_too_small"),
    ):
        dead = One("policy-1", Liveness.DEAD, 1, AT - 1, note=ProcessNote(error=error))
        assert only(diagnose(snapshot(policy(2, p1=dead), [fsdp(count=2)]))).cause == cause


def test_a_process_that_lockstep_stopped_is_no_cause() -> None:
    dead = One("policy-1", Liveness.DEAD, -9, AT - 1, note=ProcessNote(ours=True))
    assert diagnose(snapshot(policy(4, p1=dead))) == []


def test_a_rank_that_exited_early_is_the_culprit() -> None:
    left = One("policy-1", Liveness.EXITED, 0, AT - 9)
    verdict = check(diagnose(snapshot(policy(4, p1=left), [fsdp(since=8.0)])), VerdictKind.DEAD, ["policy-1"])
    assert "ended with exit code 0" in verdict.explanation
    assert verdict.alternatives[0].what == "uneven_data"


def test_a_rank_that_has_just_exited_may_have_done_so_in_order() -> None:
    """The other one, which has waited for long, was observed some moments before it could see that."""
    just = One("policy-1", Liveness.EXITED, 0, AT - 0.5)
    assert diagnose(snapshot(policy(4, p1=just), [fsdp(since=30.0)])) == []
    early = replace(just, ended=AT - 3.1)
    check(diagnose(snapshot(policy(4, p1=early), [fsdp(since=30.0)])), VerdictKind.DEAD, ["policy-1"])


def test_an_extra_call_at_the_end_of_the_job() -> None:
    """All others exited normally: the waiting rank made an extra call."""
    ranks = [One(f"policy-{i}", Liveness.EXITED, 0, AT - 9) for i in range(4)]
    ranks[2] = One("policy-2")
    group = Group("fsdp", [0, 1, 2, 3], [411, 411, 412, 411], [411] * 4, 8.0)
    check(diagnose(snapshot(ranks, [group])), VerdictKind.MISMATCH, ["policy-2"])


def test_a_normal_exit_at_the_end_is_no_fault() -> None:
    ranks = [One("policy-0", Liveness.EXITED, 0, AT - 1), One("policy-1", still=0.1)]
    assert diagnose(snapshot(ranks, [Group("fsdp", [0, 1], [9, 9], [9, 9], 1.0)])) == []


# --- inactive and active processes


def test_an_inactive_rank_is_confirmed_with_its_line() -> None:
    asleep = One("policy-1", note=ProcessNote(where="score() at reward.py:31"), host="b", still=41.0)
    soon = diagnose(snapshot(policy(4, p1=replace(asleep, still=5.0)), [fsdp(since=5.0)]))
    notice = check(soon, VerdictKind.ABSENT, ["policy-1"], VerdictLevel.NOTICE)
    assert notice.confidence <= 0.6
    late = check(diagnose(snapshot(policy(4, p1=asleep), [fsdp(since=41.0)])), VerdictKind.ABSENT, ["policy-1"])
    assert late.explanation.startswith(
        "rank 1 (policy, host b) has not entered all_reduce #412 on 'fsdp'; "
        "it has been in score() at reward.py:31 for 41 s."
    )
    assert "2 others wait" in late.explanation
    assert late.confidence < 0.8


def test_a_stage_may_take_longer_if_it_did_before() -> None:
    """A stage that took one minute before may take three minutes."""
    known = One("policy-1", note=ProcessNote(expected_s=60.0), still=100.0)
    job = snapshot(policy(4, p1=known), [fsdp(since=100.0)])
    assert only(diagnose(job)).level is VerdictLevel.NOTICE
    assert only(diagnose(job, StallThresholds(history_factor=1.0))).level is VerdictLevel.CONFIRMED


def test_a_busy_loop_stays_a_notice_for_long() -> None:
    busy = One("policy-1", still=100.0, cpu=0.0)
    notice = check(
        diagnose(snapshot(policy(4, p1=busy), [fsdp(since=100.0)])),
        VerdictKind.ABSENT,
        ["policy-1"],
        VerdictLevel.NOTICE,
    )
    assert "policy-1: equal stacks for 100 s" in [each.text for each in notice.evidence]
    forever = replace(busy, still=401.0)
    check(diagnose(snapshot(policy(4, p1=forever), [fsdp(since=401.0)])), VerdictKind.ABSENT, ["policy-1"])


def test_a_wait_for_a_device_is_no_work_although_it_uses_a_core() -> None:
    waiting = One("policy-1", still=100.0, cpu=0.0, note=ProcessNote(waits_for_device=True))
    found = check(diagnose(snapshot(policy(4, p1=waiting), [fsdp(since=100.0)])), VerdictKind.ABSENT, ["policy-1"])
    assert found.confidence < MIN_ACTION_CONFIDENCE, "its device may compute"
    assert "policy-1: in a wait for its device for 100 s" in [each.text for each in found.evidence]
    just_begun = replace(waiting, stack=2.0)
    assert diagnose(snapshot(policy(4, p1=just_begun), [fsdp(since=100.0)]))[0].level is VerdictLevel.NOTICE


def test_a_busy_rank_is_never_acted_on() -> None:
    busy = One("policy-1", still=1000.0, cpu=0.0)
    found = check(diagnose(snapshot(policy(4, p1=busy), [fsdp(since=1000.0)])), VerdictKind.ABSENT, ["policy-1"])
    assert found.confidence < MIN_ACTION_CONFIDENCE


def test_a_checkpoint_to_a_slow_disk_is_not_confirmed() -> None:
    writing = One("policy-1", still=300.0, cpu=0.2, stack=0.3, stage="checkpoint")
    notice = only(diagnose(snapshot(policy(4, p1=writing), [fsdp(since=300.0)])))
    assert notice.level is VerdictLevel.NOTICE
    assert notice.confidence < 0.5


def test_a_slow_healthy_rank_is_slow() -> None:
    working = One("policy-1", still=0.1)
    group = fsdp(since=20.0)
    verdict = check(
        diagnose(snapshot(policy(4, p1=working), [group])), VerdictKind.SLOW, ["policy-1"], VerdictLevel.NOTICE
    )
    assert verdict.confidence < 0.5


def test_a_working_rank_is_not_reported() -> None:
    """The rank computes, its counters advance, and most others have not arrived either."""
    working = {f"p{i}": One(f"policy-{i}", still=0.5) for i in range(3)}
    group = Group("fsdp", [0, 1, 2, 3], [411, 411, 411, 412], [411] * 4, since=10.0)
    assert diagnose(snapshot(policy(4, **working), [group])) == []


def test_work_without_counter_progress_becomes_a_late_notice() -> None:
    """A rank uses CPU with changing stacks and without counter progress: the notice comes after ten times as long, or
    after the longest duration so far."""
    edges = [wait(0, 1, kind="call", why="step 7", since=20.0)]
    working = One("policy-1", still=20.0, cpu=0.1, stack=0.1)
    assert diagnose(snapshot([One("controller"), working], [], edges)) == []
    later = [replace(edges[0], since=AT - 40.0, progressed_at=AT - 40.0)]
    long = replace(working, still=40.0)
    told = check(
        diagnose(snapshot([One("controller"), long], [], later)), VerdictKind.ABSENT, ["policy-1"], VerdictLevel.NOTICE
    )
    assert told.confidence < 0.5
    known = replace(long, note=ProcessNote(expected_s=60.0))
    assert diagnose(snapshot([One("controller"), known], [], later)) == []


def test_a_running_transfer_is_not_reported() -> None:
    moving = [One(f"policy-{i}", still=10.0, cpu=0.1) for i in range(4)]
    assert diagnose(snapshot(moving, [fsdp(late=None, since=10.0)])) == []


def test_inactivity_counts_up_to_the_last_observation() -> None:
    """A host's reports stop for half a minute. Its processes do not count as inactive because of that."""
    job = snapshot(policy(4, p1=One("policy-1", still=60.0)), [fsdp(since=60.0)])
    late = replace(job, processes=replace(job.processes, seen_at=np.array([AT, AT - 30.0, AT, AT])))
    assert only(diagnose(late)).level is VerdictLevel.NOTICE
    assert only(diagnose(job)).level is VerdictLevel.CONFIRMED


def test_unknown_activity_is_no_proof() -> None:
    job = snapshot(policy(4), [fsdp(since=600.0)])
    job.processes.progressed_at[1] = job.processes.active_at[1] = job.processes.same_stack_since[1] = NAN
    notice = check(diagnose(job), VerdictKind.ABSENT, ["policy-1"], VerdictLevel.NOTICE)
    assert "whether it uses CPU, disk or network" in notice.collect


# --- mismatches


def calls_of(
    *each: tuple[int, list[CollectiveCall]], first_seq: int = 410
) -> dict[tuple[int, int], tuple[CollectiveCall, str]]:
    return {(p, first_seq + i): (call, "") for p, calls in each for i, call in enumerate(calls)}


def mismatch(odd: CollectiveCall, count: int = 4) -> list[Verdict]:
    group = Group("fsdp", list(range(count)), [412] * count, [411] * count)
    group.calls = calls_of(*((p, [ALL, ALL, odd if p == 1 else ALL]) for p in range(count)))
    return diagnose(snapshot(policy(count), [group]))


def test_calls_that_differ_in_operation_shape_dtype_or_root() -> None:
    for odd, words in (
        (
            CollectiveCall("all_gather", "[4]", "float32"),
            "called all_gather([4], float32) where the others called all_reduce",
        ),
        (CollectiveCall("all_reduce", "[5]", "float32"), "with shape [5] where the others have [4]"),
        (CollectiveCall("all_reduce", "[4]", "float64"), "with dtype float64 where the others have float32"),
        (CollectiveCall("all_reduce", "[4]", "float32", 1), "with root 1 where the others have None"),
    ):
        verdict = check(mismatch(odd), VerdictKind.MISMATCH, ["policy-1"])
        assert words in verdict.explanation
        assert verdict.confidence >= 0.9
        assert verdict.cause == "rank_divergent_branch"


def test_two_members_have_no_majority() -> None:
    verdict = check(mismatch(CollectiveCall("barrier"), count=2), VerdictKind.MISMATCH, ["policy-0", "policy-1"])
    assert verdict.confidence < 0.5
    assert verdict.collect


def test_the_schedule_decides_which_rank_is_right() -> None:
    group = Group(
        "fsdp", [0, 1], [412] * 2, [411] * 2, calls=calls_of((0, [ALL] * 3), (1, [ALL, ALL, CollectiveCall("barrier")]))
    )
    job = snapshot(policy(2), [group])
    right = int(job.calls.signature[0])
    scheduled = replace(job, calls=replace(job.calls, schedule={(0, 412): right}))
    assert check(diagnose(scheduled), VerdictKind.MISMATCH, ["policy-1"]).confidence >= 0.9


def test_an_abort_is_an_effect_of_a_mismatch() -> None:
    """gloo aborts the rank that receives the larger message."""
    group = Group("fsdp", [0, 1, 2], [412] * 3, [411] * 3, 5.0)
    odd = CollectiveCall("all_reduce", "[8]", "float32")
    group.calls = calls_of(*((p, [ALL, ALL, odd if p == 1 else ALL]) for p in range(3)))
    reset = ProcessNote(error="RuntimeError: Connection reset by peer")
    odd_ends = {
        "p0": One("policy-0", Liveness.DEAD, -6, AT - 4),
        "p2": One("policy-2", Liveness.DEAD, 1, AT - 3, note=reset),
    }
    check(diagnose(snapshot(policy(3, **odd_ends), [group])), VerdictKind.MISMATCH, ["policy-1"])


def test_a_skipped_call() -> None:
    norm, grads = CollectiveCall("all_reduce", "[1]", "float32"), CollectiveCall("reduce_scatter", "[64]", "float32")
    group = Group("fsdp", [0, 1, 2], [414, 413, 414], [411] * 3)
    group.calls = calls_of((0, [ALL, norm, grads, ALL]), (1, [ALL, grads, ALL]), (2, [ALL, norm, grads, ALL]))
    verdict = check(diagnose(snapshot(policy(3), [group])), VerdictKind.MISMATCH, ["policy-1"])
    assert "skipped all_reduce([1], float32)" in verdict.explanation
    assert verdict.collective is not None
    assert verdict.collective.seq == 411


def test_an_extra_call_of_the_same_kind() -> None:
    """gloo pairs the calls silently; only the call sites reveal it."""
    lines = ["a.py:1", "a.py:2", "a.py:3", "a.py:1", "a.py:2"]
    odd = ["a.py:1", "a.py:2", "a.py:2", "a.py:3", "a.py:1"]
    group = Group("fsdp", [0, 1, 2, 3], [415, 414, 415, 415], [414] * 4)
    for p in range(4):
        for i, line in enumerate(odd if p == 1 else lines):
            group.calls[p, 410 + i] = (ALL, line)
    verdict = check(diagnose(snapshot(policy(4), [group])), VerdictKind.MISMATCH, ["policy-1"])
    assert "an extra call at a.py:2" in verdict.explanation


def test_call_sites_that_differ_by_branch_are_no_mismatch() -> None:
    group = fsdp(late=1, since=60.0)
    for p in range(4):
        for seq in range(405, 412):
            group.calls[p, seq] = (ALL, "root.py:7" if p == 0 else "other.py:9")
    check(diagnose(snapshot(policy(4), [group])), VerdictKind.ABSENT, ["policy-1"])


def test_a_communicator_created_with_different_members() -> None:
    group = replace(fsdp(late=None), ranks=[4, 3, 4, 4])
    verdict = check(diagnose(snapshot(policy(4), [group])), VerdictKind.MISMATCH, ["policy-1"])
    assert "created 'fsdp' with a different member list" in verdict.explanation


# --- deadlocks


def test_two_communicators_in_a_different_order() -> None:
    a = Group("a", [0, 1, 2, 3], [6, 5, 6, 6], [5] * 4)
    b = Group("b", [0, 1, 2, 3], [3, 4, 3, 3], [3] * 4)
    verdict = check(diagnose(snapshot(policy(4), [a, b])), VerdictKind.CYCLE, ["policy-1"])
    assert any("#6 on 'a'" in each.text for each in verdict.evidence)
    assert any("#4 on 'b'" in each.text for each in verdict.evidence)


def test_an_asynchronous_collective_causes_no_deadlock() -> None:
    a, b = Group("a", [0, 1], [6, 5], [5] * 2), Group("b", [0, 1], [3, 4], [3] * 2)
    working = snapshot(policy(2, p1=One("policy-1", still=0.5)), [a, b])
    assert all(each.level is VerdictLevel.NOTICE for each in diagnose(working))
    known = replace(working, communicators=replace(working.communicators, blocked=np.array([1, -1, -1, 0], np.int8)))
    assert all(each.kind is not VerdictKind.CYCLE for each in diagnose(known))


def test_a_host_that_has_only_posted_ahead_may_go_on() -> None:
    """A receive that is posted ahead waits on the device alone: only inactivity proves that its host issues no more."""
    groups = [Group("a", [0, 1], [6, 5], [5] * 2, since=20.0), Group("b", [0, 1], [3, 4], [3] * 2, since=20.0)]

    def on_device(job: Evidence) -> Evidence:
        issued_at = np.where(job.communicators.entered > job.communicators.completed, AT - 20.0, NAN)
        columns = {"on_device": np.ones(4, np.bool_), "pending_at": issued_at}
        return replace(job, communicators=replace(job.communicators, **columns))

    short, both = snapshot([One(f"policy-{i}", still=20.0) for i in range(2)], groups), ["policy-0", "policy-1"]
    check(diagnose(short), VerdictKind.CYCLE, both)
    check(diagnose(on_device(short)), VerdictKind.CYCLE, both, VerdictLevel.NOTICE)
    check(diagnose(on_device(short), StallThresholds(still_s=10.0)), VerdictKind.CYCLE, both)


def test_two_ranks_that_wait_for_each_other_are_both_named() -> None:
    a, b = Group("a", [0, 1], [6, 5], [5] * 2), Group("b", [0, 1], [3, 4], [3] * 2)
    assert check(diagnose(snapshot(policy(2), [a, b])), VerdictKind.CYCLE, ["policy-0", "policy-1"]).confidence < 0.8


def test_a_rank_ahead_of_the_others_is_no_culprit() -> None:
    """Rank 0 makes an extra call on pair 0, so that its data parallel peers wait for it; rank 1 waits for the world."""
    world = Group("world", list(range(8)), [3, 4, 3, 3, 3, 3, 3, 3], [3] * 8, description="world")
    dp = Group("dp0", [0, 2, 4, 6], [7, 8, 8, 8], [7] * 4, description="dp")
    pair = Group("tp0", [0, 1], [6, 5], [5] * 2, description="tp")
    others = [Group(f"tp{i}", [2 * i, 2 * i + 1], [5, 5], [5] * 2, description="tp") for i in (1, 2, 3)]
    for groups in ([world, dp, pair, *others], [dp, world, pair, *others], [dp, pair, *others, world]):
        verdict = check(diagnose(snapshot(policy(8), groups)), VerdictKind.CYCLE, ["policy-0"])
        assert "has entered 6 collectives of 'tp0' where its peers have entered 5" in verdict.explanation


def test_all_outliers_are_named_if_the_counts_of_calls_disagree() -> None:
    """By the calls on tp rank 3 is the outlier among those of dp0, by the calls on pp rank 7 among those of dp1."""
    groups = [
        Group("dp0", [0, 1, 2, 3], [2, 2, 2, 1], [1] * 4, description="dp"),
        Group("dp1", [4, 5, 6, 7], [2, 2, 2, 1], [1] * 4, description="dp"),
        Group("tp0", [0, 1, 3, 7], [5, 5, 6, 5], [5] * 4, description="tp"),
        Group("tp1", [2, 4, 5, 6], [5] * 4, [5] * 4, description="tp"),
        Group("pp0", [3, 4, 5, 7], [3, 3, 3, 4], [3] * 4, description="pp"),
        Group("pp1", [0, 1, 2, 6], [3] * 4, [3] * 4, description="pp"),
    ]
    for each in (groups, groups[::-1]):
        verdict = check(diagnose(snapshot(policy(8), each)), VerdictKind.CYCLE, ["policy-3", "policy-7"])
        assert verdict.confidence < MIN_ACTION_CONFIDENCE
        assert "wait in a different order than the others" in verdict.explanation


def test_an_outlier_is_found_in_the_parallel_group_that_it_is_in() -> None:
    """Rank 3 skips a call on dp1; rank 0 waits on the parallel group dp0 for rank 1, and that one for rank 4."""
    dp = [
        Group("dp0", [0, 1, 2], [5, 4, 5], [4] * 3, description="dp"),
        Group("dp1", [3, 4, 5], [4, 5, 5], [4] * 3, description="dp"),
        Group("dp2", [6, 7, 8], [5] * 3, [5] * 3, description="dp"),
    ]
    pair = Group("pair", [1, 4], [3, 2], [2] * 2)
    world = Group("world", list(range(9)), [1, 1, 1, 2, 1, 1, 2, 2, 2], [1] * 9, description="world")
    verdict = check(diagnose(snapshot(policy(9), [*dp, pair, world])), VerdictKind.CYCLE, ["policy-3"])
    assert "has entered 4 collectives of 'dp1' where its peers have entered 5" in verdict.explanation


def test_a_deadlock_through_a_remote_call() -> None:
    """Rank 0 waits for the scorer, which waits for rank 0."""
    ranks = [One("policy-0"), One("policy-1"), One("reward-0")]
    edges = [wait(0, 2, kind="future", why="scores"), wait(2, 0, kind="queue", why="the next batch")]
    check(diagnose(snapshot(ranks, [fsdp(late=0, count=2)], edges)), VerdictKind.CYCLE, ["policy-0", "reward-0"])


def test_a_deadlock_with_an_active_process_is_a_notice() -> None:
    """Another thread of the scorer may be about to answer."""
    ranks = [One("policy-0"), One("reward-0", cpu=0.1)]
    edges = [wait(0, 1, kind="future", why="scores"), wait(1, 0, kind="queue", why="the next batch")]
    check(diagnose(snapshot(ranks, [], edges)), VerdictKind.CYCLE, ["policy-0", "reward-0"], VerdictLevel.NOTICE)


def test_a_wait_for_any_process_is_a_deadlock_only_in_a_knot() -> None:
    ranks = [One("a-0"), One("b-0"), One("c-0", still=0.1)]
    knot = [wait(0, 1, 1, needs=WaitCondition.ANY), wait(1, 0, needs=WaitCondition.ANY)]
    check(diagnose(snapshot(ranks, [], knot)), VerdictKind.CYCLE, ["a-0", "b-0"])
    out = [wait(0, 1, 2, needs=WaitCondition.ANY), wait(1, 0, needs=WaitCondition.ANY)]
    assert all(each.kind is not VerdictKind.CYCLE for each in diagnose(snapshot(ranks, [], out)))


# --- collectives that all members have entered


def test_a_rank_that_does_not_complete_a_collective_is_the_culprit() -> None:
    group = Group("fsdp", [0, 1, 2, 3], [412] * 4, [412, 411, 412, 412])
    verdict = check(diagnose(snapshot(policy(4), [group])), VerdictKind.DEVICE_LAG, ["policy-1"])
    assert "as 3 others have" in verdict.explanation


def test_a_collective_that_no_rank_completes_has_no_culprit() -> None:
    ranks = [One(f"policy-{i}", host="ab"[i // 2]) for i in range(4)]
    verdict = check(diagnose(snapshot(ranks, [fsdp(late=None)])), VerdictKind.IN_FLIGHT, [])
    assert verdict.alternatives[0].what == "network_blocked"
    moving = [replace(each, cpu=0.1) for each in ranks]
    assert only(diagnose(snapshot(moving, [fsdp(late=None)]))).level is VerdictLevel.NOTICE


def test_a_message_beside_one_that_is_held_up_proves_nothing() -> None:
    """A ring of batches: ranks 0 and 2 wait in theirs for rank 1. Between them, nothing is wrong."""
    pairs = [
        Group("0->1", [0, 1], [5, 4], [4, 4]),
        Group("1->2", [1, 2], [4, 5], [4, 4]),
        Group("2->0", [2, 0], [5, 5], [4, 4]),
    ]
    check(diagnose(snapshot(policy(3), pairs)), VerdictKind.ABSENT, ["policy-1"])


def test_the_common_host_of_stalled_collectives_is_named() -> None:
    """There are three hosts and two stalled collectives, and both collectives include host b."""
    ranks = [One(f"policy-{i}", host="aabbcc"[i]) for i in range(6)]
    one = Group("x", [0, 2], [5, 5], [4, 4])
    two = Group("y", [3, 4], [5, 5], [4, 4])
    fine = Group("z", [1, 5], [5, 5], [5, 5])
    check(diagnose(snapshot(ranks, [one, two, fine])), VerdictKind.IN_FLIGHT, ["policy-2", "policy-3"])


# --- missing evidence


def test_a_rank_of_unknown_progress_is_not_accused() -> None:
    group = fsdp()
    job = snapshot(policy(4, p1=One("policy-1", Liveness.UNSEEN)), [group])
    job.communicators.entered[1] = job.communicators.completed[1] = -1
    verdict = check(diagnose(job), VerdictKind.UNKNOWN, [], VerdictLevel.NOTICE)
    assert "policy-1" in verdict.collect[0]


def test_incomplete_counts_accuse_no_rank() -> None:
    verdict = only(diagnose(snapshot(policy(4), [replace(fsdp(), blind=True)])))
    assert (verdict.kind, verdict.culprits) == (VerdictKind.UNKNOWN, ())


def test_a_rank_that_may_be_in_a_receive_is_not_confirmed() -> None:
    pipeline = Group("pp", [1, 3], [7, 7], [7, 7], blind=True)
    verdict = check(
        diagnose(snapshot(policy(4), [fsdp(), pipeline])), VerdictKind.ABSENT, ["policy-1"], VerdictLevel.NOTICE
    )
    assert any("receive" in each for each in verdict.collect)


def test_a_count_older_than_the_wait_accuses_no_rank() -> None:
    job = snapshot(policy(4), [fsdp(since=4.0)])
    late = replace(job, processes=replace(job.processes, seen_at=np.array([AT, AT - 4.5, AT, AT])))
    assert only(diagnose(late)).kind is VerdictKind.UNKNOWN


def test_a_lost_host() -> None:
    ranks = policy(4, p1=One("policy-1", Liveness.LOST, host="b"))
    job = snapshot(ranks, [fsdp(since=20.0)])
    seen = replace(job, processes=replace(job.processes, seen_at=np.array([AT, AT - 20, AT, AT])))
    notice = check(diagnose(seen), VerdictKind.ABSENT, ["policy-1"], VerdictLevel.NOTICE)
    assert "host b no longer reports" in notice.explanation
    assert notice.alternatives[0].what == "network_blocked"
    check(diagnose(seen, StallThresholds(still_s=15.0)), VerdictKind.ABSENT, ["policy-1"])


def test_a_lost_host_whose_name_begins_another_hosts_name() -> None:
    ranks = policy(4, p1=One("policy-1", Liveness.LOST, host="node1"))
    gaps = ("no report from host node1 for 20 s", "no report from host node10 for 20 s")
    job = replace(snapshot(ranks, [fsdp(since=20.0)]), gaps=gaps)
    verdict = only(diagnose(job))
    assert [fact.text for fact in verdict.evidence if fact.text in gaps] == [gaps[0]]


def test_a_rank_that_never_joined() -> None:
    ranks = policy(4, p3=One("policy-3", Liveness.UNSEEN))
    edges = [
        wait(p, *(q for q in range(4) if q != p), kind="rendezvous", why="init_process_group", rendezvous="world")
        for p in range(3)
    ]
    verdict = check(diagnose(snapshot(ranks, [], edges)), VerdictKind.ABSENT, ["policy-3"])
    assert verdict.cause == "rendezvous_incomplete"
    assert verdict.confidence < 0.8


def test_a_rank_that_works_while_others_join() -> None:
    edges = [wait(p, *(q for q in range(4) if q != p), kind="rendezvous", rendezvous="world-3") for p in range(3)]
    verdict = check(diagnose(snapshot(policy(4), [], edges)), VerdictKind.ABSENT, ["policy-3"])
    assert verdict.cause == "rendezvous_incomplete"
    assert verdict.explanation.startswith("rank 3 (policy, host a) has not joined world-3")


# --- waits outside collectives


def test_the_chain_ends_at_a_stopped_scorer() -> None:
    ranks = [*policy(4), One("reward-0", Liveness.STOPPED, still=60.0, host="b")]
    edges = [wait(1, 4, kind="future", why="scores of step 7")]
    verdict = check(diagnose(snapshot(ranks, [fsdp()], edges)), VerdictKind.ABSENT, ["reward-0"])
    assert [(each.who, each.on) for each in verdict.waiting] == [("rank 0", "rank 1"), ("rank 1", "reward-0")]
    assert (
        "Rank 0 has waited 60 s for rank 1 (all_reduce #412 on 'fsdp'), which waits for reward-0 (future: scores of "
        "step 7)." in verdict.explanation
    )
    assert verdict.collective is not None
    assert verdict.collective.communicator == "fsdp"
    text = textwrap.indent(json.dumps(verdict.json(), indent=2), "    ")
    assert text in DOCS.read_text(), text


def test_an_engine_killed_while_others_continue() -> None:
    ranks = [One("controller"), One("engine-0", Liveness.DEAD, -9, AT - 1), One("engine-1", still=0.1)]
    edges = [wait(0, 1, 2, needs=WaitCondition.ANY, kind="queue", why="completions")]
    check(diagnose(snapshot(ranks, [], edges)), VerdictKind.DEAD, ["engine-0"])


def test_an_engine_stopped_while_others_continue() -> None:
    ranks = [One("controller"), One("engine-0", Liveness.STOPPED, still=9.0), One("engine-1", still=0.1)]
    edges = [wait(0, 1, 2, needs=WaitCondition.ANY, kind="queue", why="completions")]
    check(diagnose(snapshot(ranks, [], edges)), VerdictKind.ABSENT, ["engine-0"])


def test_a_long_rollout_has_no_confident_culprit() -> None:
    ranks = [One("controller"), One("engine-0", still=0.1), One("engine-1", still=500.0)]
    edges = [wait(0, 1, 2, needs=WaitCondition.ANY, kind="queue", why="completions", since=500.0)]
    assert all(
        each.level is VerdictLevel.NOTICE and each.confidence < 0.5 for each in diagnose(snapshot(ranks, [], edges))
    )


def test_an_outside_service_that_never_answers() -> None:
    ranks = policy(4)
    edges = [wait(1, outside="judge.example:8000", kind="http", why="scores of step 7")]
    verdict = only(diagnose(snapshot(ranks, [fsdp()], edges)))
    assert (verdict.kind, verdict.level, verdict.cause) == (
        VerdictKind.ABSENT,
        VerdictLevel.CONFIRMED,
        "remote_service_timeout",
    )
    assert names(verdict) == ["judge.example:8000"]
    assert verdict.culprits[0].rank is None
    slow = only(diagnose(snapshot(policy(4, p1=One("policy-1", cpu=0.1)), [fsdp()], edges)))
    assert slow.level is VerdictLevel.NOTICE


def test_an_outside_service_is_not_confirmed_before_the_callers_timeout() -> None:
    """A slow judge service cannot be observed, and the process that called it has a timeout."""
    edge = wait(1, outside="judge.example:8000", kind="http", why="scores of step 7")
    granted = only(diagnose(snapshot(policy(4), [fsdp()], [replace(edge, until=AT + 1.0)])))
    assert granted.level is VerdictLevel.NOTICE and names(granted) == ["judge.example:8000"]
    assert (
        only(diagnose(snapshot(policy(4), [fsdp()], [replace(edge, until=AT - 1.0)]))).level is VerdictLevel.CONFIRMED
    )


def test_a_dead_controller_explains_idle_workers() -> None:
    ranks = [One("controller", Liveness.DEAD, -9, AT - 30), *(One(f"policy-{i}") for i in range(3))]
    group = Group("fsdp", [1, 2, 3], [9, 8, 9], [8, 8, 8])
    edges = [wait(2, 0, why="the next call", idle=True)]
    check(diagnose(snapshot(ranks, [group], edges)), VerdictKind.DEAD, ["controller"])


def test_a_wait_for_the_next_request_is_no_deadlock() -> None:
    """The controller waits for two workers, one of which has answered and waits for its next call."""
    ranks = [One("controller"), One("policy-0"), One("policy-1", still=0.1)]
    edges = [wait(0, 1, 2, kind="call", why="step 7"), wait(1, 0, why="the next call", idle=True)]
    assert diagnose(snapshot(ranks, [], edges)) == []
    ranks[2] = One("policy-1", still=10.0)
    check(diagnose(snapshot(ranks, [], edges)), VerdictKind.ABSENT, ["policy-1"], VerdictLevel.NOTICE)


def test_a_process_that_waits_for_idle_processes_is_starved() -> None:
    ranks = [One("controller"), One("policy-0")]
    edges = [wait(0, 1, kind="call", why="step 7"), wait(1, 0, why="the next call", idle=True)]
    check(diagnose(snapshot(ranks, [], edges)), VerdictKind.STARVED, [])


@pytest.mark.parametrize(
    ("idle_s", "level"),
    [
        (0.04, None),
        (2.9, None),
        (3.1, VerdictLevel.NOTICE),
        (39.0, VerdictLevel.NOTICE),
        (41.0, VerdictLevel.CONFIRMED),
    ],
)
def test_a_process_is_not_starved_before_what_it_waits_for_has_been_idle_for_as_long(
    idle_s: float, level: VerdictLevel | None
) -> None:
    """A worker has just answered; its client had not seen that yet when it was observed, some milliseconds earlier."""
    ranks = [One("controller", still=600.0), One("policy-0", still=idle_s)]
    answered = replace(wait(1, 0, why="the next call", idle=True), since=AT - idle_s)
    edges = [replace(wait(0, 1, kind="call", why="step 7"), since=AT - 600.0), answered]
    found = diagnose(snapshot(ranks, [], edges))
    assert [each.level for each in found] == ([level] if level is not None else [])


def test_waits_of_background_threads_block_no_process() -> None:
    ranks = [One("policy-0", still=0.1), One("reward-0")]
    assert diagnose(snapshot(ranks, [], [wait(0, 1, main=False)])) == []


# --- several failures


def test_two_culprits_of_one_wait_are_one_verdict() -> None:
    group = Group("fsdp", [0, 1, 2, 3], [412, 411, 412, 411], [411] * 4)
    odd = {"p1": One("policy-1", Liveness.STOPPED), "p3": One("policy-3", Liveness.STOPPED)}
    check(diagnose(snapshot(policy(4, **odd), [group])), VerdictKind.ABSENT, ["policy-1", "policy-3"])


def test_two_incidents_are_two_verdicts() -> None:
    ranks = [
        *policy(4, p1=One("policy-1", Liveness.STOPPED)),
        One("critic-0", Liveness.DEAD, -9, AT - 2),
        One("critic-1"),
    ]
    verdicts = diagnose(snapshot(ranks, [fsdp(), Group("critic", [4, 5], [3, 4], [3, 3])]))
    assert {(each.kind, *names(each)) for each in verdicts} == {
        (VerdictKind.ABSENT, "policy-1"),
        (VerdictKind.DEAD, "critic-0"),
    }


def test_a_healthy_job_has_no_verdicts() -> None:
    ranks = [One(f"policy-{i}", still=0.2) for i in range(4)]
    assert diagnose(snapshot(ranks, [fsdp(since=0.5)])) == []
    assert diagnose(snapshot(ranks)) == []
    assert diagnose(snapshot([])) == []


def test_a_complete_rendezvous_that_does_not_end_is_reported() -> None:
    """This happens if members create a communicator with different member lists."""
    edges = [wait(p, *(q for q in range(3) if q != p), kind="rendezvous", rendezvous="late") for p in range(3)]
    verdict = check(diagnose(snapshot(policy(3), edges=edges)), VerdictKind.UNKNOWN, [])
    assert "all ranks have joined late, but none proceeds" in verdict.explanation.lower()
    assert verdict.confidence <= 0.5 and verdict.collect
    soon = [replace(each, since=AT - 1.0, progressed_at=AT - 1.0) for each in edges]
    assert diagnose(snapshot([replace(each, still=1.0) for each in policy(3)], edges=soon)) == []
