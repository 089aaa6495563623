"""What the agent reports of a rank's calls."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.watch.agent.process_monitor import ProcessMonitor
from lockstep.watch.agent.report_builder import ReportBuilder, _calls_from_cpp, _newest_calls
from lockstep.watch.beacon import writer
from lockstep.watch.beacon.beacon_records import FLAG_FAILED, FLAG_REFUSED, FLAG_UNSURE
from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.evidence_types import CALL_FROM_CPP
from lockstep.watch.diagnosis.verdict import StallThresholds, Verdict, VerdictLevel
from lockstep.watch.supervisor.evidence_builder import HostState, build_evidence
from lockstep.watch.supervisor.job_layout import build_layout
from tests.unit.watch.agent.recorded_members import Member

CALLS = 5
"""Each rank makes so many from Python, then its next call."""


def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_cpp: list[int], still_s: float) -> list[Verdict]:
    """The verdicts on four ranks in their next call, which those of `from_cpp` make from C++ and the others from
    Python, after a minute without any activity."""
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    ranks, monitor, now = [Member(rank, 4) for rank in range(4)], ProcessMonitor("run-1"), time.monotonic_ns()
    try:
        for each in ranks:
            for _ in range(CALLS):
                each.call()
            in_cpp = each.rank in from_cpp
            if not in_cpp:
                each.call(inside=True)
            each.slot.mark_counted()
            each.slot.write_counts(CALLS + 1, CALLS, now, now)
            state = each.state()
            state.progress_ns = state.active_ns = state.stack_ns = state.same_stack_ns = now - 60 * 10**9
            assert state.beacon is not None
            communicators = tuple(replace(c, entered_ns=now - 60 * 10**9) for c in state.beacon.communicators)
            state.beacon = replace(state.beacon, communicators=communicators)
            monitor.tracked[state.name] = state
        roster, report = ReportBuilder("a").build(monitor)
    finally:
        for each in ranks:
            each.beacon.close(remove=True)
        writer._current = writer._NullBeacon()
    evidence = build_evidence(build_layout([roster]), [HostState(roster, report, 10.0, report.about)], 10.0)
    return diagnose(evidence, StallThresholds(still_s=still_s))


def test_a_call_from_python_where_the_others_are_in_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP with uneven inputs: one rank has left the loop."""
    verdict = verdicts(tmp_path, monkeypatch, from_cpp=[0, 1, 3], still_s=40.0)[0]
    assert [each.rank for each in verdict.culprits] == [2] and verdict.level is VerdictLevel.CONFIRMED
    assert verdict.confidence == 0.75  # rank 2 may make the same call, and the link be at fault
    assert f"where the others called {CALL_FROM_CPP.operation}" in verdict.explanation


def test_such_calls_may_be_the_same_while_they_are_active(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdicts(tmp_path, monkeypatch, from_cpp=[0, 1, 3], still_s=400.0)[0]
    assert verdict.level is VerdictLevel.NOTICE


def calls_of(member: Member) -> list[int]:
    """The numbers of the calls from C++ that are reported of a member, of which c10d has counted two more calls than
    Python has made."""
    member.slot.mark_counted()
    now = time.monotonic_ns()
    member.slot.write_counts(member.seq + 2, 0, now, now)
    record = member.state().beacon.communicators[0]  # type: ignore[union-attr]
    member.beacon.close(remove=True)
    writer._current = writer._NullBeacon()
    return [call.seq for call in _calls_from_cpp(record)]


@pytest.mark.parametrize(
    ("inside", "flags", "expected"),
    [(False, 0, [2, 3]), (True, 0, []), (False, FLAG_UNSURE, [])],
    ids=["returned", "parts of an object collective", "numbers of calls from Python uncertain"],
)
def test_which_calls_are_from_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool, flags: int, expected: list[int]
) -> None:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    member = Member(0, 2)
    member.call()
    if inside or flags:
        member.call(inside=inside, flags=flags)
    assert calls_of(member) == expected


@pytest.mark.parametrize("flag", [FLAG_FAILED, FLAG_REFUSED])
def test_a_call_that_failed_before_it_was_counted_is_replaced_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int
) -> None:
    """Else a program that tries an operation which the backend lacks, and then another, would differ from itself."""
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    member = Member(0, 2)
    member.call("[1]")
    member.call("[2]", flags=flag)
    member.call("[3]", lead=-1)
    state = member.state()
    member.beacon.close()
    writer._current = writer._NullBeacon()
    assert state.beacon is not None
    found = _newest_calls(state, state.beacon.communicators[0], state.progress_ns + 60 * 10**9)
    assert [(call.seq, call.shapes) for call in found] == [(1, "[1]"), (2, "[3]")]


@pytest.mark.parametrize("from_cpp", [[], [0, 1, 2, 3]])
def test_calls_of_one_source_do_not_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_cpp: list[int]
) -> None:
    found = verdicts(tmp_path, monkeypatch, from_cpp, still_s=40.0)
    assert not any(each.culprits for each in found)
