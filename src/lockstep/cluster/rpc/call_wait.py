"""A wait for calls.

It continues as long as the called workers make progress. After `notice_after_s` without progress it logs a warning, and
after a limit it raises `Stalled`. A wait for many calls ends with the first failure.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

from lockstep.base import waits
from lockstep.base.text import summarize_list
from lockstep.base.wait_state import Stalled, WaitTimeout, narrow_wait
from lockstep.cluster.protocol import WorkerDied

log = logging.getLogger(__name__)

OVERDUE_CHECK_S = 5.0
"""Progress is checked four times a second. If a check is this late, this process itself was stopped or got no CPU time,
and what it knows of other processes is outdated: the stall clocks restart."""
DEATH_NOTICE_S = 1.0
"""Longest time until a death is known. Errors of the dead worker's peers in a collective may arrive earlier."""


class CallTarget(Protocol):
    """What a wait needs to know about a worker."""

    name: str
    progress_count: int
    """Grows whenever the worker makes progress."""
    last_progress_at: float
    """Monotonic time of the last progress."""
    stall_limit_s: float
    notice_after_s: float

    def describe(self) -> str:
        """What the worker is doing, as a verb phrase: its stage, its wait, whether it is stopped."""


class FailedCall(Protocol):
    """The call of a worker that has failed."""

    worker: CallTarget
    settled_at: float

    @property
    def error(self) -> Exception | None: ...
    def take(self) -> Any:
        """Raises the error."""


class WaitedCall(Protocol):
    """What is waited for: the call of one worker, or one of many."""

    submitted_at: float

    @property
    def workers(self) -> Sequence[CallTarget]: ...
    def done(self) -> bool: ...
    def on_done(self, callback: Callable[[], None]) -> None: ...
    def missing(self) -> Sequence[CallTarget]:
        """The workers whose result or failure has not arrived."""

    def failures(self) -> Sequence[FailedCall]:
        """The calls that have failed."""


_NAME, _STALL_LIMIT, _NOTICE_AFTER = map(attrgetter, ("name", "stall_limit_s", "notice_after_s"))
_PROGRESS, _LAST_PROGRESS = map(attrgetter, ("progress_count", "last_progress_at"))

_waits: set["CallWait"] = set()
"""The waits of all threads."""


def call_failed(call: WaitedCall) -> None:
    """Ends the waits for this call, which has failed for one of its workers. Called in any thread."""
    for wait in list(_waits):
        wait.call_failed(call)


class CallWait:
    """One wait for many calls. Ends with the last result, or with the first failure."""

    def __init__(self, calls: Sequence[WaitedCall], why: str, stall_s: float | None) -> None:
        self.calls, self._why, self._stall_s = calls, why, stall_s
        self._changed = threading.Event()
        self._lock = threading.RLock()
        self._open = list(calls)
        """Without calls that were found to be done, last to first."""
        self._left = self._reported = sum(len(call.workers) for call in calls)
        self._began = self._checked_at = time.monotonic()
        self._resumed_at = 0.0
        self._noticed: dict[str, float] = {}
        self._limit: Callable[[CallTarget], float] = _STALL_LIMIT if stall_s is None else lambda _: stall_s

    @cached_property
    def _unsuspicious_s(self) -> float:
        """A worker that has been idle for less gives no cause for a notice, and is not stalled."""
        of_workers = (map(of, call.workers) for call in self.calls for of in (_NOTICE_AFTER, self._limit))
        return float(min(chain.from_iterable(of_workers)))

    def until_done(self) -> None:
        """Returns when all calls are done; raises the first failure."""
        _waits.add(self)
        try:
            self._await_last()
            if not self._changed.is_set() and not any(call.failures() for call in self.calls):
                limit_s = max(max(map(self._limit, call.workers)) for call in self.calls)
                waits.event(
                    self._changed, waits_for=self._missing_workers(), why=self._why, stall_s=limit_s + 1.0,
                    progress=self._check_progress,
                    notice_after_s=None,
                )  # fmt: skip
        finally:
            _waits.discard(self)
        failed = self._failed()
        if failed:
            failed += self._find_deaths(failed)
            first = min(failed, key=lambda call: (not isinstance(call.error, WorkerDied), call.settled_at))
            first.take()

    def _failed(self) -> list[FailedCall]:
        return [failed for call in self.calls for failed in call.failures()]

    def _find_deaths(self, failed: Sequence[FailedCall]) -> list[FailedCall]:
        """Waits shortly for deaths among the other workers, and returns their calls. A death may have caused the errors
        that arrived first, and an effect must not be reported as the cause."""
        known = {call.worker.name for call in failed}
        others = any(worker.name not in known for call in self.calls for worker in call.workers)
        if not others or any(isinstance(call.error, WorkerDied) for call in failed):
            return []

        def died() -> list[FailedCall] | None:
            return [call for call in self._failed() if isinstance(call.error, WorkerDied)] or None

        with contextlib.suppress(WaitTimeout):
            return waits.poll(
                died, kind="call", waits_for="the cluster", why="whether a death explains the failure",
                timeout_s=DEATH_NOTICE_S,
                notice_after_s=None,
            )  # fmt: skip
        return []

    def _missing_workers(self) -> str:
        """The names of the workers whose results are missing."""
        missing = [call.missing() for call in self.calls]
        workers = missing[0] if len(missing) == 1 else list(dict.fromkeys(chain.from_iterable(missing)))
        return summarize_list(workers, 4, _NAME) or "workers"

    def _await_last(self) -> None:
        """Waits for the last call that is open, and then for the last one that still is: with thousands of calls this
        thread need not hear of each. Called in the threads that settle calls."""
        with self._lock:
            while self._open and self._open[-1].done():
                self._open.pop()
            last = self._open[-1] if self._open else None
        if last is None:
            self._changed.set()
        else:
            last.on_done(self._await_last)

    def call_failed(self, call: WaitedCall) -> None:
        """Ends the wait if the call is one of those that it waits for. Called in any thread."""
        if any(each is call for each in self.calls):
            self._changed.set()

    def _check_progress(self) -> object:
        """Checks the stall clock of every worker, and reports workers without progress."""
        now = time.monotonic()
        if now - self._checked_at > OVERDUE_CHECK_S:
            self._resumed_at = now
        self._checked_at = now
        missing = [(call, call.missing()) for call in self.calls]
        self._left = sum(len(workers) for _, workers in missing)
        if self._left != self._reported:
            self._reported = self._left
            narrow_wait(self._missing_workers())
        for call, workers in missing:
            soonest = min(map(_LAST_PROGRESS, workers), default=now)
            if self._noticed or now - soonest >= self._unsuspicious_s:
                for worker in workers:
                    self._check_stall(worker, call.submitted_at, now)
        progress = sum(map(_PROGRESS, chain.from_iterable(workers for _, workers in missing)))
        return progress, self._left, self._resumed_at

    def _check_stall(self, worker: CallTarget, submitted_at: float, now: float) -> None:
        idle_s = now - max(worker.last_progress_at, submitted_at, self._resumed_at)
        if idle_s >= self._limit(worker):
            why = f"{self._why}; it {worker.describe()}"
            raise Stalled("call", worker.name, why, now - self._began, self._limit(worker))
        notice_at = self._noticed.get(worker.name, worker.notice_after_s)
        if idle_s >= notice_at:
            self._noticed[worker.name] = 2 * idle_s
            log.warning(
                "waiting for %s for %.0f s (%s): no progress for %.0f s; it %s",
                worker.name, now - self._began, self._why, idle_s, worker.describe(),
            )  # fmt: skip
        elif worker.name in self._noticed and idle_s < worker.notice_after_s:
            del self._noticed[worker.name]
            log.warning("%s is making progress again (%s)", worker.name, self._why)
