"""What the supervisor says, as the console, the ledger and recovery get it."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.ledger.ledger import Ledger
from lockstep.report.live_console import LiveConsole
from lockstep.report.run_incidents import STALL_EVENT
from lockstep.run.telemetry.verdict_handler import VerdictHandler, format_event, seconds_waited, should_act_on
from lockstep.watch.diagnosis.verdict import Culprit, Verdict, VerdictKind, VerdictLevel
from lockstep.watch.supervisor.supervisor_client import SupervisorEvent

VERDICT = Verdict(VerdictKind.ABSENT, VerdictLevel.CONFIRMED, (Culprit(1, "policy"),), confidence=0.95).json()


def said(**more: Any) -> SupervisorEvent:
    fields: dict[str, Any] = {
        "number": 1, "change": "told", "level": "confirmed", "headline": "policy-1 is in score() at reward.py:31",
        "verdict": VERDICT, "since_s": 4.2, "incident": "incidents/x", "wall": 9.0, "who": ("policy-1",),
    }  # fmt: skip
    return SupervisorEvent(**(fields | more))


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    with Ledger.create(tmp_path / "run", {"name": "run", "steps": 1}) as made:
        yield made


def test_a_stall_is_told_at_once_and_written_when_the_run_looks(ledger: Ledger, tmp_path: Path) -> None:
    stream = io.StringIO()
    stalls = VerdictHandler(LiveConsole("run", tmp_path, 1, stream=stream, terminal=False), ledger)
    stalls.hear(said())
    stalls.hear(said(change="withdrawn"))
    told = stream.getvalue()
    assert "confirmed: policy-1 is in score() at reward.py:31" in told and "incident: incidents/x" in told
    assert "goes on: policy-1 (absent), after 4.2s" in told
    assert [event for event in ledger.events() if event.kind == STALL_EVENT] == []
    stalls.flush()
    first, second = [event.fields for event in ledger.events() if event.kind == STALL_EVENT]
    assert (first["verdict"], first["level"], first["who"]) == ("absent", "confirmed", ["policy-1"])
    assert second["change"] == "withdrawn"


def test_what_is_odd_about_the_environment_of_an_incident_is_told_once(ledger: Ledger, tmp_path: Path) -> None:
    stream = io.StringIO()
    stalls = VerdictHandler(LiveConsole("run", tmp_path, 1, stream=stream, terminal=False), ledger)
    incident = tmp_path / "incidents" / "x"
    incident.mkdir(parents=True)
    (incident / "environment.json").write_text('{"a": {"NCCL_TIMEOUT": "3600"}}')
    for change in ("told", "updated"):
        stalls.hear(said(change=change, incident=str(incident)))
    assert stream.getvalue().count("environment: NCCL_TIMEOUT=3600 is read by nobody") == 1
    assert (incident / "findings.json").is_file()


def test_who_is_confirmed_is_acted_on_once(ledger: Ledger, tmp_path: Path) -> None:
    stalls = VerdictHandler(LiveConsole("run", tmp_path, 1, quiet=True, stream=io.StringIO(), terminal=False), ledger)
    acted: list[tuple[list[str], str]] = []

    def act(workers: Sequence[str], why: str) -> Sequence[str]:
        acted.append((list(workers), why))
        return workers

    stalls.subscribe(act)
    stalls.hear(said(level="notice"))
    stalls.hear(said())
    stalls.hear(said(change="updated"))
    stalls.hear(said(change="updated", level="act", done="policy-0 freed"))
    assert acted == [(["policy-1"], "confirmed: policy-1 is in score() at reward.py:31")]
    stalls.flush()
    told = [(each.fields["level"], each.fields["done"]) for each in ledger.events() if each.kind == STALL_EVENT]
    assert [level for level, _ in told] == ["notice", "confirmed", "act", "confirmed", "act"]
    assert [done for level, done in told if level == "act"] == ["policy-1 ended", "policy-0 freed"]


@pytest.mark.parametrize(
    "more",
    [
        {"level": "notice"},
        {"change": "withdrawn"},
        {"who": ()},
        {"verdict": VERDICT | {"confidence": 0.7}},
        {"verdict": VERDICT | {"confidence": 0.78, "culprits": [{"role": "reward", "rank": 0}]}},
    ],
    ids=["a notice", "withdrawn", "nobody", "not sure", "a scorer that stands still"],
)
def test_nobody_is_restarted_on_less(more: dict[str, Any]) -> None:
    assert should_act_on(said()) and not should_act_on(said(**more))
    assert should_act_on(said(verdict=VERDICT | {"confidence": 0.78})), "a trainer rank that stands still"


def test_a_notice_is_one_line() -> None:
    assert format_event(said(level="notice", incident=None)) == ["notice: policy-1 is in score() at reward.py:31"]
    assert format_event(said(level="act", done="policy-0 freed")) == ["act: policy-0 freed"]


def test_who_was_replaced_does_not_go_on() -> None:
    over = said(change="withdrawn")
    assert format_event(over) == ["goes on: policy-1 (absent), after 4.2s"]
    assert format_event(over, acted=True) == ["over: policy-1 (absent), after 4.2s"]
    assert format_event(said(change="withdrawn", verdict=VERDICT | {"kind": "dead"})) == []


def test_since_when_others_wait_is_that_of_the_youngest_wait() -> None:
    waiting = [{"who": "controller", "on": "rank 0", "what": "step", "since_s": 300.0},
               {"who": "rank 0", "on": "rank 1", "what": "all_reduce #7", "since_s": 3.5}]  # fmt: skip
    assert seconds_waited(said(verdict=VERDICT | {"waiting": waiting})) == 3.5
    assert seconds_waited(said(verdict=VERDICT | {"waiting": waiting, "kind": "dead"})) == 0.0
    assert seconds_waited(said()) == 0.0
