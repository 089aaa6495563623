"""A process with workers of its own, such as an engine in a rank: verdicts name the process, with the worker's line."""

from dataclasses import replace

import numpy as np
from test_diagnose import AT, Group, One, fsdp, policy, snapshot

from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.evidence import Evidence, with_parts
from lockstep.watch.diagnosis.evidence_types import Liveness, ProcessInfo, ProcessNote
from lockstep.watch.diagnosis.verdict import Verdict, VerdictKind, VerdictLevel

LINE = "generate() at engine.py:7"


def of_rank(evidence: Evidence, parts: dict[int, str]) -> Evidence:
    """The evidence with some processes as parts of others."""
    info = [
        replace(each, role=parts[number], parent=parts[number]) if number in parts else each
        for number, each in enumerate(evidence.processes.info)
    ]
    return replace(evidence, processes=replace(evidence.processes, info=info))


def job(hanging: One, since: float = 60.0) -> Evidence:
    """Four ranks wait for rank 1, which waits for its two workers; the first worker waits for the second, `hanging`."""
    processes = [*policy(4, p1=One("policy-1", note=ProcessNote(where="ask() at train.py:9"))), One("w-0"), hanging]
    tp = Group("tp", [4, 5], [3, 2], [2, 2], since)
    return of_rank(snapshot(processes, [fsdp(late=1), tp]), {4: "policy-1", 5: "policy-1"})


def named(verdict: Verdict) -> list[tuple[str, int | None, str]]:
    return [(each.name, each.rank, each.where) for each in verdict.culprits]


def test_the_rank_is_named_once_with_the_line_of_its_worker() -> None:
    (found,) = diagnose(job(One("w-1", note=ProcessNote(where=LINE))))
    assert (found.kind, found.level) == (VerdictKind.ABSENT, VerdictLevel.CONFIRMED)
    assert named(found) == [("policy-1", 1, LINE)]
    assert found.collective is not None and (found.collective.communicator, found.collective.seq) == ("fsdp", 412)
    assert f"rank 1 (policy, host a) has not entered all_reduce #412 on 'fsdp'; its child 105 has been in {LINE}" in (
        found.explanation
    )


def test_a_worker_that_only_its_siblings_wait_for_is_named_as_its_rank() -> None:
    evidence = of_rank(
        snapshot(
            [One("policy-0"), One("w-0"), One("w-1", note=ProcessNote(where=LINE))],
            [Group("tp", [1, 2], [3, 2], [2, 2])],
        ),
        {1: "policy-0", 2: "policy-0"},
    )
    (found,) = diagnose(evidence)
    assert named(found) == [("policy-0", 0, LINE)]
    assert "child 102 of policy-0 (host a) has not entered" in found.explanation


def test_the_death_of_a_worker_is_its_ranks() -> None:
    (found,) = diagnose(job(One("w-1", Liveness.DEAD, -9, AT - 50)))
    assert (found.kind, found.level) == (VerdictKind.DEAD, VerdictLevel.CONFIRMED)
    assert named(found) == [("policy-1", 1, "")]
    assert "child 105 of rank 1 (policy, host a) was killed by SIGKILL" in found.explanation


def test_workers_that_end_with_their_rank_are_not_named_beside_it() -> None:
    processes = [
        *policy(4, p1=One("policy-1", Liveness.DEAD, -9, AT - 50)),
        *(One(f"w-{i}", Liveness.DEAD, -9, AT - 50.2) for i in range(2)),
    ]
    evidence = of_rank(
        snapshot(processes, [fsdp(late=1), Group("tp", [4, 5], [2, 2], [2, 2])]), {4: "policy-1", 5: "policy-1"}
    )
    (found,) = diagnose(evidence)
    assert named(found) == [("policy-1", 1, "")] and "child" not in found.explanation


def test_workers_of_a_stopped_rank_and_of_a_lost_host_are_not_named() -> None:
    for liveness in (Liveness.STOPPED, Liveness.LOST):
        evidence = job(One("w-1", liveness, ended=AT - 50))
        processes = evidence.processes
        life = processes.liveness.copy()
        life[[1, 4, 5]] = liveness
        ended = np.where(life == liveness, AT - 50, np.nan)
        (found,) = diagnose(replace(evidence, processes=replace(processes, liveness=life, ended_at=ended)))
        assert named(found)[0][:2] == ("policy-1", 1) and len(found.culprits) == 1
        assert "child" not in found.explanation


def test_workers_that_deadlock_are_one_culprit() -> None:
    first, second = Group("tp", [4, 5], [3, 2], [2, 2]), Group("pp", [4, 5], [0, 1], [0, 0])
    evidence = of_rank(
        snapshot([*policy(4), One("w-0"), One("w-1")], [fsdp(late=1), first, second]), {4: "policy-1", 5: "policy-1"}
    )
    found = diagnose(evidence)[0]
    assert found.kind is VerdictKind.CYCLE and [each.name for each in found.culprits] == ["policy-1"]


def test_the_parts_of_a_process_are_found_by_host_and_name() -> None:
    info = [
        ProcessInfo("rank-0", "rank", 0, "a", 1), ProcessInfo("rank-0.5", "rank-0", 0, "a", 5, "rank-0"),
        ProcessInfo("rank-0", "rank", 0, "b", 1), ProcessInfo("rank-0.5", "rank-0", 0, "b", 5, "rank-0"),
    ]  # fmt: skip
    assert with_parts(info, {("b", "rank-0")}) == [2, 3]
    assert with_parts(info, {("a", "rank-0.5")}) == [1]


def test_what_a_worker_proves_of_its_rank_it_does_not_prove_of_another() -> None:
    """Ranks 1 and 2 are both late, and rank 1 only because its worker is stopped."""
    late = Group("fsdp", [0, 1, 2, 3], [412, 411, 411, 412], [411] * 4)
    processes = [*policy(4), One("w-0", still=10.0), One("w-1", Liveness.STOPPED, ended=AT - 50)]
    processes[1].still = processes[2].still = 10.0  # too short for proof by inactivity
    tp = Group("tp", [4, 5], [3, 2], [2, 2])
    found = diagnose(of_rank(snapshot(processes, [late, tp]), {4: "policy-1", 5: "policy-1"}))
    sure = [each for each in found if each.level is VerdictLevel.CONFIRMED]
    assert [named(each)[0][:2] for each in sure] == [("policy-1", 1)] and len(sure[0].culprits) == 1
    assert all(each.confidence <= 0.6 for each in found if each not in sure)
