"""Supervisor events on the console, in the ledger and in recovery."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lockstep.ledger.ledger import Ledger
from lockstep.ledger.run_incidents import STALL_EVENT
from lockstep.report.live_console import LiveConsole
from lockstep.run.recovery.verdict_handler import VerdictHandler, format_event, seconds_waited, should_act_on
from lockstep.watch.diagnosis.verdict import Culprit, Verdict, VerdictKind, VerdictLevel
from lockstep.watch.supervisor.supervisor_client import SupervisorEvent

VERDICT = Verdict(VerdictKind.ABSENT, VerdictLevel.CONFIRMED, (Culprit(1, "policy"),), confidence=0.95).json()


def event(**more: Any) -> SupervisorEvent:
    fields: dict[str, Any] = {
        "number": 1, "change": "told", "level": "confirmed", "headline": "policy-1 is in score() at reward.py:31",
        "verdict": VERDICT, "since_s": 4.2, "incident": "incidents/x", "wall": 9.0, "who": ("policy-1",),
    }  # fmt: skip
    return SupervisorEvent(**(fields | more))


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    with Ledger.create(tmp_path / "run", {"name": "run", "steps": 1}) as made:
        yield made


def test_an_event_is_printed_at_once_and_written_by_flush(ledger: Ledger, tmp_path: Path) -> None:
    stream = io.StringIO()
    handler = VerdictHandler(LiveConsole("run", tmp_path, 1, stream=stream, terminal=False), ledger)
    handler.handle(event())
    handler.handle(event(change="withdrawn"))
    told = stream.getvalue()
    assert "confirmed: policy-1 is in score() at reward.py:31" in told and "incident: incidents/x" in told
    assert "resumed: policy-1 (absent), after 4.2s" in told
    assert [each for each in ledger.events() if each.kind == STALL_EVENT] == []
    handler.flush()
    first, second = [each.fields for each in ledger.events() if each.kind == STALL_EVENT]
    assert (first["verdict"], first["level"], first["who"]) == ("absent", "confirmed", ["policy-1"])
    assert second["change"] == "withdrawn"


def test_environment_problems_of_an_incident_are_printed_once(ledger: Ledger, tmp_path: Path) -> None:
    stream = io.StringIO()
    handler = VerdictHandler(LiveConsole("run", tmp_path, 1, stream=stream, terminal=False), ledger)
    incident = tmp_path / "incidents" / "x"
    incident.mkdir(parents=True)
    (incident / "environment.json").write_text('{"a": {"NCCL_TIMEOUT": "3600"}}')
    for change in ("told", "updated"):
        handler.handle(event(change=change, incident=str(incident)))
    assert stream.getvalue().count("environment: nothing reads NCCL_TIMEOUT=3600") == 1
    assert (incident / "findings.json").is_file()


def test_a_confirmed_verdict_is_acted_on_once(ledger: Ledger, tmp_path: Path) -> None:
    handler = VerdictHandler(LiveConsole("run", tmp_path, 1, quiet=True, stream=io.StringIO(), terminal=False), ledger)
    acted: list[tuple[list[str], str]] = []

    def act(workers: Sequence[str], why: str) -> Sequence[str]:
        acted.append((list(workers), why))
        return workers

    handler.subscribe(act)
    handler.handle(event(level="notice"))
    handler.handle(event())
    handler.handle(event(change="updated"))
    handler.handle(event(change="updated", level="act", done="policy-0 freed"))
    assert acted == [(["policy-1"], "confirmed: policy-1 is in score() at reward.py:31")]
    handler.flush()
    told = [(each.fields["level"], each.fields["done"]) for each in ledger.events() if each.kind == STALL_EVENT]
    assert [level for level, _ in told] == ["notice", "confirmed", "act", "confirmed", "act"]
    assert [done for level, done in told if level == "act"] == ["killed policy-1", "policy-0 freed"]


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
def test_nothing_is_killed_on_less_than_a_confirmed_verdict(more: dict[str, Any]) -> None:
    assert should_act_on(event()) and not should_act_on(event(**more))
    assert should_act_on(event(verdict=VERDICT | {"confidence": 0.78})), "a trainer rank that stands still"


def test_a_notice_is_one_line() -> None:
    assert format_event(event(level="notice", incident=None)) == ["notice: policy-1 is in score() at reward.py:31"]
    assert format_event(event(level="act", done="policy-0 freed")) == ["act: policy-0 freed"]


def test_a_withdrawn_verdict_is_resumed_or_recovered() -> None:
    over = event(change="withdrawn")
    assert format_event(over) == ["resumed: policy-1 (absent), after 4.2s"]
    assert format_event(over, acted_on=True) == ["recovered: policy-1 (absent), after 4.2s"]
    assert format_event(event(change="withdrawn", verdict=VERDICT | {"kind": "dead"})) == []


def test_seconds_waited_is_the_shortest_wait() -> None:
    waiting = [{"who": "controller", "on": "rank 0", "what": "step", "since_s": 300.0},
               {"who": "rank 0", "on": "rank 1", "what": "all_reduce #7", "since_s": 3.5}]  # fmt: skip
    assert seconds_waited(event(verdict=VERDICT | {"waiting": waiting})) == 3.5
    assert seconds_waited(event(verdict=VERDICT | {"waiting": waiting, "kind": "dead"})) == 0.0
    assert seconds_waited(event()) == 0.0
