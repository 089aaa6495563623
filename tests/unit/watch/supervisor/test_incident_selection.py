"""Every culprit is asked, and a process that waits for it directly, found by brute force; the number is bounded."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.diagnosis_cost import healthy, in_world, stalled
from lockstep.watch.diagnosis.evidence import CallTable, Evidence, MembershipTable, ProcessTable, WaitEdge
from lockstep.watch.diagnosis.evidence_types import NO_EXIT_CODE, CommunicatorInfo, Liveness, ProcessInfo, WaitCondition
from lockstep.watch.diagnosis.verdict import Culprit, StalledCollective, Verdict, VerdictKind, VerdictLevel, WaitLink
from lockstep.watch.supervisor import incident_selection
from lockstep.watch.supervisor.incident_selection import (
    MAX_CULPRITS,
    MAX_PEERS,
    MAX_WAITERS,
    SMALL_JOB,
    select_processes,
)

AT = 100.0


def verdict(evidence: Evidence, culprits: list[int], **more: object) -> Verdict:
    info = evidence.processes.info
    named = tuple(Culprit(info[i].rank, info[i].role, info[i].host, info[i].pid, "", info[i].name) for i in culprits)
    return Verdict(VerdictKind.ABSENT, VerdictLevel.CONFIRMED, named, **more)  # type: ignore[arg-type]


@st.composite
def jobs(draw: st.DrawFn) -> Evidence:
    """Random communicators, counts, ends and waits outside of collectives, as no real job would have them."""
    count = draw(st.integers(2, 14))
    ranks = st.integers(0, count - 1)
    groups = draw(st.lists(st.lists(ranks, min_size=1, max_size=count, unique=True), max_size=4))
    rows = sum(map(len, groups))
    entered = np.array(draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)), dtype=np.int64)
    inside = np.array(draw(st.lists(st.booleans(), min_size=rows, max_size=rows)), dtype=np.int64)
    lives = draw(st.lists(st.sampled_from([Liveness.RUNNING] * 4 + [*Liveness][:4]), min_size=count, max_size=count))
    waits = draw(st.lists(st.tuples(ranks, st.lists(ranks, min_size=1, max_size=3, unique=True)), max_size=6))
    nothing, since = np.full(count, np.nan), np.full(rows, AT - 20)
    return Evidence(
        AT,
        ProcessTable(
            [ProcessInfo(f"policy-{i}", "policy", i, f"host{i // 3}", i + 1) for i in range(count)],
            np.array(lives, dtype=np.int8), np.full(count, NO_EXIT_CODE), nothing, nothing, nothing, nothing,
        ),
        MembershipTable(
            [CommunicatorInfo(f"c{i}") for i in range(len(groups))],
            np.concatenate([[0], np.cumsum([len(each) for each in groups])]).astype(np.int64),
            np.array([rank for each in groups for rank in each], dtype=np.int64),
            entered, np.maximum(entered - inside, 0), since, since,
        ),
        CallTable(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64), {}),
        [WaitEdge(who, tuple(on), kind="future", since=AT - 20, needs=WaitCondition.ANY) for who, on in waits],
    )  # fmt: skip


def waits_of(evidence: Evidence, culprit: int) -> set[int]:
    """The processes that wait for a process directly, process by process."""
    members, liveness = evidence.communicators, evidence.processes.liveness
    found = {
        edge.process for edge in evidence.edges if culprit in edge.on and liveness[edge.process] == Liveness.RUNNING
    }
    for start, end in zip(members.starts[:-1], members.starts[1:], strict=True):
        for own in range(start, end):
            for row in range(start, end):
                seq = members.completed[row] + 1
                waiting = members.entered[row] >= seq and liveness[members.process[row]] == Liveness.RUNNING
                gone = liveness[culprit] != Liveness.RUNNING and members.completed[own] < seq
                if members.process[own] == culprit and waiting and (members.entered[own] < seq or gone):
                    found.add(int(members.process[row]))
    return found


@settings(max_examples=300, deadline=None)
@given(jobs(), st.data())
def test_every_culprit_and_a_waiter_of_each_is_asked(evidence: Evidence, data: st.DataObject) -> None:
    count = len(evidence.processes.info)
    culprits = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=4, unique=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incident_selection, "SMALL_JOB", 0)
        patch.setattr(incident_selection, "MAX_PEERS", 0)
        selection = select_processes(evidence, verdict(evidence, culprits))
    assert set(selection.culprits) == set(culprits) and selection.culprits_left_out == 0
    assert len(selection.asked) == len(set(selection.asked))
    for culprit in culprits:
        waiting = waits_of(evidence, culprit)
        assert not waiting or waiting & set(selection.asked), f"none of {waiting} waits for {culprit}"


@pytest.mark.parametrize("many", [1, 40, 700])
def test_the_number_is_bounded_and_the_sample_spread_over_the_hosts(many: int) -> None:
    evidence = stalled(healthy(2048), 5)
    selection = select_processes(evidence, verdict(evidence, list(range(5, 5 + many))))
    assert len(selection.culprits) == min(many, MAX_CULPRITS)
    assert selection.culprits_left_out == many - len(selection.culprits)
    assert len(selection.waiters) <= MAX_WAITERS and len(selection.peers) == MAX_PEERS and not selection.complete
    hosts = {evidence.processes.info[index].host for index in selection.peers}
    assert len(hosts) == MAX_PEERS


def test_all_of_a_small_job_are_asked() -> None:
    small = jobs().filter(lambda each: len(each.processes.info) > 1)
    assert SMALL_JOB >= 64

    @settings(max_examples=30, deadline=None)
    @given(small)
    def check(evidence: Evidence) -> None:
        selection = select_processes(evidence, verdict(evidence, [0]))
        assert selection.complete and sorted(selection.asked) == list(range(len(evidence.processes.info)))

    check()


def test_without_a_culprit_those_in_the_collective_are_asked() -> None:
    """All are inside and none completes."""
    evidence = in_world(healthy(1024), 0)
    world = StalledCollective(evidence.communicators.info[0].name, 412)
    selection = select_processes(evidence, verdict(evidence, [], collective=world))
    assert selection.culprits == () and len(selection.waiters) == 1


def test_a_process_that_waits_for_a_service_outside_the_job_is_asked() -> None:
    evidence = healthy(1024)
    link = WaitLink("policy-77", "judge.example:8000", "http", 60.0)
    selection = select_processes(evidence, verdict(evidence, [], waiting=(link,)))
    assert selection.waiters == (77,)
