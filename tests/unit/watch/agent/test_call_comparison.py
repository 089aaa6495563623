"""Calls of members on one host are compared also when they have completed, and differ only where that is proven."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.watch.agent import call_comparison
from lockstep.watch.agent.call_comparison import CallComparison
from lockstep.watch.agent.process_monitor import ProcessMonitor
from lockstep.watch.agent.report_builder import ReportBuilder
from lockstep.watch.beacon import writer
from lockstep.watch.beacon.beacon_records import FLAG_FAILED, FLAG_P2P, FLAG_UNSURE, RINGS_AT
from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.evidence_types import Liveness
from lockstep.watch.diagnosis.verdict import VerdictKind, VerdictLevel
from lockstep.watch.supervisor.evidence_builder import HostState, build_evidence
from lockstep.watch.supervisor.job_layout import build_layout
from tests.unit.watch.agent.recorded_members import IDENTITY, Member


@pytest.fixture
def members(tmp_path, monkeypatch) -> Iterator[Callable[[int], list[Member]]]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    made: list[Member] = []

    def make(size: int) -> list[Member]:
        made.extend(Member(rank, size) for rank in range(size))
        return made[-size:]

    yield make
    for each in made:
        each.beacon.close(remove=True)
    writer._current = writer._NullBeacon()


def update(comparison: CallComparison, members: list[Member]) -> list[list[tuple[int, str]]]:
    """Updates the comparison; returns the reported calls of each member: sequence number and shapes."""
    states = [each.state() for each in members]
    rows = [(state, state.beacon.communicators[0]) for state in states]
    comparison.update(rows)
    return [[(call.seq, call.shapes) for call in comparison.calls_of(*row)] for row in rows]


def test_a_completed_call_that_differs_is_reported_from_there_on(members):
    ranks, comparison = members(3), CallComparison()
    for step in range(1, 40):
        for each in ranks:
            each.call("[12]" if (each.rank, step) == (1, 20) else "[4]")
        shown = update(comparison, ranks)
    assert shown[0] == [(seq, "[4]") for seq in range(20, 28)] == shown[2]
    assert shown[1] == [(20, "[12]"), *shown[0][1:]]
    assert comparison.found_difference


def test_calls_whose_number_is_not_final_are_not_compared(members):
    ranks, comparison = members(2), CallComparison()
    for each in ranks:
        for _ in range(9):
            each.call(f"[{each.rank}]")
    one = ranks[1].slot
    for number in range(1, 10):  # c10d is asked, and its number is another one: the calls since then are unsure
        one.words[one.call_at(number) + 7] |= FLAG_UNSURE
    assert update(comparison, ranks) == [[], []] and not comparison.found_difference


def test_the_newest_calls_count_when_the_recorder_had_time_to_check_them(members, monkeypatch):
    ranks, comparison = members(2), CallComparison()
    for each in ranks:
        each.call(f"[{each.rank + 1}]")
    assert update(comparison, ranks) == [[], []]
    monkeypatch.setattr("lockstep.watch.beacon.call_follower.SETTLED_NS", 1)
    monkeypatch.setattr(call_comparison, "PATIENCE_S", 0.0)
    assert update(comparison, ranks) == [[(1, "[1]")], [(1, "[2]")]]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"flags": FLAG_P2P}, "messages are matched by pair"),
        ({"flags": FLAG_FAILED}, "after a failure, the numbers of members may differ"),
        ({"lead": 1}, "c10d counts the call differently on this rank"),
    ],
)
def test_what_proves_no_difference_is_not_reported(members, wrong, why):
    ranks, comparison = members(2), CallComparison()
    for step in range(60):
        for each in ranks:
            if each.rank == 1 and step >= 20:
                each.call("[9]", **wrong)
            else:
                each.call()
        assert update(comparison, ranks) == [[], []], why


def test_ended_and_blind_members_are_not_compared(members):
    ranks, comparison = members(2), CallComparison()
    for each in ranks:
        for _ in range(20):
            each.call(f"[{each.rank}]")
    states = [each.state() for each in ranks]
    rows = [(state, state.beacon.communicators[0]) for state in states]
    states[0].liveness = Liveness.DEAD
    comparison.update(rows)
    states[0].liveness = Liveness.RUNNING
    comparison.update([rows[0], (rows[1][0], replace(rows[1][1], blind=True))])
    assert not comparison.found_difference
    comparison.update(rows)
    assert comparison.found_difference, "calls of running members are compared"


@settings(max_examples=30, deadline=None)
@given(
    pace=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400)), min_size=3, max_size=12),
    wrong=st.none() | st.tuples(st.integers(0, 2), st.integers(1, 900)),
)
def test_members_at_any_pace_are_silent_unless_one_differs(tmp_path_factory, pace, wrong):
    """Members run ahead of each other and wrap around their rings; each call is a function of its number."""
    os.environ["LOCKSTEP_BEACONS"] = str(tmp_path_factory.mktemp("beacons"))
    ranks, comparison = [Member(rank, 3) for rank in range(3)], CallComparison()
    try:
        for rank, count in pace:
            for _ in range(count):
                ranks[rank].call("[77]" if wrong == (rank, ranks[rank].seq + 1) else f"[{ranks[rank].seq % 7}]")
            update(comparison, ranks)
        if wrong is None:
            assert not comparison.found_difference and not comparison._differences
        for identity, found in comparison._differences.items():
            assert (identity, found.seq) == (IDENTITY, wrong[1])
    finally:
        for each in ranks:
            each.beacon.close(remove=True)
        del os.environ["LOCKSTEP_BEACONS"]


def test_a_difference_is_dropped_when_its_communicator_has_been_destroyed_on_all_ranks(members):
    ranks, comparison = members(2), CallComparison()
    for step in range(40):
        for each in ranks:
            each.call(f"[{each.rank}]" if step == 20 else "[4]")
    assert update(comparison, ranks)[0] and comparison.found_difference
    states = [each.state() for each in ranks]
    rows = [(state, state.beacon.communicators[0]) for state in states]
    for state in states:
        state.liveness = Liveness.DEAD
    comparison.update(rows)
    assert comparison.found_difference, "it explains why they have ended"
    comparison.update([])
    assert not comparison.found_difference


@pytest.mark.parametrize("one_by_one", [False, True])
def test_calls_of_a_communicator_that_was_created_again_are_not_compared_with_the_old_ones(members, one_by_one):
    ranks, comparison = members(2), CallComparison()

    def rounds(some: list[Member], what: str) -> None:
        for _ in range(30):
            for each in some:
                each.call(what)

    rounds(ranks, "[4]")
    assert update_newest(comparison, ranks) == [[], []]
    for some in [[each] for each in ranks] if one_by_one else [ranks]:  # an update may see a part of the ranks
        for each in some:
            each.reopen()
        rounds(some, "[9]")
        assert update_newest(comparison, ranks) == [[], []]
    assert not comparison._differences
    rounds(ranks[:1], "[8]")
    rounds(ranks[1:], "[7]")
    assert update_newest(comparison, ranks)[0][0] == (31, "[8]"), "the new ones are compared with each other"


def update_newest(comparison: CallComparison, members: list[Member]) -> list[list[tuple[int, str]]]:
    """Like `update`, for the communicator that each member has created last."""
    states = [each.state() for each in members]
    rows = [(state, [c for c in state.beacon.communicators if not c.closed][-1]) for state in states]
    comparison.update(rows)
    return [[(call.seq, call.shapes) for call in comparison.calls_of(*row)] for row in rows]


def test_an_unreadable_beacon_excludes_its_member_and_is_logged_once(members, tmp_path, caplog):
    ranks, comparison = members(3), CallComparison()
    short = tmp_path / "short"
    for step in range(40):
        for each in ranks:
            each.call(f"[{each.rank}]" if step == 20 else "[4]")
    data = ranks[1].beacon.path.read_bytes()[: RINGS_AT + 100]  # cut within a record
    short.write_bytes(data)
    states = [each.state() for each in ranks]
    states[1].beacon = replace(states[1].beacon, path=short)
    rows = [(state, state.beacon.communicators[0]) for state in states]
    for _ in range(3):
        comparison.update(rows)
    assert [call.shapes for call in comparison.calls_of(*rows[2])][:1] == ["[2]"]
    assert comparison.calls_of(*rows[1]) == [] and len(caplog.records) == 1


def test_an_update_reads_a_bounded_number_of_calls_and_reaches_all_communicators_in_turn(members, monkeypatch):
    monkeypatch.setattr(call_comparison, "MOST_READ", 1)
    ranks, comparison = members(2), CallComparison()
    for identity in range(IDENTITY + 1, IDENTITY + 4):
        for each in ranks:
            each.slot = each.rings.open_slot(identity, 22, "0", "fsdp", "gloo", 2, each.rank)
            each.seq = 0
            for step in range(20):
                each.call(f"[{each.rank}]" if step == 10 else "[4]")
    states = [each.state() for each in ranks]
    rows = [(state, record) for state in states for record in state.beacon.communicators]
    for count in range(1, 4):
        comparison.update(rows)
        assert len(comparison._differences) == count


def test_a_member_keeps_few_calls(members):
    ranks, comparison = members(2), CallComparison()
    for _ in range(20):
        for each in ranks:
            for _ in range(100):
                each.call()
        update(comparison, ranks)
    assert all(len(each.calls) <= 1024 for each in comparison._members.values())
    assert len(comparison._communicators[IDENTITY].usual) <= 1024


def test_a_silent_difference_gives_a_confirmed_mismatch_while_the_job_runs_on(members):
    ranks, reports, monitor, about = members(3), ReportBuilder("a"), ProcessMonitor("run-1"), {}
    for step in range(1, 60):
        for each in ranks:
            each.call("[12]" if (each.rank, step) == (2, 31) else "[4]")
        monitor.tracked = {state.name: state for state in (each.state() for each in ranks)}
        roster, state = reports.build(monitor)
        about |= state.about
    evidence = build_evidence(build_layout([roster]), [HostState(roster, state, 10.0, about)], 10.0)
    (verdict,) = diagnose(evidence)
    assert (verdict.kind, verdict.level, verdict.confidence) == (VerdictKind.MISMATCH, VerdictLevel.CONFIRMED, 0.95)
    assert [each.rank for each in verdict.culprits] == [2]
    assert (verdict.collective.communicator, verdict.collective.seq) == ("fsdp", 31)
