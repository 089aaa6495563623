"""What commands report: the same events as text and as JSON. Every line of JSON is an object with the documented keys,
whatever the texts are."""

import io
import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.config.errors import ConfigError, ConfigProblem
from lockstep.config.run_config import ReportConfig
from lockstep.ledger import CompletionSample
from lockstep.report.command_events import (
    CommandEvent,
    CommandEvents,
    JsonConsole,
    JsonEvents,
    LogFormat,
    TextEvents,
    open_events,
)
from lockstep.report.live_console import LiveConsole, StageActivity

HOSTILE = "a\nb\r\x1b[2J\u202e [red]wet[/] \udc80 好"


def console(stream: io.StringIO, quiet: bool = False) -> JsonConsole:
    return JsonConsole(JsonEvents("controller", stream), "sort", Path("runs/sort"), 20, quiet=quiet)


def rows(stream: io.StringIO) -> list[dict[str, Any]]:
    """The objects, each of which stands on one line of ASCII without control characters."""
    text = stream.getvalue()
    assert text.isascii() and all(line.isprintable() for line in text.split("\n"))
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_as_events() -> None:
    stream = io.StringIO()
    run = console(stream)
    run.start(10)
    run.evaluation(10, {"eval/exact_match": 0.5})
    run.stage("rollout")
    run.step(10, {"reward/mean": 0.5, "policy/loss": float("nan"), "policy/kl": np.float32(0.25)})
    run.samples(11, [CompletionSample("p", "c", "a", 1.0, {"exact": 1.0}, "10:0")])
    run.message("see [/etc/x]")
    run.warning("  engine-0 was restarted")
    run.finish("finished", Path("runs/sort/report.html"), "1 incident")
    found = rows(stream)
    assert [each["event"] for each in found] == [
        "started", "evaluation", "step", "samples", "information", "warning", "finished",
    ]  # fmt: skip
    assert all(list(each)[:5] == ["time", "level", "process", "event", "message"] for each in found)
    assert {each["process"] for each in found} == {"controller"}
    assert [each["step"] for each in found] == [10, 10, 11, 11, 11, 11, 11]
    assert datetime.now(UTC) - datetime.fromisoformat(found[0]["time"]) < timedelta(minutes=1)
    step, samples, last = found[2], found[3], found[-1]
    assert step["metrics"] == {"reward/mean": 0.5, "policy/loss": None, "policy/kl": 0.25}
    assert step["steps"] == 20 and step["seconds_left"] >= 0 and step["message"] == "step 11/20"
    assert samples["samples"][0]["completion"] == "c" and samples["samples"][0]["terms"] == {"exact": 1.0}
    assert (found[5]["level"], found[5]["message"]) == ("warning", "engine-0 was restarted")
    assert (last["reason"], last["run"], last["report"]) == ("finished", "runs/sort", "runs/sort/report.html")
    assert last["incidents"] == "1 incident" and last["seconds"] >= 0


def test_quiet_writes_warnings_and_the_last_event() -> None:
    stream = io.StringIO()
    run = console(stream, quiet=True)
    run.start()
    run.step(0, {"reward/mean": 0.5})
    run.message("nothing of note")
    run.warning("engine-0 was restarted")
    run.finish("interrupted")
    assert [(each["event"], each["level"]) for each in rows(stream)] == [
        ("warning", "warning"), ("finished", "warning"),
    ]  # fmt: skip


def test_waits_are_written_at_doubling_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("lockstep.report.command_events.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    run = console(stream)
    run.stage("start")
    for tick in range(40):
        now[0] = tick / 2
        run.show_wait("engine-0 (start)")
    run.show_wait("")
    found = rows(stream)
    assert [each["seconds"] for each in found] == [2.0, 4.0, 8.0, 16.0]
    assert found[0]["message"] == "start waits for engine-0 (start)" and found[0]["stage"] == "start"


def test_hostile_texts_stay_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "tr0ub4dor-and-3-horses")
    stream = io.StringIO()
    events = JsonEvents("watch", stream)
    events.write("verdict", HOSTILE, culprits=[HOSTILE], left_out=None, **{"odd key": {HOSTILE: Path(HOSTILE)}})
    events.write("warning", "the key is tr0ub4dor-and-3-horses", metrics={"x": [float("inf"), True, 3]})
    first, second = rows(stream)
    assert first["message"] == HOSTILE.strip() and first["culprits"] == [HOSTILE]
    assert first["odd key"] == {HOSTILE: HOSTILE} and "left_out" not in first
    assert "tr0ub4dor" not in stream.getvalue() and second["metrics"] == {"x": [None, True, 3]}


def test_arrays_are_lists() -> None:
    stream = io.StringIO()
    values = {
        "all": np.array([[1.0, np.nan], [2.0, 3.0]]),
        "one": np.float32(0.5),
        "none": np.array([]),
        "zero": np.array(7),
    }
    JsonEvents("controller", stream).write("step", "", metrics=values)
    assert rows(stream)[0]["metrics"] == {"all": [[1.0, None], [2.0, 3.0]], "one": 0.5, "none": [], "zero": 7}


def test_lines_of_several_threads_do_not_mix() -> None:
    stream = io.StringIO()
    events = JsonEvents("controller", stream)
    threads = [
        threading.Thread(target=lambda: [events.write("information", "x" * 500) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(rows(stream)) == 200


def test_the_format_decides_how_events_are_reported() -> None:
    assert isinstance(open_events(LogFormat.text, "train"), TextEvents)
    assert isinstance(open_events(LogFormat.json, "train"), JsonEvents)


def test_the_same_events_in_both_forms(capsys: pytest.CaptureFixture[str]) -> None:
    """What is reported does not depend on the form: each event has a line of text and an object with its message."""
    stream = io.StringIO()
    problem = ConfigProblem("stepz", "is no key", "steps?")
    for events in (TextEvents(), JsonEvents("check", stream)):
        events.progress("loading [x]")
        events.note("a token is in ~/.lockstep")
        events.refuse(ValueError("no such file"))
        events.refuse(ConfigError("run.yaml", [problem]))
        events.report(
            CommandEvent("placement", "placement on 1 node", "node-0", fields={"nodes": ["node-0"], "x": None})
        )
        events.report(CommandEvent("section", "Host", None))
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        "loading [x]", "note a token is in ~/.lockstep", "refused no such file", "refused run.yaml",
        "  stepz: is no key (steps?)", "node-0",
    ], "a section is shown by the report itself"  # fmt: skip
    found = rows(stream)
    assert [(each["event"], each["level"]) for each in found] == [
        ("progress", "info"), ("note", "info"), ("refused", "error"), ("refused", "error"), ("placement", "info"),
        ("section", "info"),
    ]  # fmt: skip
    assert "problems" not in found[2] and found[3]["problems"] == [
        {"field": "stepz", "message": "is no key", "hint": "steps?"}
    ]
    assert found[4]["nodes"] == ["node-0"] and "x" not in found[4]


@pytest.mark.parametrize("events", [TextEvents(), JsonEvents("generate")], ids=["text", "json"])
def test_a_status_is_reported_every_ten_seconds_without_a_terminal(
    events: CommandEvents, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("lockstep.report.command_events.time.monotonic", lambda: now[0])
    with events.status() as show:
        for at, text in ((101.0, "engine-0"), (111.0, "engine-0"), (115.0, "engine-1"), (121.0, "")):
            now[0] = at
            show(text)
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 2 and "engine-0, 11s so far" in err and "working, 21s so far" in err


@pytest.mark.parametrize(("events", "kind"), [(TextEvents(), LiveConsole), (JsonEvents("controller"), JsonConsole)])
def test_the_console_of_a_run_has_the_format_of_the_command(events: CommandEvents, kind: type, tmp_path: Path) -> None:
    console = events.open_run_console("sort", tmp_path, 3, ReportConfig(console=False), StageActivity)
    assert isinstance(console, kind)
    console.close()
