"""Calls under way, and the one wait for them.

A wait goes on as long as the worker called makes progress. Without any it is told of after `notice_after_s`, and
ends with `Stalled` after the limit. Whichever of many calls fails first ends the wait for all of them.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from lockstep.base import waits
from lockstep.base.bounded_wait import Stalled, WaitTimeout, narrow_wait
from lockstep.base.text import summarize_list
from lockstep.cluster.protocol import PendingResult, RemoteError, WorkerDied

R = TypeVar("R")
CallError = RemoteError | WorkerDied | Stalled
"""What a call may end with instead of a result."""

log = logging.getLogger(__name__)

OVERDUE_CHECK_S = 5.0
"""A look at the progress is due four times a second. When it comes this late, this process itself was stopped or
starved, and what it knows about others is old: the stall clocks start again."""
DEATH_NOTICE_S = 1.0
"""The news of a death takes so long at most. Peers whose collective it broke may be heard before it is."""


class CallTarget(Protocol):
    """What a wait needs to know of a worker."""

    name: str
    moves: int
    """Grows whenever the worker makes progress."""
    moved_at: float
    """When it did last, on the monotonic clock."""
    stall_limit_s: float
    notice_after_s: float

    def describe(self) -> str:
        """What it does now, for a sentence after "it": stage, wait, whether it is stopped."""


class PendingCall(Generic[R]):
    """A call sent to a worker. Settled once, by the thread that reads the worker's answers."""

    __slots__ = (
        "_callbacks", "_error", "_lock", "_payload", "_read", "_state", "_value", "beside", "label", "settled_at",
        "submitted_at", "worker",
    )  # fmt: skip

    def __init__(self, worker: CallTarget, label: str, read: Callable[[memoryview], R], beside: bool = False) -> None:
        """`labeled_rows`: answered beside the calls that run in order."""
        self.worker, self.label, self.beside = worker, label, beside
        self.submitted_at = time.monotonic()
        self.settled_at = 0.0
        self._read = read
        self._lock = threading.Lock()
        self._payload: memoryview | None = None
        self._value: R | None = None
        self._state = "open"
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"PendingCall({self.label} on {self.worker.name}, {self._state})"

    def done(self) -> bool:
        return self._state != "open"

    @property
    def error(self) -> Exception | None:
        """What `result` will raise, when that is known already."""
        return self._error

    def result(self, why: str, stall_s: float | None = None) -> R:
        """The value; waits as long as the worker makes progress.

        Raises:
            Stalled: it made none for `stall_s` (the cluster's limit when None).
            RemoteError: the method raised.
            WorkerDied: the worker ended first.
        """
        return self.take() if self.done() else gather_results([self], why, stall_s)[0]

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the call is settled; now, when it is."""
        with self._lock:
            if self._state == "open":
                self._callbacks.append(callback)
                return
        callback()

    def settle(self, payload: memoryview) -> None:
        """The answer has arrived; it is decoded by whoever wants it."""
        self._payload = payload
        self._finish("answered")

    def fail(self, error: Exception) -> None:
        self._error = error
        self._finish("failed")

    def _finish(self, state: str) -> None:
        with self._lock:
            if self._state != "open":
                return
            self.settled_at, self._state = time.monotonic(), state
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def take(self) -> R:
        """The value of a call that is done. Raises what `result` raises."""
        if self._error is not None:
            raise self._error
        with self._lock:
            if self._payload is not None:
                self._value = self._read(self._payload)
                self._payload = None
        return self._value  # type: ignore[return-value]


def gather_results(pendings: Sequence[PendingResult[R]], why: str, stall_s: float | None = None) -> list[R]:
    """The results of all calls, in their order. The first failure is raised, `DEATH_NOTICE_S` later at most; the
    other calls go on, and their results are dropped.

    Raises:
        Stalled: one of the workers made no progress for `stall_s` (the cluster's limit when None).
        RemoteError, WorkerDied: of the call that failed first; a death before what it caused elsewhere.
    """
    watch = _CallWait([_require_pending_call(pending) for pending in pendings], why, stall_s)
    watch.wait()
    return [call.take() for call in watch.calls]


def gather_identical(pendings: Sequence[PendingResult[R]], why: str) -> R:
    """Waits for all calls like `gather_results`; the first's result, as all give the same: the others' are not even
    decoded."""
    watch = _CallWait([_require_pending_call(pending) for pending in pendings], why, None)
    watch.wait()
    return watch.calls[0].take()


def gather_outcomes(
    pendings: Sequence[PendingResult[R]], why: str, stall_s: float | None = None
) -> list[R | CallError]:
    """The outcome of every call, in their order: its result, or what it failed with. Nobody's failure ends the wait
    for the others."""
    calls = [_require_pending_call(pending) for pending in pendings]
    stalled: dict[PendingCall[R], Stalled] = {}
    while left := [call for call in calls if not call.done() and call not in stalled]:
        try:
            watch = _CallWait(left, why, stall_s)
            watch.wait()
        except Stalled as error:
            still = [call for call in left if call.worker.name == error.waits_for] or left
            stalled |= dict.fromkeys(still, error)
        except (RemoteError, WorkerDied):
            continue  # what the call itself says, below
    outcomes: list[R | CallError] = []
    for call in calls:
        try:
            outcomes.append(call.take() if call.done() else stalled[call])
        except (RemoteError, WorkerDied) as error:
            outcomes.append(error)
    return outcomes


def call_duration_s(pending: PendingResult[Any]) -> float:
    """How long a call took that is done."""
    call = _require_pending_call(pending)
    return call.settled_at - call.submitted_at


def _require_pending_call(pending: PendingResult[R]) -> PendingCall[R]:
    if not isinstance(pending, PendingCall):
        raise TypeError(f"gather takes the pending calls of a cluster's workers, not {type(pending).__name__}")
    return pending


class _CallWait(Generic[R]):
    """One wait for many calls."""

    def __init__(self, calls: list[PendingCall[R]], why: str, stall_s: float | None) -> None:
        self.calls, self._why, self._stall_s = calls, why, stall_s
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._left = self._told = len(calls)
        self._began = self._looked = time.monotonic()
        self._thawed = 0.0
        self._noticed: dict[str, float] = {}

    def wait(self) -> None:
        """Returns when all are answered; raises the first failure."""
        for call in self.calls:
            call.on_done(partial(self._one, call))
        if self._left and not self._changed.is_set():
            limit = max(self._limit(call) for call in self.calls)
            waits.event(
                self._changed, waits_for=self._whom(), why=self._why, stall_s=limit + 1.0, progress=self._look,
                notice_after_s=None,
            )  # fmt: skip
        failed = [call for call in self.calls if call.error is not None]
        if failed:
            failed += self._deaths_behind(failed)
            first = min(failed, key=lambda call: (not isinstance(call.error, WorkerDied), call.settled_at))
            first.take()

    def _deaths_behind(self, failed: Sequence[PendingCall[R]]) -> list[PendingCall[R]]:
        """Calls of other workers that died, where errors of their peers came first: an effect shall not be told as
        the cause."""
        heard = {call.worker.name for call in failed}
        others = [call for call in self.calls if call.worker.name not in heard]
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

    def _whom(self) -> str:
        """Those that have not answered yet."""
        names = list(dict.fromkeys(call.worker.name for call in self.calls if not call.done()))
        return summarize_list(names, 4) or "workers"

    def _one(self, call: PendingCall[Any]) -> None:
        with self._lock:
            self._left -= 1
        if call.error is not None or self._left == 0:
            self._changed.set()

    def _limit(self, call: PendingCall[Any]) -> float:
        return call.worker.stall_limit_s if self._stall_s is None else self._stall_s

    def _look(self) -> object:
        """Holds the stall clock of every worker, and tells of those that stand still."""
        now = time.monotonic()
        if now - self._looked > OVERDUE_CHECK_S:
            self._thawed = now
        self._looked = now
        moves = 0
        if self._left != self._told:
            self._told = self._left
            narrow_wait(self._whom())
        for call in self.calls:
            if not call.done():
                moves += call.worker.moves
                self._judge(call, now)
        return moves, self._left, self._thawed

    def _judge(self, call: PendingCall[Any], now: float) -> None:
        worker = call.worker
        quiet = now - max(worker.moved_at, call.submitted_at, self._thawed)
        if quiet >= self._limit(call):
            why = f"{self._why}; it {worker.describe()}"
            raise Stalled("call", worker.name, why, now - self._began, self._limit(call))
        notice_at = self._noticed.get(worker.name, worker.notice_after_s)
        if quiet >= notice_at:
            self._noticed[worker.name] = 2 * quiet
            log.warning(
                "waiting %.0f s for %s (%s): no progress since %.0f s, it %s",
                now - self._began, worker.name, self._why, quiet, worker.describe(),
            )  # fmt: skip
        elif worker.name in self._noticed and quiet < worker.notice_after_s:
            del self._noticed[worker.name]
            log.warning("%s goes on (%s)", worker.name, self._why)
