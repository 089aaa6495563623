"""News about runs as server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html).

A task for each run that anybody listens to looks at it, and puts what is new into a ring: a run on a file system that
does not answer keeps no other one waiting. Each listener reads the ring at its own pace: one that is too slow, or comes
back too late, starts anew, and costs no memory.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lockstep import __version__
from lockstep.ledger.errors import LedgerError
from lockstep.report.dashboard.metric_history import json_bytes, json_number
from lockstep.report.dashboard.run_feed import UNREADABLE, RunBusy
from lockstep.report.dashboard.shown_run import ShownRun

log = logging.getLogger(__name__)

LOOK_S = 1.0
READ_S = 0.2
"""How often a listener looks into the ring."""
HEARTBEAT_S = 10.0
HOSTS_S, WAITS_S = 5.0, 2.0
"""The shortest time between two events of these kinds."""
LOOKING_THREADS = 32
"""At most so many runs are looked at together."""
MOST_STEPS = 50
"""Steps of one look; a page that missed more asks for the curves."""
RING_EVENTS, RING_BYTES = 4096, 16 << 20
RETRY_MS = 2000


@dataclass(slots=True)
class _Followed:
    """What listeners know of a run."""

    listeners: int = 0
    task: asyncio.Task[None] | None = None
    """Looks at the run while there are listeners."""
    problem: str = ""
    """Of the last look, unless it was fine."""
    step: int = -1
    state: str = ""
    waits: Any = None
    events: int = -1
    """How many events the ledger had at the last look; -1 before the first."""
    incidents: dict[str, Any] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)
    """When the last event of a kind was sent."""


@dataclass(frozen=True, slots=True)
class _Event:
    number: int
    run: str
    data: bytes


class EventStream:
    """The events of all runs of a dashboard. To be used in one event loop.

    Args:
        find: the run with an id; None if there is none.
    """

    def __init__(self, find: Callable[[str], ShownRun | None]) -> None:
        self._find = find
        self._boot = secrets.token_hex(4)
        self._ring: deque[_Event] = deque()
        self._bytes = self._newest = 0
        self._followed: dict[str, _Followed] = {}
        self._threads = ThreadPoolExecutor(LOOKING_THREADS, "dashboard events")
        self.closing = False

    async def follow(self, runs: Sequence[str], last_id: str) -> AsyncIterator[bytes]:
        """The events of some runs, as the bytes of the answer.

        Args:
            last_id: the id of the last event that the listener has; after it the stream resumes if that is possible.
        """
        place = self._resumed(last_id)
        hello = {"version": __version__, "resumed": place is not None}
        place = self._newest if place is None else place
        yield f"retry: {RETRY_MS}\n".encode() + self._encoded("hello", hello, place)
        for run in runs:
            followed = self._followed.setdefault(run, _Followed())
            followed.listeners += 1
            if followed.task is None or followed.task.done():
                followed.task = asyncio.create_task(self._look_again_and_again(run, followed))
        try:
            wanted, quiet = set(runs), time.monotonic()
            while not self.closing:
                if self._ring and place < self._ring[0].number - 1:
                    place = self._newest
                    yield self._encoded("hello", {"version": __version__, "resumed": False}, place)
                news = [event for event in self._ring if event.number > place and event.run in wanted]
                place = self._newest
                if news:
                    yield b"".join(event.data for event in news)
                    quiet = time.monotonic()
                elif time.monotonic() - quiet >= HEARTBEAT_S:
                    yield b": heartbeat\n\n"
                    quiet = time.monotonic()
                await asyncio.sleep(READ_S)
        finally:
            for run in runs:
                self._followed[run].listeners -= 1

    def _resumed(self, last_id: str) -> int | None:
        """The number of the last event that a listener has; None if events after it are lost."""
        boot, _, number = last_id.partition("-")
        if boot != self._boot or not number.isdecimal():
            return None
        oldest = self._ring[0].number if self._ring else self._newest + 1
        return int(number) if oldest - 1 <= int(number) <= self._newest else None

    def _encoded(self, kind: str, data: Any, number: int) -> bytes:
        # JSON on one line: a line break would end the event.
        return b"event: %s\nid: %s-%d\ndata: %s\n\n" % (
            kind.encode(), self._boot.encode(), number, json_bytes(data)
        )  # fmt: skip

    def _publish(self, run: str, kind: str, data: dict[str, Any]) -> None:
        self._newest += 1
        event = _Event(self._newest, run, self._encoded(kind, {"run": run, **data}, self._newest))
        self._ring.append(event)
        self._bytes += len(event.data)
        while len(self._ring) > RING_EVENTS or (self._bytes > RING_BYTES and len(self._ring) > 1):
            self._bytes -= len(self._ring.popleft().data)

    async def _look_again_and_again(self, run: str, followed: _Followed) -> None:
        loop = asyncio.get_running_loop()
        while followed.listeners and not self.closing:
            try:
                for kind, data in await loop.run_in_executor(self._threads, self._look, run, followed):
                    self._publish(run, kind, data)
            except Exception as error:  # a mistake in one look must not end those that follow
                problem = f"{type(error).__name__}: {error}"
                if followed.problem != problem:
                    log.warning("cannot tell what is new of run %s", run, exc_info=error)
                    self._publish(run, "state", {"state": "unreadable", "message": problem})
                followed.state, followed.problem = "unreadable", problem
            else:
                followed.problem = ""
            await asyncio.sleep(LOOK_S)

    def _look(self, run: str, followed: _Followed) -> list[tuple[str, dict[str, Any]]]:
        """What is new of a run, which may be removed or damaged."""
        try:
            if (shown := self._find(run)) is not None:
                return _news(shown, followed)
            state, message = "removed", "its folder was removed"
        except FileNotFoundError as error:
            state, message = "removed", str(error)
        except (LedgerError, *UNREADABLE, OSError, RunBusy) as error:
            state, message = "unreadable", str(error)
        if followed.state == state:
            return []
        followed.state = state
        return [("state", {"state": state, "message": message})]


def _news(shown: ShownRun, followed: _Followed) -> list[tuple[str, dict[str, Any]]]:
    """What has happened in a run since the last look, as kinds and contents of events."""
    now, found = time.monotonic(), list[tuple[str, dict[str, Any]]]()
    overview = shown.feed.overview()
    if followed.step < 0 or overview.step < followed.step:  # the first look, or a run that was set back
        followed.step = overview.step
    for step, values in shown.feed.steps_after(followed.step, MOST_STEPS).items():
        found.append(("step", {"step": step, "metrics": {name: json_number(each) for name, each in values.items()}}))
        followed.step = step
    if overview.state != followed.state:
        facts = {"state": overview.state, "step": overview.step, "steps": overview.steps, "message": overview.message}
        found.append(("state", facts))
        followed.state = overview.state
    if (events := len(shown.feed.events())) != followed.events:
        for incident in shown.incidents():
            if followed.incidents.get(incident["id"]) != incident["moments"]:
                found += [("incident", incident)] if followed.events >= 0 else []  # not those before the first look
                followed.incidents[incident["id"]] = incident["moments"]
        followed.events = events
    if overview.state == "running" and now - followed.sent.get("waits", -WAITS_S) >= WAITS_S:
        waits = shown.waits()
        if (shape := _shape(waits)) != followed.waits:
            found.append(("waits", waits))
            followed.waits, followed.sent["waits"] = shape, now
    if overview.state == "running" and now - followed.sent.get("hosts", -HOSTS_S) >= HOSTS_S:
        if hosts := shown.live.view().hosts:
            found.append(("hosts", {"hosts": hosts}))
        followed.sent["hosts"] = now
    return found


def _shape(waits: dict[str, Any]) -> Any:
    """What of a graph is news: everything but how long the waits have taken."""
    nodes = [(node["name"], node["stage"], node["state"], node["culprit"]) for node in waits["nodes"]]
    verdict = waits["verdict"] and (waits["verdict"]["level"], waits["verdict"]["text"])
    return nodes, sorted((edge["from"], edge["to"]) for edge in waits["edges"]), verdict
