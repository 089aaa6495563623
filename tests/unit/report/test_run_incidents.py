"""What was told and what was done, as one list."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.ledger import CommitRow, EventRow, Ledger
from lockstep.report.html_report import IncidentTimeline, RunUptime
from lockstep.report.run_incidents import Incident, incidents_of, incidents_summary
from lockstep.report.run_summary import build_summary

DIED = {"what": "died (SIGKILL)", "step": 3}


def did(at: float, action: str, worker: str, generation: int = 1, **more: Any) -> EventRow:
    return EventRow(at, generation, "recovery", {"at": at, "action": action, "worker": worker, **more})


def said(at: float, level: str, *who: str, number: int = 1, change: str = "told", **more: Any) -> EventRow:
    fields = {
        "number": number, "change": change, "level": level, "verdict": "absent", "who": list(who), "since_s": 0.0,
        "text": f"{', '.join(who)} stands", "said_at": at, "incident": None,
    }  # fmt: skip
    return EventRow(at + 7, 1, "stall", fields | more)  # written when the run looks again


def moments(incident: Incident) -> list[tuple[float, str, str]]:
    return [(round(each.at - incident.began, 3), each.what, each.text) for each in incident.moments]


def test_a_run_without_any() -> None:
    assert incidents_of([]) == [] and incidents_summary([]) == ""
    assert incidents_of([EventRow(0, 1, "start", {}), EventRow(9, 1, "end", {})]) == []
    passed = [said(5, "notice", "policy-1"), said(8, "notice", "policy-1", change="withdrawn")]
    assert incidents_of(passed) == [], "only noticed"


def test_a_frozen_rank_is_told_of_and_healed() -> None:
    told = {"number": 4, "incident": "/elsewhere/run/incidents/20261121-x"}
    (found,) = incidents_of([
        said(103, "notice", "policy-1", number=4, waited_s=3.0),
        said(105, "confirmed", "policy-1", change="updated", **told),
        said(105, "act", "policy-1", change="updated", done="policy-0 freed", **told),
        did(105.1, "failed", "policy-1", why="confirmed: policy-1 stands", **DIED),
        did(106.5, "restarted", "policy-1", seconds=1.4, restored=3, again=1, **DIED),
        said(107, "confirmed", "policy-1", change="withdrawn", **told),
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


def test_a_death_is_seen_by_the_run_before_the_supervisor_tells() -> None:
    (found,) = incidents_of([
        did(10, "failed", "engine-0", **DIED),
        said(10.7, "confirmed", "engine-0", verdict="dead"),
        did(10.6, "restarted", "engine-0", seconds=0.6, requests=7, **DIED),
        said(26, "confirmed", "engine-0", verdict="dead", change="withdrawn"),
    ])  # fmt: skip
    assert (found.what, found.outcome_text) == ("dead", "healed after 0.6s")
    assert moments(found) == [
        (0.0, "failed", "engine-0 died (SIGKILL)"),
        (0.6, "restarted", "in 0.6 s, 7 requests re-issued"),
        (0.7, "confirmed", "engine-0 stands"),
    ]


def test_an_old_wait_was_for_somebody_who_moved() -> None:
    (found,) = incidents_of([said(1000, "confirmed", "engine-0", waited_s=600.0)])
    assert found.began == 990.0


def test_without_a_supervisor() -> None:
    found = incidents_of([
        did(18, "failed", "engine-0", **DIED),
        did(20, "restarted", "engine-0", seconds=2.0, requests=7, **DIED),
        did(60, "failed", "policy-1", **DIED),
        did(65, "failed", "policy-0.1", what="died (exit code 1)"),
        did(66, "fewer ranks", "policy-0.1", ranks=1),
        did(70, "restarted", "policy-1", seconds=10.0, restored=2, again=0, **DIED),
        did(100, "failed", "policy-0.2", **DIED),
        did(100, "gave up", "policy-0.2", reason="5 restarts are spent", **DIED),
        did(101, "failed", "engine-0.1", **DIED),
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


def test_two_faults_one_after_the_other_are_two() -> None:
    """The second victim is the successor of the first; each verdict goes to the repair that names it."""
    found = incidents_of([
        said(10, "confirmed", "engine-0", number=1, verdict="dead"),
        did(9.9, "failed", "engine-0", **DIED),
        did(10.5, "restarted", "engine-0", seconds=0.6, **DIED),
        said(12, "confirmed", "engine-0.1", number=2, verdict="dead"),
        did(11.9, "failed", "engine-0.1", **DIED),
        did(12.5, "restarted", "engine-0.1", seconds=0.6, **DIED),
    ])  # fmt: skip
    assert [(each.workers, [m.what for m in each.moments]) for each in found] == [
        (who, ["failed", "confirmed", "restarted"]) for who in ("engine-0", "engine-0.1")
    ]


def test_the_rank_that_failed_and_the_one_that_is_blamed_are_one_incident() -> None:
    """An innocent rank's call ends with an error when its peer dies, before anybody hears of that."""
    (found,) = incidents_of([
        did(50, "failed", "policy-0", what="raised RuntimeError: connection closed by peer"),
        said(50.2, "confirmed", "policy-1", verdict="dead"),
        did(52, "restarted", "policy-0", seconds=2.0, restored=1, again=0, what="raised RuntimeError: ..."),
    ])  # fmt: skip
    assert (found.workers, found.what) == ("policy-0, policy-1", "dead")


@pytest.mark.parametrize("healed_before", [True, False])
def test_what_passed_by_itself_is_not_healed(healed_before: bool) -> None:
    events = [said(200, "confirmed", "policy-1"), said(240, "confirmed", "policy-1", change="withdrawn")]
    if healed_before:
        events += [did(100, "failed", "policy-1", **DIED), did(101, "restarted", "policy-1", seconds=1.0, **DIED)]
    *before, found = incidents_of(events)
    assert len(before) == healed_before
    assert (found.outcome, found.outcome_text) == ("passed", "passed after 40s")
    assert moments(found)[-1] == (40.0, "over", "no process waits for it any more")


def test_an_attempt_does_not_heal_another() -> None:
    found = incidents_of([
        did(10, "failed", "policy-1", **DIED),
        did(500, "restarted", "policy-1", generation=2, seconds=1.0, **DIED),
    ])  # fmt: skip
    assert [each.outcome_text for each in found] == ["unresolved", "healed after 1.0s"]


def test_the_summary_has_them(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "run", {"name": "run", "steps": 1}) as ledger:
        ledger.event("recovery", **did(10.5, "restarted", "engine-0", seconds=0.5, requests=7, **DIED).fields)
        (found,) = json.loads(json.dumps(build_summary(ledger, "finished")))["incidents"]
    assert found == {
        "at": "1970-01-01T00:00:10Z", "who": "engine-0", "what": "died (SIGKILL)", "outcome": "healed", "seconds": 0.5,
        "moments": [{"after_s": 0.5, "what": "restarted", "text": "in 0.5 s, 7 requests re-issued"}], "folder": None,
    }  # fmt: skip


def test_the_time_between_attempts_is_left_out() -> None:
    events = [EventRow(100, 1, "start", {}), EventRow(90_000, 2, "start", {}), EventRow(90_030, 2, "end", {})]
    clock = RunUptime(events, [CommitRow(0, 150, 1, {})])
    assert [clock.at(at) for at in (90, 100, 120, 150, 5000, 90_000, 90_010, 99_999)] == [0, 0, 20, 50, 50, 50, 60, 80]


def test_places_on_the_charts(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "run", {"name": "run", "steps": 9}) as ledger:
        ledger.event("start")
        for step in range(3):
            ledger.commit(step, {})
        at = [row.at for row in ledger.commits()]
        healed = did(at[1], "restarted", "engine-0", seconds=0.0, **DIED)
        later = did(at[2] + 5, "gave up", "policy-0", reason="spent", **DIED)
        timeline = IncidentTimeline(ledger, incidents_of([healed, later]))
    assert [(mark.label, mark.at, mark.fine) for mark in timeline.over_steps()] == [("1", 2.5, True), ("2", 3.5, False)]
    first, second = timeline.over_time()
    assert 0 <= first.at == first.until <= second.at
    assert [done for _, done in timeline.curve()] == [0, 1, 2, 3]
