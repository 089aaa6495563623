"""Calls in progress, and the functions that wait for them.

A wait continues as long as the called worker makes progress. After `notice_after_s` without progress it logs a warning,
and after a limit it raises `Stalled`. A wait for many calls ends with the first failure.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from lockstep.base import waits
from lockstep.base.text import summarize_list
from lockstep.base.wait_state import Stalled, WaitTimeout, narrow_wait
from lockstep.cluster.protocol import PendingResult, RemoteError, WorkerDied

R = TypeVar("R")
CallError = RemoteError | WorkerDied | Stalled
"""The errors of a failed call."""

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


_NONE: tuple[Callable[[], None], ...] = ()


class PendingCall(Generic[R]):
    """A call sent to a worker. The thread that reads the worker's results settles it, once."""

    __slots__ = (
        "_callbacks", "_error", "_lock", "_payload", "_read", "_state", "_value", "concurrent", "label", "settled_at",
        "submitted_at", "worker",
    )  # fmt: skip

    def __init__(
        self, worker: CallTarget, label: str, read: Callable[[memoryview], R], concurrent: bool = False,
        now: float | None = None,
    ) -> None:  # fmt: skip
        """Args:
        concurrent: whether the worker may run it at the same time as another call.
        now: the monotonic time.
        """
        self.worker, self.label, self.concurrent = worker, label, concurrent
        self.submitted_at = time.monotonic() if now is None else now
        self.settled_at = 0.0
        self._read = read
        self._lock = threading.Lock()
        self._payload: memoryview | None = None
        self._value: R | None = None
        self._state = "open"
        self._error: Exception | None = None
        self._callbacks: Sequence[Callable[[], None]] = _NONE

    def __repr__(self) -> str:
        return f"PendingCall({self.label} on {self.worker.name}, {self._state})"

    def done(self) -> bool:
        return self._state != "open"

    @property
    def error(self) -> Exception | None:
        """The error that `result` will raise, if it is known already."""
        return self._error

    def result(self, why: str, stall_s: float | None = None) -> R:
        """Returns the value; waits as long as the worker makes progress.

        Raises:
            Stalled: the worker made no progress for `stall_s` (by default the cluster's limit).
            RemoteError: the method raised.
            WorkerDied: the worker ended before it sent a result.
        """
        return self.take() if self.done() else gather_results([self], why, stall_s)[0]

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the call is settled; immediately if it already is."""
        with self._lock:
            if self._state == "open":
                self._callbacks = (*self._callbacks, callback)
                return
        callback()

    def settle(self, payload: memoryview, now: float | None = None) -> None:
        """Stores the encoded result; the thread that calls `take` decodes it."""
        self._payload = payload
        self._finish("answered", time.monotonic() if now is None else now)

    def fail(self, error: Exception) -> None:
        self._error = error
        self._finish("failed", time.monotonic())
        for wait in list(_waits):
            wait.call_failed(self)

    def _finish(self, state: str, now: float) -> None:
        with self._lock:
            if self._state != "open":
                return
            self.settled_at, self._state = now, state
            callbacks, self._callbacks = self._callbacks, _NONE
        for callback in callbacks:
            callback()

    def take(self) -> R:
        """Returns the value of a call that is done. Raises what `result` raises."""
        if self._error is not None:
            raise self._error
        with self._lock:
            if self._payload is not None:
                self._value = self._read(self._payload)
                self._payload = None
        return self._value  # type: ignore[return-value]


def gather_results(pendings: Sequence[PendingResult[R]], why: str, stall_s: float | None = None) -> list[R]:
    """Waits for all calls and returns their results, in order. Raises the first failure, at most `DEATH_NOTICE_S` after
    it; the other calls continue, and their results are dropped.

    Raises:
        Stalled: a worker made no progress for `stall_s` (by default the cluster's limit).
        RemoteError, WorkerDied: the first failure. A death takes precedence over the errors that it caused elsewhere.
    """
    watch = _CallWait([_require_pending_call(pending) for pending in pendings], why, stall_s)
    watch.wait()
    return [call.take() for call in watch.calls]


def gather_identical(pendings: Sequence[PendingResult[R]], why: str) -> R:
    """Like `gather_results` for calls that all have the same result: only the first one is decoded."""
    watch = _CallWait([_require_pending_call(pending) for pending in pendings], why, None)
    watch.wait()
    return watch.calls[0].take()


def gather_outcomes(
    pendings: Sequence[PendingResult[R]], why: str, stall_s: float | None = None
) -> list[R | CallError]:
    """Waits for all calls and returns the result or error of each, in order. A failure does not end the wait."""
    calls = [_require_pending_call(pending) for pending in pendings]
    stalled: dict[PendingCall[R], Stalled] = {}
    while left := [call for call in calls if not call.done() and call not in stalled]:
        try:
            watch = _CallWait(left, why, stall_s)
            watch.wait()
        except Stalled as error:
            of_worker = [call for call in left if call.worker.name == error.waits_for] or left
            stalled |= dict.fromkeys(of_worker, error)
        except (RemoteError, WorkerDied):
            continue  # the outcomes are read from the calls below
    outcomes: list[R | CallError] = []
    for call in calls:
        try:
            outcomes.append(call.take() if call.done() else stalled[call])
        except (RemoteError, WorkerDied) as error:
            outcomes.append(error)
    return outcomes


def call_duration_s(pending: PendingResult[Any]) -> float:
    """Duration of a finished call, in seconds."""
    call = _require_pending_call(pending)
    return call.settled_at - call.submitted_at


def settled_at(pending: PendingResult[Any]) -> float:
    """When a finished call got its result, in monotonic seconds."""
    return _require_pending_call(pending).settled_at


def _require_pending_call(pending: PendingResult[R]) -> PendingCall[R]:
    if not isinstance(pending, PendingCall):
        raise TypeError(f"expected pending calls of a cluster's workers, not {type(pending).__name__}")
    return pending


_waits: set["_CallWait[Any]"] = set()
"""The waits of all threads."""


class _CallWait(Generic[R]):
    """One wait for many calls. Ends with the last result, or with the first failure."""

    def __init__(self, calls: list[PendingCall[R]], why: str, stall_s: float | None) -> None:
        self.calls, self._why, self._stall_s = calls, why, stall_s
        self._changed = threading.Event()
        self._lock = threading.RLock()
        self._open = list(calls)
        """Without calls that were found to be done, last to first."""
        self._left = self._reported = len(calls)
        self._began = self._checked_at = time.monotonic()
        self._resumed_at = 0.0
        self._noticed: dict[str, float] = {}

    def wait(self) -> None:
        """Returns when all calls are done; raises the first failure."""
        _waits.add(self)
        try:
            self._await_last()
            if not self._changed.is_set() and not any(call.error is not None for call in self.calls):
                limit = max(self._limit(call) for call in self.calls)
                waits.event(
                    self._changed, waits_for=self._missing_workers(), why=self._why, stall_s=limit + 1.0,
                    progress=self._check_progress,
                    notice_after_s=None,
                )  # fmt: skip
        finally:
            _waits.discard(self)
        failed = [call for call in self.calls if call.error is not None]
        if failed:
            failed += self._find_deaths(failed)
            first = min(failed, key=lambda call: (not isinstance(call.error, WorkerDied), call.settled_at))
            first.take()

    def _find_deaths(self, failed: Sequence[PendingCall[R]]) -> list[PendingCall[R]]:
        """Waits shortly for deaths among the other workers, and returns their calls. A death may have caused the errors
        that arrived first, and an effect must not be reported as the cause."""
        known = {call.worker.name for call in failed}
        others = [call for call in self.calls if call.worker.name not in known]
        if not others or any(isinstance(call.error, WorkerDied) for call in failed):
            return []

        def died() -> list[PendingCall[R]] | None:
            return [call for call in others if isinstance(call.error, WorkerDied)] or None

        with contextlib.suppress(WaitTimeout):
            return waits.poll(
                died, kind="call", waits_for="the cluster", why="whether a death explains the failure",
                timeout_s=DEATH_NOTICE_S,
                notice_after_s=None,
            )  # fmt: skip
        return []

    def _missing_workers(self) -> str:
        """The names of the workers whose results are missing."""
        names = list(dict.fromkeys(call.worker.name for call in self.calls if not call.done()))
        return summarize_list(names, 4) or "workers"

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

    def call_failed(self, call: PendingCall[Any]) -> None:
        """Ends the wait if the call is one of those that it waits for. Called in any thread."""
        if any(each is call for each in self.calls):
            self._changed.set()

    def _limit(self, call: PendingCall[Any]) -> float:
        return call.worker.stall_limit_s if self._stall_s is None else self._stall_s

    def _check_progress(self) -> object:
        """Checks the stall clock of every worker, and reports workers without progress."""
        now = time.monotonic()
        if now - self._checked_at > OVERDUE_CHECK_S:
            self._resumed_at = now
        self._checked_at = now
        progress = 0
        self._left = sum(not call.done() for call in self.calls)
        if self._left != self._reported:
            self._reported = self._left
            narrow_wait(self._missing_workers())
        for call in self.calls:
            if not call.done():
                progress += call.worker.progress_count
                self._check_stall(call, now)
        return progress, self._left, self._resumed_at

    def _check_stall(self, call: PendingCall[Any], now: float) -> None:
        worker = call.worker
        idle_s = now - max(worker.last_progress_at, call.submitted_at, self._resumed_at)
        if idle_s >= self._limit(call):
            why = f"{self._why}; it {worker.describe()}"
            raise Stalled("call", worker.name, why, now - self._began, self._limit(call))
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
