"""Incidents are made of stall reports and recovery actions."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.ledger import EventRow, Ledger
from lockstep.ledger.run_incidents import Incident, incidents_of, incidents_summary
from lockstep.report.incident_timeline import IncidentTimeline, RunUptime
from lockstep.report.run_summary import build_summary

DIED = {"what": "died (SIGKILL)", "step": 3}


def recovery_event(at: float, action: str, worker: str, generation: int = 1, **more: Any) -> EventRow:
    return EventRow(at, generation, "recovery", {"at": at, "action": action, "worker": worker, **more})


def report_event(at: float, level: str, *who: str, number: int = 1, change: str = "told", **more: Any) -> EventRow:
    fields = {
        "number": number, "change": change, "level": level, "verdict": "absent", "who": list(who), "since_s": 0.0,
        "text": f"{', '.join(who)} stands", "said_at": at, "incident": None,
    }  # fmt: skip
    return EventRow(at + 7, 1, "stall", fields | more)  # written when the run looks again


def moments(incident: Incident) -> list[tuple[float, str, str]]:
    return [(round(each.at - incident.began, 3), each.what, each.text) for each in incident.moments]


def test_a_run_without_incidents() -> None:
    assert incidents_of([]) == [] and incidents_summary([]) == ""
    assert incidents_of([EventRow(0, 1, "start", {}), EventRow(9, 1, "end", {})]) == []
    passed = [report_event(5, "notice", "policy-1"), report_event(8, "notice", "policy-1", change="withdrawn")]
    assert incidents_of(passed) == [], "only noticed"


def test_a_frozen_rank_is_reported_and_healed() -> None:
    common = {"number": 4, "incident": "/elsewhere/run/incidents/20261121-x"}
    (found,) = incidents_of([
        report_event(103, "notice", "policy-1", number=4, waited_s=3.0),
        report_event(105, "confirmed", "policy-1", change="updated", **common),
        report_event(105, "act", "policy-1", change="updated", done="policy-0 freed", **common),
        recovery_event(105.1, "failed", "policy-1", why="confirmed: policy-1 stands", **DIED),
        recovery_event(106.5, "restarted", "policy-1", seconds=1.4, restored=3, again=1, **DIED),
        report_event(107, "confirmed", "policy-1", change="withdrawn", **common),
    ])  # fmt: skip
    assert (found.workers, found.what, found.outcome, found.folder) == (
        "policy-1",
        "absent",
        "healed",
        "incidents/20261121-x",
    )
    assert (found.began, found.ended, found.outcome_text) == (100.0, 106.5, "healed after 6.5s")
    assert moments(found) == [
        (3.0, "notice", "policy-1 stands"),
        (5.0, "confirmed", "policy-1 stands"),
        (5.0, "act", "policy-0 freed"),
        (6.5, "restarted", "in 1.4 s, state of 3 steps, 1 trained again"),
    ], "and not that it was ended for it"
    assert incidents_summary([found]) == "an incident, healed"


def test_the_run_notices_a_death_before_the_supervisor_reports_it() -> None:
    (found,) = incidents_of([
        recovery_event(10, "failed", "engine-0", **DIED),
        report_event(10.7, "confirmed", "engine-0", verdict="dead"),
        recovery_event(10.6, "restarted", "engine-0", seconds=0.6, requests=7, **DIED),
        report_event(26, "confirmed", "engine-0", verdict="dead", change="withdrawn"),
    ])  # fmt: skip
    assert (found.what, found.outcome_text) == ("dead", "healed after 0.6s")
    assert moments(found) == [
        (0.0, "failed", "engine-0 died (SIGKILL)"),
        (0.6, "restarted", "in 0.6 s, 7 requests re-issued"),
        (0.7, "confirmed", "engine-0 stands"),
    ]


def test_an_old_wait_was_for_a_process_with_progress() -> None:
    (found,) = incidents_of([report_event(1000, "confirmed", "engine-0", waited_s=600.0)])
    assert found.began == 990.0


def test_without_a_supervisor() -> None:
    found = incidents_of([
        recovery_event(18, "failed", "engine-0", **DIED),
        recovery_event(20, "restarted", "engine-0", seconds=2.0, requests=7, **DIED),
        recovery_event(60, "failed", "policy-1", **DIED),
        recovery_event(65, "failed", "policy-0.1", what="died (exit code 1)"),
        recovery_event(66, "fewer ranks", "policy-0.1", ranks=1),
        recovery_event(70, "restarted", "policy-1", seconds=10.0, restored=2, again=0, **DIED),
        recovery_event(100, "failed", "policy-0.2", **DIED),
        recovery_event(100, "gave up", "policy-0.2", reason="5 restarts are spent", **DIED),
        recovery_event(101, "failed", "engine-0.1", **DIED),
    ])  # fmt: skip
    assert [(each.workers, each.what, each.outcome_text) for each in found] == [
        ("engine-0", "died (SIGKILL)", "healed after 2.0s"),
        ("policy-1", "died (SIGKILL)", "healed after 10s"),
        ("policy-0.2", "died (SIGKILL)", "the run gave up"),
        ("engine-0.1", "died (SIGKILL)", "unresolved"),
    ]
    assert moments(found[1]) == [
        (0.0, "failed", "policy-1 died (SIGKILL)"),
        (5.0, "failed", "policy-0.1 died (exit code 1)"),
        (6.0, "fewer ranks", "training continues with ranks=1"),
        (10.0, "restarted", "in 10.0 s, state of 2 steps"),
    ]
    assert incidents_summary(found) == "4 incidents, 2 of them not healed"


def test_two_successive_faults_are_two_incidents() -> None:
    """The second victim replaced the first; each verdict belongs to the repair that names it."""
    found = incidents_of([
        report_event(10, "confirmed", "engine-0", number=1, verdict="dead"),
        recovery_event(9.9, "failed", "engine-0", **DIED),
        recovery_event(10.5, "restarted", "engine-0", seconds=0.6, **DIED),
        report_event(12, "confirmed", "engine-0.1", number=2, verdict="dead"),
        recovery_event(11.9, "failed", "engine-0.1", **DIED),
        recovery_event(12.5, "restarted", "engine-0.1", seconds=0.6, **DIED),
    ])  # fmt: skip
    assert [(each.workers, [m.what for m in each.moments]) for each in found] == [
        (who, ["failed", "confirmed", "restarted"]) for who in ("engine-0", "engine-0.1")
    ]


def test_the_failed_rank_and_the_named_culprit_are_one_incident() -> None:
    """When a rank dies, the call of its peer fails before the death is reported."""
    (found,) = incidents_of([
        recovery_event(50, "failed", "policy-0", what="raised RuntimeError: connection closed by peer"),
        report_event(50.2, "confirmed", "policy-1", verdict="dead"),
        recovery_event(52, "restarted", "policy-0", seconds=2.0, restored=1, again=0, what="raised RuntimeError: ..."),
    ])  # fmt: skip
    assert (found.workers, found.what) == ("policy-0, policy-1", "dead")


def test_the_replacement_that_takes_long_to_start_is_not_a_culprit() -> None:
    """An engine that loads a large model is waited for, and noticed; what failed is its predecessor."""
    (found,) = incidents_of([
        recovery_event(10, "failed", "engine-0", what="vanished (host b is lost)", step=3),
        report_event(45, "notice", "engine-0.1", waited_s=30.0),
        recovery_event(60, "restarted", "engine-0", seconds=50, requests=7, what="vanished", step=3),
        report_event(61, "notice", "engine-0.1", change="withdrawn"),
    ])  # fmt: skip
    assert (found.workers, found.what) == ("engine-0", "vanished (host b is lost)")
    assert (45.0, "notice", "engine-0.1 stands") in [(each.at, each.what, each.text) for each in found.moments]
    (again,) = incidents_of([
        report_event(10, "confirmed", "engine-0.1"),
        recovery_event(11, "failed", "engine-0.1", **DIED),
        recovery_event(12, "restarted", "engine-0.1", seconds=1, **DIED),
    ])  # fmt: skip
    assert (again.workers, again.what) == ("engine-0.1", "absent"), "a replacement may fail as well"


@pytest.mark.parametrize("healed_before", [True, False])
def test_a_stall_that_passed_by_itself_is_not_healed(healed_before: bool) -> None:
    events = [
        report_event(200, "confirmed", "policy-1"),
        report_event(240, "confirmed", "policy-1", change="withdrawn"),
    ]
    if healed_before:
        events += [
            recovery_event(100, "failed", "policy-1", **DIED),
            recovery_event(101, "restarted", "policy-1", seconds=1.0, **DIED),
        ]
    *before, found = incidents_of(events)
    assert len(before) == healed_before
    assert (found.outcome, found.outcome_text) == ("passed", "passed after 40s")
    assert moments(found)[-1] == (40.0, "over", "no process waits for it any more")


def test_an_attempt_does_not_heal_another() -> None:
    found = incidents_of(
        [
            recovery_event(10, "failed", "policy-1", **DIED),
            recovery_event(500, "restarted", "policy-1", generation=2, seconds=1.0, **DIED),
        ]
    )
    assert [each.outcome_text for each in found] == ["unresolved", "healed after 1.0s"]


def test_the_summary_contains_the_incidents(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "run", {"name": "run", "steps": 1}) as ledger:
        ledger.record_event(
            "recovery", **recovery_event(10.5, "restarted", "engine-0", seconds=0.5, requests=7, **DIED).fields
        )
        (found,) = json.loads(json.dumps(build_summary(ledger, "finished")))["incidents"]
    assert found == {
        "at": "1970-01-01T00:00:10Z", "who": "engine-0", "what": "died (SIGKILL)", "outcome": "healed", "seconds": 0.5,
        "moments": [{"after_s": 0.5, "what": "restarted", "text": "in 0.5 s, 7 requests re-issued"}], "folder": None,
    }  # fmt: skip


def test_the_time_between_attempts_is_left_out() -> None:
    events = [EventRow(100, 1, "start", {}), EventRow(90_000, 2, "start", {}), EventRow(90_030, 2, "end", {})]
    clock = RunUptime(events, [(0, 150, 1)])
    assert [clock.at(at) for at in (90, 100, 120, 150, 5000, 90_000, 90_010, 99_999)] == [0, 0, 20, 50, 50, 50, 60, 80]


def test_positions_on_the_charts(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "run", {"name": "run", "steps": 9}) as ledger:
        ledger.record_event("start")
        for step in range(3):
            ledger.commit(step, {})
        at = [row.at for row in ledger.commits()]
        healed = recovery_event(at[1], "restarted", "engine-0", seconds=0.0, **DIED)
        later = recovery_event(at[2] + 5, "gave up", "policy-0", reason="spent", **DIED)
        timeline = IncidentTimeline(ledger, incidents_of([healed, later]))
    assert [(mark.label, mark.at, mark.harmless) for mark in timeline.over_steps()] == [
        ("1", 2.5, True),
        ("2", 3.5, False),
    ]
    first, second = timeline.over_time()
    assert 0 <= first.at == first.until <= second.at
    assert [done for _, done in timeline.curve()] == [0, 1, 2, 3]
