"""Captures of a run's timeline: the supervisor asks all agents several times a second what their processes have done
since (`agent.timeline_follower`), and appends each answer to a file, one line of JSON each:

    {"lockstep_timeline": 1, "run", "at_ns", "wall", "since_ns"}   the supervisor's clock, and when the capture begins
    {"host", "offset_ns", "now_ns", "processes", "devices", "calls"}   an answer; `offset_ns` is how far the host's
        monotonic clock is ahead of the supervisor's
    {"verdict": headline, "level", "change", "at_ns"}   what the supervisor published meanwhile
    {"end": why, "at_ns"}

A capture begins on a request of the controller, or of `lockstep timeline` on this host: a file in the run's folder in
shared memory, which only this user can write, or a message. It may wait for a step of the run, and ends after some
seconds or steps, with the run, or at `MAX_BYTES`. What is in its file remains readable if the supervisor is killed.
"""

import contextlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lockstep.base.folders import create_file, make_folder, open_own_file, run_shm_dir, write_atomically
from lockstep.base.secrets import may_have_secrets, redact, secret_values
from lockstep.watch.beacon.beacon_records import CALLS_PER_RING, MAX_SPANS
from lockstep.watch.beacon.call_copies import CALL_BYTES
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.supervisor.agent_connections import AgentConnection

log = logging.getLogger(__name__)

FORMAT = 2
EVERY_S, SOONEST_S, LONGEST_S = 0.25, 0.05, 1.0
"""Seconds between two requests to an agent: at first, at least and at most."""
FULLNESS = 0.5
"""The pause between two requests is chosen so that this share of the fullest ring is new."""
ANSWER_S = 10.0
MAX_S = 3600.0
MAX_BYTES = 256 << 20
MAX_CAPTURES = 4
"""Captures at a time; further ones are refused."""
KEPT_CAPTURES = 20
"""Files in the folder of a run; the oldest ones are removed."""
CAPTURES_FOLDER = "timeline"
"""The folder of the captures in that of a run."""
REQUEST_FILES = "timeline-request-*.json"
CONTROLLER_BEACON = "controller.beacon"


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """What to capture, and where to write it."""

    file: Path
    """A file that does not exist; its folder is made."""
    seconds: float = MAX_S
    """0: only what the rings of recent events hold now."""
    steps: int | None = None
    """Ends after so many whole steps of the run, the current one not counted; None: only after `seconds`."""
    first_step: int | None = None
    """Begins with this step of the run, counted from 1; None: at once."""
    last_step: int | None = None
    """Ends when this step has ended."""
    recent: bool = False
    """Whether what ended before the capture began belongs to it."""
    stop: bool = False
    """Ends the capture in this file now, and begins none."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "file": str(self.file)}

    @staticmethod
    def parse(values: Mapping[str, Any]) -> "CaptureRequest":
        """Raises ValueError, KeyError or TypeError if it is none."""
        if not isinstance(values, Mapping):
            raise TypeError(f"a request is a mapping, not {type(values).__name__}")
        steps, first, last = (values.get(name) for name in ("steps", "first_step", "last_step"))
        if not all(each is None or isinstance(each, int) for each in (steps, first, last)):
            raise ValueError(f"steps, first_step and last_step are whole numbers, not {steps}, {first} and {last}")
        seconds = min(MAX_S, max(0.0, float(values.get("seconds", MAX_S))))
        recent, stop = bool(values.get("recent")), bool(values.get("stop"))
        return CaptureRequest(Path(str(values["file"])), seconds, steps, first, last, recent, stop)


def request_capture(run: str, request: CaptureRequest) -> None:
    """Asks the supervisor of a run on this host for a capture. Raises OSError if this user cannot write there."""
    folder = run_shm_dir(run)
    path = folder / REQUEST_FILES.replace("*", secrets.token_hex(4))
    write_atomically(path, json.dumps(request.to_json()).encode())


def header_line(run: str, wall: float, at_ns: int, since_ns: int) -> str:
    """The first line of a capture."""
    header = {"lockstep_timeline": FORMAT, "run": run, "at_ns": at_ns, "wall": wall, "since_ns": since_ns}
    return json.dumps(header) + "\n"


def answer_line(host: str, offset_ns: int, answer: Mapping[str, Any], known: Collection[str]) -> str:
    """The line of an agent's answer. Each text is redacted by itself: a secret may end where a text ends, and in JSON
    some characters are escaped. The copies of calls have no texts, so that nothing in them is redacted."""
    rest = {"host": host, "offset_ns": offset_ns, **{name: each for name, each in answer.items() if name != "calls"}}
    text = msgspec.json.encode(rest).decode()
    if may_have_secrets(text) or any(msgspec.json.encode(each).decode()[1:-1] in text for each in known):
        text = msgspec.json.encode(redact(rest, known)).decode()
    return f'{text[:-1]},"calls":{msgspec.json.encode(answer["calls"]).decode()}}}\n'


@dataclass(slots=True)
class _Polled:
    """An agent that is asked again and again."""

    next_at: float = 0.0
    every_s: float = EVERY_S
    waiting: bool = False
    answered: bool = False


@dataclass(slots=True)
class _Capture:
    request: CaptureRequest
    descriptor: int | None = None
    """Of its file; None while it waits for its first step."""
    ends_at: float = math.inf
    name: str = field(default_factory=lambda: secrets.token_hex(4))
    written: int = 0
    first_step: int | None = None
    agents: dict[AgentConnection, _Polled] = field(default_factory=dict)
    over: str = ""
    """Why it ends; empty before that."""


class TimelineCaptures:
    """The captures of one supervisor.

    Args:
        links: returns the connections to all agents.
        known: secrets that are hidden in addition to those in this process's environment.
    """

    def __init__(self, run: str, links: Callable[[], Iterable[AgentConnection]], known: Collection[str]) -> None:
        self._run, self._links = run, links
        self._secrets = sorted({*known, *secret_values(os.environ)} - {""}, key=len, reverse=True)
        self._captures: list[_Capture] = []
        self._look_at = 0.0
        """When the controller's step is looked at again."""

    @property
    def pause_s(self) -> float:
        """How long the supervisor may wait for events until `tick` must be called again."""
        now, due = time.monotonic(), [LONGEST_S]
        for capture in self._captures:
            if capture.descriptor is None:
                due.append(EVERY_S)
            else:
                due += [capture.ends_at - now, *(p.next_at - now for p in capture.agents.values() if not p.waiting)]
        return max(SOONEST_S / 2, min(due))

    def start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Starts a capture, now or with its first step, or stops one. Returns the answer to the request. Raises
        ValueError, KeyError or TypeError if it is no request, or there are too many captures."""
        request = CaptureRequest.parse(message)
        if request.stop:
            self._stop(request.file)
            return {"file": str(request.file)}
        if len(self._captures) >= MAX_CAPTURES:
            raise ValueError(f"{MAX_CAPTURES} timelines are being captured already; wait until one has ended")
        self._captures.append(_Capture(request))
        self.tick(time.monotonic())
        return {"file": str(request.file)}

    def read_requests(self) -> None:
        """Starts the captures that were requested by files."""
        for path in run_shm_dir(self._run).glob(REQUEST_FILES):
            try:
                with os.fdopen(open_own_file(path), "rb") as file:
                    text = file.read(1 << 16)
                path.unlink(missing_ok=True)
                self.start(json.loads(text))
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                log.warning("a request for a timeline is refused: %r", error)
                with contextlib.suppress(OSError):  # one that cannot be opened, which is not warned of again
                    path.unlink(missing_ok=True)

    def tick(self, now: float) -> None:
        """Asks the agents that are due, and begins and ends captures."""
        for capture in list(self._captures):
            if capture.descriptor is None and not self._begin(capture, now):
                continue
            if not capture.over and now >= capture.ends_at:
                self._finish(capture, "complete")
            links = [link for link in self._links() if link.host and not link.shut_down]
            for link in links:
                polled = capture.agents.setdefault(link, _Polled())
                if not polled.waiting and now >= polled.next_at and not (capture.over and polled.answered):
                    self._ask(capture, link, polled, now)
            late = now >= capture.ends_at + ANSWER_S
            if capture.over and (late or all(capture.agents[link].answered for link in links)):
                self._close(capture)

    def _stop(self, file: Path) -> None:
        """Ends the capture in a file, or removes it if it has not begun."""
        for capture in [each for each in self._captures if each.request.file == file]:
            if capture.descriptor is None:
                self._captures.remove(capture)
            else:
                self._finish(capture, "stopped on request")

    def _begin(self, capture: _Capture, now: float) -> bool:
        """Begins a capture if its first step has begun."""
        request, now_ns = capture.request, time.monotonic_ns()
        since_ns = 0 if request.recent else now_ns
        if request.first_step is not None:
            if now < self._look_at:
                return False
            self._look_at = now + EVERY_S
            state = read_beacon(run_shm_dir(self._run) / CONTROLLER_BEACON, events=False)
            step = None if state is None else state.counters.get("step")
            if step is None or step.value < request.first_step - 1:
                return False
            since_ns = step.updated_ns
            if request.last_step is not None and step.value >= request.last_step:
                self._captures.remove(capture)  # a resumed run has done the steps before
                return False
        try:
            make_folder(request.file.parent)
            _remove_oldest(request.file.parent)
            capture.descriptor = create_file(request.file, os.O_WRONLY | os.O_APPEND)
        except OSError as error:
            log.warning("no timeline is captured: %s", error)
            self._captures.remove(capture)
            return False
        capture.ends_at = now + request.seconds
        self._write(capture, header_line(self._run, time.time(), now_ns, since_ns))
        log.info("capturing a timeline in %s", request.file)
        return True

    def note(self, frame: Mapping[str, Any]) -> None:
        """Writes what the supervisor publishes."""
        line = {"verdict": frame["headline"], "level": frame["level"], "change": frame["change"]}
        for capture in self._captures:
            self._write(capture, json.dumps({**line, "at_ns": time.monotonic_ns()}) + "\n")

    def close(self) -> None:
        """Ends all captures with the run."""
        for capture in list(self._captures):
            capture.over = capture.over or "the run has ended"
            self._close(capture)

    def _ask(self, capture: _Capture, link: AgentConnection, polled: _Polled, now: float) -> None:
        polled.waiting, polled.next_at, last = True, now + polled.every_s, bool(capture.over)

        def on_reply(reply: dict[str, Any] | None) -> None:
            polled.waiting = False
            polled.answered |= last
            if reply is not None and capture in self._captures:
                self._receive(capture, link, polled, reply)

        link.request("timeline", on_reply, ANSWER_S, capture=capture.name, last=last)

    def _receive(self, capture: _Capture, link: AgentConnection, polled: _Polled, reply: Mapping[str, Any]) -> None:
        content = {name: value for name, value in reply.items() if name not in ("reply", "lost")}
        line = answer_line(link.host, link.clock.ns, content, self._secrets)
        if capture.written + len(line) > MAX_BYTES:
            self._finish(capture, f"the file has reached {MAX_BYTES >> 20} MiB")
            return
        self._write(capture, line)
        change = min(2.0, max(0.5, FULLNESS / max(_fullness(reply), 0.01)))
        polled.every_s = min(LONGEST_S, max(SOONEST_S, polled.every_s * change))
        steps = [each["counters"]["step"][0] for each in reply["processes"] if "step" in each["counters"]]
        if steps:
            self._follow_steps(capture, max(steps))

    def _follow_steps(self, capture: _Capture, step: int) -> None:
        """Ends a capture after its last step. `step` is the current one, counted from 0."""
        request = capture.request
        if capture.first_step is None:
            capture.first_step = step
        over = request.steps is not None and step > capture.first_step + request.steps
        if over or (request.last_step is not None and step >= request.last_step):
            self._finish(capture, "complete")

    def _finish(self, capture: _Capture, why: str) -> None:
        """Lets the agents answer once more, for what they have done until now."""
        capture.over, capture.ends_at = capture.over or why, min(capture.ends_at, time.monotonic())
        for polled in capture.agents.values():
            polled.next_at = 0.0

    def _close(self, capture: _Capture) -> None:
        self._write(capture, json.dumps({"end": capture.over, "at_ns": time.monotonic_ns()}) + "\n")
        self._captures.remove(capture)
        if capture.descriptor is not None:
            os.close(capture.descriptor)

    def _write(self, capture: _Capture, line: str) -> None:
        if capture.descriptor is None:
            return
        try:
            capture.written += os.write(capture.descriptor, line.encode(errors="replace"))
        except OSError as error:  # the disk is full: the run must not suffer
            log.warning("%s: %s", capture.request.file, error)
            capture.over = capture.over or str(error.strerror or error)


def _fullness(reply: Mapping[str, Any]) -> float:
    """The largest share of a ring that was new; more than 1 if some of it was lost."""
    calls = max(map(len, reply["calls"]), default=0) * 3 / 4 / CALL_BYTES
    spans = max((len(each["spans"]) for each in reply["processes"]), default=0)
    return max(spans / MAX_SPANS, calls / CALLS_PER_RING) + any(each["lost"] for each in reply["processes"])


def _remove_oldest(folder: Path) -> None:
    with contextlib.suppress(OSError):
        found = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
        for path in found[: max(0, len(found) - KEPT_CAPTURES + 1)]:
            path.unlink(missing_ok=True)
