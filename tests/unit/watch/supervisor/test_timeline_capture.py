"""A capture asks all agents until it is over, and its file is complete, bounded and without secrets."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.base.secrets import HIDDEN, redact_text
from lockstep.watch.beacon.beacon_records import MAX_SPANS
from lockstep.watch.beacon.writer import close_beacon, open_beacon
from lockstep.watch.supervisor import timeline_capture
from lockstep.watch.supervisor.agent_connections import AgentConnection, ClockOffset
from lockstep.watch.supervisor.timeline_capture import CaptureRequest, TimelineCaptures, answer_line, request_capture

SECRET = "the-run's-token"


class Agent:
    """An agent that answers when the test says so."""

    def __init__(self, host: str) -> None:
        self.host, self.shut_down, self.clock = host, False, ClockOffset(samples=[(10, 1_000)])
        self.asked: list[tuple[dict[str, Any], Callable[[dict[str, Any] | None], None]]] = []

    def request(self, operation: str, on_reply: Callable[..., None], timeout_s: float, **arguments: Any) -> None:
        assert operation == "timeline"
        self.asked.append((arguments, on_reply))

    def answer(self, spans: int = 0, step: int | None = None, stage: str = "train") -> dict[str, Any]:
        arguments, on_reply = self.asked.pop(0)
        counters = {} if step is None else {"step": [step, 8]}
        process = {"name": "policy-0", "stage": [stage, 1], "counters": counters, "lost": 0}
        process |= {"spans": [0] * spans, "communicators": []}
        on_reply({"reply": "1", "host": self.host, "now_ns": 5, "processes": [process], "calls": []})
        return arguments


@pytest.fixture
def agents(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_BEACONS", str(tmp_path / "shm"))
    open_beacon("run-1", "controller", "controller", 0)
    yield [Agent("a"), Agent("b")]
    close_beacon()


@pytest.fixture
def captures(agents) -> TimelineCaptures:
    return TimelineCaptures("run-1", lambda: cast(list[AgentConnection], agents), (SECRET,))


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_capture_ends_after_its_time_with_a_last_answer_of_each_agent(agents, captures, tmp_path) -> None:
    file = tmp_path / "run" / "timeline" / "1.jsonl"
    assert captures.start(CaptureRequest(file, 1.0).to_json()) == {"file": str(file)}
    now = time.monotonic()
    assert [each.answer()["last"] for each in agents] == [False, False]
    captures.tick(now + 0.5)
    assert [each.answer()["last"] for each in agents] == [False, False]
    captures.tick(now + 1.5)
    captures.tick(now + 1.6)
    assert agents[0].answer()["last"] and "end" not in lines(file)[-1]
    assert agents[1].answer()["last"]
    captures.tick(now + 1.7)
    found = lines(file)
    assert found[0]["lockstep_timeline"] == 2 and found[0]["since_ns"] == found[0]["at_ns"]
    assert [each.get("host") for each in found[1:-1]] == ["a", "b"] * 3
    assert found[1]["offset_ns"] == 1_000 and found[-1]["end"] == "complete"
    assert captures.pause_s == 1.0


def test_the_current_step_and_whole_ones_are_captured(agents, captures, tmp_path) -> None:
    file = tmp_path / "steps.jsonl"
    captures.start(CaptureRequest(file, steps=2).to_json())
    now = time.monotonic()
    for number, step in enumerate([4, 5, 6, 7]):
        captures.tick(now + number)
        for each in agents:
            assert not each.answer(step=step)["last"]
    captures.tick(now + 5)
    assert all(each.answer(step=7)["last"] for each in agents)
    captures.tick(now + 6)
    assert lines(file)[-1]["end"] == "complete"


def test_a_capture_of_later_steps_waits_for_the_first_one(agents, captures, tmp_path) -> None:
    file, beacon = tmp_path / "late.jsonl", open_beacon("run-1", "controller", "controller", 0)
    captures.start(CaptureRequest(file, first_step=3, last_step=4).to_json())
    beacon.progress("step", 1, 8)
    captures.tick(time.monotonic() + 1)
    assert not file.exists() and not agents[0].asked
    began = time.monotonic_ns()
    beacon.progress("step", 2, 8)
    captures.tick(time.monotonic() + 2)
    (header,) = lines(file)
    assert began <= header["since_ns"] <= header["at_ns"]  # from the beginning of the step
    assert not agents[0].answer(step=3)["last"]
    captures.tick(time.monotonic() + 3)
    assert not agents[0].answer(step=4)["last"]
    captures.tick(time.monotonic() + 3)
    assert agents[0].answer(step=4)["last"]


def test_a_resumed_run_that_is_past_the_steps_captures_nothing(agents, captures, tmp_path) -> None:
    open_beacon("run-1", "controller", "controller", 0).progress("step", 6, 8)
    captures.start(CaptureRequest(tmp_path / "late.jsonl", first_step=3, last_step=4).to_json())
    assert not (tmp_path / "late.jsonl").exists() and captures.pause_s == 1.0


def test_what_rings_hold_now_takes_one_answer(agents, captures, tmp_path) -> None:
    file = tmp_path / "now.jsonl"
    captures.start(CaptureRequest(file, 0.0, recent=True).to_json())
    assert all(each.answer()["last"] for each in agents)
    captures.tick(time.monotonic())
    assert lines(file)[0]["since_ns"] == 0 and lines(file)[-1]["end"] == "complete"


def test_agents_are_asked_more_often_while_their_rings_fill(agents, captures, tmp_path) -> None:
    captures.start(CaptureRequest(tmp_path / "1.jsonl", 60.0).to_json())
    now = time.monotonic()
    for after_s in (0.3, 0.6):
        agents[0].answer(spans=MAX_SPANS * 3 // 4)
        agents[1].answer(spans=MAX_SPANS // 8)
        captures.tick(now + after_s)
    assert (len(agents[0].asked), len(agents[1].asked)) == (1, 0)


def test_the_file_is_bounded_private_and_has_no_secret(agents, captures, tmp_path, monkeypatch) -> None:
    file = tmp_path / "1.jsonl"
    monkeypatch.setattr(timeline_capture, "MAX_BYTES", 1_000)
    captures.start(CaptureRequest(file, 60.0).to_json())
    captures.note({"headline": "policy-1 is absent", "level": "notice", "change": "told"})
    now = time.monotonic()
    for number in range(20):
        captures.tick(now + number)
        for each in agents:
            if each.asked:
                each.answer(stage=SECRET)
    text = file.read_text()
    assert "the file has reached" in lines(file)[-1]["end"] and len(text) < 1_300
    assert SECRET not in text and "policy-1 is absent" in text
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "text",
    [
        "scores of http://judge/score?api_key=abcdefghijkl",
        'with pa"ss\\word',
        "a\nsk-0123456789abcdefghij",
        "http://a:b",
    ],
)
def test_a_line_with_a_secret_stays_a_line(text: str) -> None:
    """A secret that ends where a text ends takes nothing else with it, and one that JSON escapes is hidden as well."""
    process = {"name": "policy-0", "waits": [[text, "MainThread", 3]], "texts": {1: "me@host"}}
    line = answer_line("a", 5, {"now_ns": 1, "processes": [process], "calls": ["QQ=="]}, ['pa"ss\\word'])
    found = json.loads(line)
    assert (found["host"], found["offset_ns"], found["calls"]) == ("a", 5, ["QQ=="])
    (wait, thread, since), texts = found["processes"][0]["waits"][0], found["processes"][0]["texts"]
    assert (thread, since, texts) == ("MainThread", 3, {"1": "me@host"})
    assert wait == redact_text(text, ['pa"ss\\word']) and (HIDDEN in wait) == (text != "http://a:b")


def test_the_end_of_the_run_ends_a_capture(agents, captures, tmp_path) -> None:
    file = tmp_path / "1.jsonl"
    captures.start(CaptureRequest(file, 60.0).to_json())
    captures.close()
    assert lines(file)[-1]["end"] == "the run has ended"
    agents[0].answer()  # too late: it is ignored
    assert lines(file)[-1]["end"] == "the run has ended"


def test_a_request_file_starts_a_capture_and_is_removed(agents, captures, tmp_path) -> None:
    request_capture("run-1", CaptureRequest(tmp_path / "1.jsonl", 1.0))
    (tmp_path / "shm" / "run-1" / "timeline-request-bad.json").write_text("{}")
    captures.read_requests()
    assert (tmp_path / "1.jsonl").exists()
    assert not [*(tmp_path / "shm" / "run-1").glob("timeline-request-*")]


def test_too_many_captures_and_existing_files_are_refused(agents, captures, tmp_path) -> None:
    (tmp_path / "0.jsonl").write_text("precious")
    captures.start(CaptureRequest(tmp_path / "0.jsonl").to_json())
    assert (tmp_path / "0.jsonl").read_text() == "precious"
    for number in range(1, 1 + timeline_capture.MAX_CAPTURES):
        captures.start(CaptureRequest(tmp_path / f"{number}.jsonl").to_json())
    with pytest.raises(ValueError, match="captured already"):
        captures.start(CaptureRequest(tmp_path / "9.jsonl").to_json())


def test_only_the_newest_captures_are_kept(agents, captures, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(timeline_capture, "KEPT_CAPTURES", 2)
    for number in range(4):
        captures.start(CaptureRequest(tmp_path / f"{number}.jsonl").to_json())
        captures.close()
        for each in agents:
            each.asked.clear()
    assert sorted(each.name for each in tmp_path.glob("*.jsonl")) == ["2.jsonl", "3.jsonl"]


def test_a_stopped_capture_gets_a_last_answer_and_its_end(agents, captures, tmp_path) -> None:
    file, other = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    captures.start(CaptureRequest(file, 60.0).to_json())
    captures.start(CaptureRequest(other, first_step=9).to_json())
    for each in agents:
        each.answer()
    for each in (file, other):
        request_capture("run-1", CaptureRequest(each, stop=True))
    captures.read_requests()
    captures.tick(time.monotonic())
    assert [each.answer()["last"] for each in agents] == [True, True]
    captures.tick(time.monotonic())
    assert lines(file)[-1]["end"] == "stopped on request" and not other.exists()
    assert captures.pause_s == 1.0  # none is left


@pytest.mark.parametrize("text", ["[]", "null", '{"file": "x", "steps": 1e999}', "[" * 30_000, "{"])
def test_a_request_file_that_is_none_stops_nothing(captures, text: str, tmp_path) -> None:
    (tmp_path / "shm" / "run-1" / "timeline-request-1.json").write_text(text)
    captures.read_requests()
    assert captures.pause_s == 1.0 and not list((tmp_path / "shm" / "run-1").glob("timeline-request-*"))


def test_a_request_file_that_is_a_link_is_refused_once(captures, tmp_path, caplog) -> None:
    target = tmp_path / "target.json"
    target.write_text(json.dumps(CaptureRequest(tmp_path / "1.jsonl").to_json()))
    (tmp_path / "shm" / "run-1" / "timeline-request-1.json").symlink_to(target)
    for _ in range(3):
        captures.read_requests()
    assert caplog.text.count("is refused") == 1 and target.exists() and not (tmp_path / "1.jsonl").exists()
