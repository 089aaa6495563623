"""A wait in progress: its bounds, progress and notices, and how it is shown to other processes. `base.waits` has the
helpers for callers.

This module is separate because the recorder loads it into jobs of other frameworks, which may use Python 3.10.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypedDict, TypeVar

from lockstep.base.errors import PicklableError

T = TypeVar("T")

log = logging.getLogger(__name__)

_ATTEMPT_S = 0.25
"""The time limit of a single blocking call if progress or notices have to be checked meanwhile."""
_SHORTEST_NS = 1_000_000
"""Shorter waits are not recorded when they have ended: a timeline would not show them."""

WAITING_FOR_WORK = "the next call"
"""The reason of a service's wait while it has no call to answer."""
SLEEP = "sleep"
"""The kind of a wait for the clock: no other process can end it."""


class WaitTimeout(PicklableError, TimeoutError):
    """A wait reached its bound. Fields: kind, waits_for, why, waited_s."""

    error_code = "wait_timeout"

    def __init__(self, kind: str, waits_for: str, why: str, waited_s: float) -> None:
        super().__init__(f"waited {waited_s:.1f} s for {waits_for} ({kind}): {why}")
        self.kind, self.waits_for, self.why, self.waited_s = kind, waits_for, why, waited_s


class Stalled(WaitTimeout):
    """The target of a wait made no progress for `stall_s`."""

    error_code = "stalled"

    def __init__(self, kind: str, waits_for: str, why: str, waited_s: float, stall_s: float) -> None:
        super().__init__(kind, waits_for, why, waited_s)
        self.stall_s = stall_s
        self.args = (f"{waits_for} made no progress for {stall_s:.1f} s ({kind}, waited {waited_s:.1f} s): {why}",)


@dataclass(frozen=True, slots=True)
class WaitState:
    """A wait as a notice describes it."""

    kind: str
    waits_for: str
    why: str
    waited_s: float
    stalled_s: float
    """How long the progress value has not changed; equals waited_s if no progress is reported."""
    progress: object = None

    def __str__(self) -> str:
        return f"has been waiting for {self.waits_for} ({self.kind}) for {self.waited_s:.0f} s: {self.why}"


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """A wait of a thread, as shown to other processes. Times are nanoseconds of the host's monotonic clock."""

    kind: str
    waits_for: str
    why: str
    since_ns: int
    deadline_ns: int | None
    moved_ns: int
    """When the waiter last saw progress of the target; `since_ns` if it saw none."""
    thread: int
    thread_name: str

    def display_order(self, pid: int) -> tuple[bool, bool, bool, int]:
        """A key that sorts the waits of process `pid`, the one to show first: a sleep is last, the wait for work is
        behind all others, the main thread is ahead of the other threads, and the longest wait ahead of shorter ones."""
        return self.kind == SLEEP, self.why == WAITING_FOR_WORK, self.thread != pid, self.since_ns


class WaitDisplay(Protocol):
    """Shows the innermost wait of each thread of this process to other processes."""

    def take_wait_slot(self) -> int | None: ...
    def write_wait(self, slot: int, wait: WaitRecord) -> None: ...
    def free_wait_slot(self, slot: int) -> None: ...
    def record_wait(self, wait: WaitRecord) -> None: ...


_find_display: Callable[[], WaitDisplay | None] = lambda: None  # noqa: E731


def show_waits_on(find_display: Callable[[], WaitDisplay | None]) -> None:
    """Has waits shown on the display that `find_display()` returns, which is called at every change. `watch.beacon`
    registers the beacon of the process. Without a display, waits are not shown."""
    global _find_display
    _find_display = find_display


NoticeHandler = Callable[[WaitState], None]


def log_notice(state: WaitState) -> None:
    """The default notice handler: logs a warning."""
    log.warning("%s", state)


class _ThreadWaits(threading.local):
    """The waits of this thread, outermost first, and the display slot that shows the innermost one."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.slot: int | None = None
        self.display: WaitDisplay | None = None
        self.pid = os.getpid()


_thread_waits = _ThreadWaits()


def _publish_wait(current: _ThreadWaits) -> None:
    """Writes the thread's innermost wait to the thread's slot of the display."""
    display = _find_display()
    if current.display is not display:  # the display was opened or replaced, or this process was forked
        current.display, current.slot = display, None
    if display is None:
        return
    if not current.waits:
        if current.slot is not None:
            display.free_wait_slot(current.slot)
            current.slot = None
        return
    if current.slot is None:
        current.slot = display.take_wait_slot()
    if current.slot is not None:
        display.write_wait(current.slot, current.waits[-1].record())


class Wait:
    """A wait in progress. `report_progress(value)` takes the target's progress; `check()` enforces the bounds."""

    def __init__(self, kind: str, waits_for: str, why: str, timeout_s: float | None, stall_s: float | None) -> None:
        self.kind, self.waits_for, self.why, self.timeout_s, self.stall_s = kind, waits_for, why, timeout_s, stall_s
        self.since_ns = self.moved_ns = time.monotonic_ns()
        self.progress: object = None
        self._thread = threading.current_thread().name
        self._thread_id = threading.get_native_id()
        """The kernel's id of the thread. Python 3.11's `threading` keeps the parent's id after a fork."""

    def waited_s(self) -> float:
        return (time.monotonic_ns() - self.since_ns) / 1e9

    def stalled_s(self) -> float:
        return (time.monotonic_ns() - self.moved_ns) / 1e9

    def report_progress(self, value: object) -> bool:
        """Takes the progress of the target. A changed value restarts the stall clock; returns whether it changed."""
        if value == self.progress:
            return False
        self.progress, self.moved_ns = value, time.monotonic_ns()
        _publish_wait(_thread_waits)
        return True

    def remaining(self) -> float | None:
        """Seconds until the nearest bound if the target makes no progress, at least 0; None without a bound."""
        bounds = []
        if self.timeout_s is not None:
            bounds.append(self.timeout_s - self.waited_s())
        if self.stall_s is not None:
            bounds.append(self.stall_s - self.stalled_s())
        return max(0.0, min(bounds)) if bounds else None

    def check(self) -> None:
        """Raises WaitTimeout or Stalled if a bound is reached."""
        waited, stalled = self.waited_s(), self.stalled_s()
        if self.stall_s is not None and stalled >= self.stall_s:
            raise Stalled(self.kind, self.waits_for, self.why, waited, self.stall_s)
        if self.timeout_s is not None and waited >= self.timeout_s:
            raise WaitTimeout(self.kind, self.waits_for, self.why, waited)

    def state(self) -> WaitState:
        return WaitState(self.kind, self.waits_for, self.why, self.waited_s(), self.stalled_s(), self.progress)

    def record(self) -> WaitRecord:
        deadline = None if self.timeout_s is None else self.since_ns + int(self.timeout_s * 1e9)
        if self.stall_s is not None:
            stalled_at = self.moved_ns + int(self.stall_s * 1e9)
            deadline = stalled_at if deadline is None else min(deadline, stalled_at)
        return WaitRecord(
            self.kind, self.waits_for, self.why, self.since_ns, deadline, self.moved_ns, self._thread_id, self._thread
        )


@contextlib.contextmanager
def track_wait(
    kind: str, waits_for: str, why: str, timeout_s: float | None = None, stall_s: float | None = None
) -> Iterator[Wait]:
    """Shows a wait while the enclosed code blocks, for example in a loop that calls `Wait.check()`."""
    wait = Wait(kind, waits_for, why, timeout_s, stall_s)
    if _thread_waits.pid != os.getpid():  # forked: these are the parent's waits
        _thread_waits.waits, _thread_waits.slot, _thread_waits.pid = [], None, os.getpid()
    _thread_waits.waits.append(wait)
    _publish_wait(_thread_waits)
    try:
        yield wait
    finally:
        _thread_waits.waits.remove(wait)
        _publish_wait(_thread_waits)
        display = _thread_waits.display
        if display is not None and time.monotonic_ns() - wait.since_ns >= _SHORTEST_NS:
            display.record_wait(wait.record())


def narrow_wait(waits_for: str) -> None:
    """Changes the target of this thread's innermost wait to the remaining targets. Does nothing outside a wait."""
    if _thread_waits.waits and _thread_waits.waits[-1].waits_for != waits_for:
        _thread_waits.waits[-1].waits_for = waits_for
        _publish_wait(_thread_waits)


class NotReady:
    """The result of an attempt after which the wait continues."""


NOT_READY = NotReady()


class WaitBounds(TypedDict, total=False):
    """Keyword arguments of all helpers; `timeout_s` or `stall_s` is required."""

    timeout_s: float | None
    """The wait ends with WaitTimeout after this many seconds, with or without progress."""
    stall_s: float | None
    """The wait ends with Stalled when `progress()` has not changed for this long."""
    progress: Callable[[], object] | None
    """Returns a value that changes with the target's progress. It is called about four times a second."""
    on_notice: Callable[["WaitState"], None] | None
    """Called while no progress is made, first after `notice_after_s`, then at doubling times; None: `log_notice`."""
    notice_after_s: float | None
    """10 s unless given; None for a wait that is idle by nature and gives no notice."""


def wait_for(kind: str, waits_for: str, why: str, attempt: Callable[[float], T | NotReady], bounds: WaitBounds) -> T:
    """Calls `attempt(seconds)`, which may block that long, until it returns a result: at least once, and once more when
    the bound is reached."""
    timeout_s, stall_s, progress = bounds.get("timeout_s"), bounds.get("stall_s"), bounds.get("progress")
    notice_after_s, on_notice = bounds.get("notice_after_s", 10.0), bounds.get("on_notice") or log_notice
    if timeout_s is None and stall_s is None:
        raise ValueError(f"the wait for {waits_for} ({why}) has no bound: give timeout_s or stall_s")
    notice_at = notice_after_s
    with track_wait(kind, waits_for, why, timeout_s, stall_s) as wait:
        while True:
            left = wait.remaining() or 0.0
            result = attempt(left if progress is None and notice_at is None else min(left, _ATTEMPT_S))
            if not isinstance(result, NotReady):
                return result
            if progress is not None and wait.report_progress(progress()):
                notice_at = notice_after_s
            if left <= 0:
                wait.check()
            if notice_at is not None and wait.stalled_s() >= notice_at:
                on_notice(wait.state())
                notice_at = 2 * wait.stalled_s()
