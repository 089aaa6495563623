"""Server-sent events: what is new comes once, in order, also after a pause; who is slow starts anew."""

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from dashboard_helpers import add_steps, make_run

from lockstep.ledger import Ledger
from lockstep.report.dashboard import event_stream
from lockstep.report.dashboard.event_stream import EventStream
from lockstep.report.dashboard.shown_run import ShownRun


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "LOOK_S", 0.02)
    monkeypatch.setattr(event_stream, "READ_S", 0.01)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", 3)


class Listener:
    """Reads the events of a stream one by one, as (id, kind, data)."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._events: list[tuple[str, str, Any]] = []

    async def next(self) -> tuple[str, str, Any]:
        while not self._events:
            text = (await asyncio.wait_for(anext(self._stream), 20)).decode()
            for block in text.split("\n\n"):
                fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
                if "event" in fields:
                    self._events.append((fields["id"], fields["event"], json.loads(fields["data"])))
        return self._events.pop(0)

    async def until(self, kind: str, count: int = 1) -> list[tuple[str, str, Any]]:
        found = []
        while len(found) < count:
            event = await self.next()
            found += [event] if event[1] == kind else []
        return found

    async def close(self) -> None:
        await self._stream.aclose()  # type: ignore[attr-defined]


def following(folder: Path, body: Callable[[EventStream], Awaitable[None]]) -> None:
    async def main() -> None:
        stream = EventStream({"r": ShownRun(folder)}.get)
        await body(stream)
        stream.closing = True

    asyncio.run(main())


def test_steps_states_and_incidents_are_news(folder: Path) -> None:
    async def body(stream: EventStream) -> None:
        listener = Listener(stream.follow(["r"], ""))
        _, kind, hello = await listener.next()
        assert kind == "hello" and hello["resumed"] is False and hello["version"]
        with Ledger.resume(folder) as ledger:
            for step in range(3):
                ledger.commit(step, {})
            assert (await listener.until("state"))[0][2]["run"] == "r"
            add_steps(ledger, 3, 6)
            steps = await listener.until("step", 3)
            assert [data["step"] for _, _, data in steps] == [4, 5, 6]
            assert steps[0][2]["metrics"]["policy/loss"] == 0.25
            ledger.record_event("recovery", action="failed", worker="engine-0", what="died", at=1.0)
            assert (await listener.until("incident"))[0][2]["culprits"] == ["engine-0"]
            ledger.record_event("end", reason="finished", steps=6)
        while (await listener.until("state"))[0][2]["state"] != "finished":
            pass
        await listener.close()

    following(folder, body)


def test_a_listener_resumes_after_its_last_event(folder: Path) -> None:
    async def body(stream: EventStream) -> None:
        first = Listener(stream.follow(["r"], ""))
        with Ledger.resume(folder) as ledger:
            for step in range(3):
                ledger.commit(step, {})
            await first.until("state")
            add_steps(ledger, 3, 5)
            last, _, _ = (await first.until("step", 2))[0]
            keep_looking = Listener(stream.follow(["r"], ""))
            await keep_looking.next()
            await first.close()
            add_steps(ledger, 5, 6)
            await keep_looking.until("step")
            again = Listener(stream.follow(["r"], last))
            _, _, hello = await again.next()
            assert hello["resumed"] is True
            assert [data["step"] for _, _, data in await again.until("step", 2)] == [5, 6]

    following(folder, body)


@pytest.mark.parametrize("last", ["", "x", "0000-5", "nothing-1", "-", "\x00"])
def test_an_id_of_another_server_does_not_resume(folder: Path, last: str) -> None:
    async def body(stream: EventStream) -> None:
        listener = Listener(stream.follow(["r"], last))
        assert (await listener.next())[2]["resumed"] is False
        await listener.close()

    following(folder, body)


def test_a_slow_listener_starts_anew_and_memory_is_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "RING_EVENTS", 10)
    monkeypatch.setattr(event_stream, "RING_BYTES", 5000)

    async def body(stream: EventStream) -> None:
        slow = Listener(stream.follow(["r"], ""))
        last = (await slow.next())[0]
        for number in range(500):
            stream._publish("r", "step", {"step": number, "text": "x" * 1000})
        assert len(stream._ring) <= 5 and stream._bytes <= 5000
        kind, data = (await slow.next())[1:]
        assert (kind, data["resumed"]) == ("hello", False)
        again = Listener(stream.follow(["r"], last))
        assert (await again.next())[2]["resumed"] is False

    following(folder, body)


def test_a_quiet_stream_has_heartbeats(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "HEARTBEAT_S", 0.05)

    async def body(stream: EventStream) -> None:
        raw = stream.follow(["r"], "")
        while await asyncio.wait_for(anext(raw), 20) != b": heartbeat\n\n":
            pass

    following(folder, body)


def test_a_run_that_vanishes_is_news_once(folder: Path) -> None:
    async def body(stream: EventStream) -> None:
        listener = Listener(stream.follow(["r"], ""))
        await listener.until("state")
        shutil.rmtree(folder)
        assert (await listener.until("state"))[0][2]["state"] == "removed"
        await asyncio.sleep(0.2)
        assert [event.run for event in stream._ring].count("r") <= 3

    following(folder, body)


def test_text_of_a_run_cannot_end_an_event(folder: Path) -> None:
    stream = EventStream({}.get)
    stream._publish("r", "state", {"message": "a\n\nevent: hello\ndata: {}\r\n\u2028"})
    assert stream._ring[0].data.count(b"\n") == 4 and stream._ring[0].data.endswith(b"\n\n")


def test_nobody_listens_nobody_looks(folder: Path) -> None:
    async def body(stream: EventStream) -> None:
        listener = Listener(stream.follow(["r"], ""))
        await listener.until("state")
        await listener.close()
        task = stream._followed["r"].task
        assert task is not None
        await asyncio.wait_for(task, 20)

    following(folder, body)


def test_a_run_whose_folder_does_not_answer_keeps_no_other_one_waiting(folder: Path) -> None:
    hangs = threading.Event()
    answers = ShownRun(folder)

    def find(run: str) -> ShownRun | None:
        if run == "hung":
            hangs.wait(60)
        return answers if run == "r" else None

    async def main() -> None:
        stream = EventStream(find)
        try:
            listener = Listener(stream.follow(["hung", "r"], ""))
            assert (await listener.until("state"))[0][2]["run"] == "r"
            add_step(folder)
            assert (await listener.until("step"))[0][2]["run"] == "r"
        finally:
            hangs.set()
        stream.closing = True

    asyncio.run(main())


def add_step(folder: Path) -> None:
    with Ledger.resume(folder) as ledger:
        for step in range(3):
            ledger.commit(step, {})
        add_steps(ledger, 3, 4)


def test_a_mistake_in_one_look_is_reported_once_and_the_looks_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls, news = [], event_stream._news

    def broken(shown: ShownRun, followed: event_stream._Followed) -> list[tuple[str, dict[str, Any]]]:
        calls.append(1)
        if 2 <= len(calls) <= 6:
            raise AttributeError("a mistake")
        return news(shown, followed)

    monkeypatch.setattr(event_stream, "_news", broken)

    async def body(stream: EventStream) -> None:
        listener = Listener(stream.follow(["r"], ""))
        states = [data for _, _, data in await listener.until("state", 3)]
        assert states[1] == {"run": "r", "state": "unreadable", "message": "AttributeError: a mistake"}
        assert states[2]["state"] == states[0]["state"] and len(calls) >= 7

    following(folder, body)
    assert [each.message for each in caplog.records] == ["cannot tell what is new of run r"]
