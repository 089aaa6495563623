"""The sampled calls of agents' reports in the totals of a job."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_evidence_builder import roster, state

from lockstep.report.communication.communication_summary import communication_summary
from lockstep.watch.agent.call_comparison import CallComparison
from lockstep.watch.agent.call_timings import TIMING_RECORD
from lockstep.watch.agent.report_messages import StateReport, decode_report, encode_report
from lockstep.watch.beacon import writer
from lockstep.watch.supervisor.agent_connections import parse_report
from lockstep.watch.supervisor.evidence_builder import HostState
from lockstep.watch.supervisor.job_totals import JobTotals
from tests.unit.watch.agent.recorded_members import IDENTITY, Member


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Member]]:
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path))
    made = [Member(rank, 2) for rank in range(2)]
    yield made
    for each in made:
        each.beacon.close(remove=True)
    writer._current = writer._NullBeacon()


def test_calls_in_beacons_become_totals(members: list[Member], tmp_path: Path) -> None:
    comparison, job = CallComparison(), JobTotals("r", None, tmp_path / "communication.json")
    comparison.timings.wanted = True
    for _ in range(30):
        for member in members:
            member.call("[4]")
    states = [each.state() for each in members]
    comparison.update([(each, each.beacon.communicators[0]) for each in states if each.beacon is not None])
    timings, timed = comparison.timings.take({IDENTITY: 0})
    assert list(timed.values()) == [("broadcast", 16)]
    calls = len(timings) // TIMING_RECORD.size // 2
    assert 20 <= calls <= 30, "the newest ones are not final yet"
    report = replace(state("a", [0, 1]), timings=timings, timed=timed)
    back = decode_report(parse_report(json.dumps(encode_report(report)).encode()))
    assert isinstance(back, StateReport) and (back.timings, back.timed) == (timings, timed)
    job.add(HostState(roster("a", [0, 1], size=2), back, 1.0), 0)
    job.write(0.0, last=True)
    (communicator,) = communication_summary(tmp_path)["communicators"]
    assert communicator["processes"] == ["policy-0", "policy-1"]
    (operation,) = communicator["operations"]
    assert (operation["operation"], operation["calls"], operation["size"]) == ("broadcast", calls, 16)
    assert comparison.timings.take({IDENTITY: 0}) == (b"", {}), "they are taken once"


def test_nothing_is_sampled_unless_a_supervisor_wants_it(members: list[Member]) -> None:
    comparison = CallComparison()
    for _ in range(30):
        for member in members:
            member.call("[4]")
    states = [each.state() for each in members]
    comparison.update([(each, each.beacon.communicators[0]) for each in states if each.beacon is not None])
    assert comparison.timings.take({IDENTITY: 0}) == (b"", {})


def test_calls_of_what_the_roster_does_not_have_are_refused(tmp_path: Path) -> None:
    job = JobTotals("r", None, tmp_path / "communication.json")
    for timings in (TIMING_RECORD.pack(3, -1, 0, 1, 1, 1, 1, 0, 0), b"123"):
        report = replace(state("a", [0, 1]), timings=timings)
        with pytest.raises(ValueError, match="state of host a"):
            job.add(HostState(roster("a", [0, 1], size=2), report, 1.0), 0)
