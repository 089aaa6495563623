"""Calls in progress, and the functions that wait for them (see `call_wait`)."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, Generic, TypeVar

from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import PendingResult, RemoteError, WorkerDied
from lockstep.cluster.rpc.call_wait import CallTarget, CallWait, call_failed

R = TypeVar("R")
W = TypeVar("W")
CallError = RemoteError | WorkerDied | Stalled
"""The errors of a failed call."""

_NONE: tuple[Callable[[], None], ...] = ()


class PendingCall(Generic[R]):
    """A call of one worker. The thread that reads the worker's results settles it, once."""

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

    def fail(self, error: Exception, now: float | None = None) -> None:
        self._error = error
        self._finish("failed", time.monotonic() if now is None else now)
        call_failed(self)

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

    @property
    def workers(self) -> "Sequence[CallTarget]":
        return (self.worker,)

    def missing(self) -> "Sequence[CallTarget]":
        """The workers whose result or failure has not arrived."""
        return () if self.done() else (self.worker,)

    def failures(self) -> "Sequence[PendingCall[R]]":
        return () if self._error is None else (self,)

    def one_by_one(self) -> "Sequence[PendingCall[R]]":
        return (self,)


class CallGroup(Sequence[PendingCall[R]]):
    """A call of many workers: one handle for all. The handle of one worker's call is made when somebody asks for it.

    Args:
        workers: each of them once.
    """

    def __init__(
        self, workers: Sequence[CallTarget], label: str, read: Callable[[memoryview], R], concurrent: bool = False
    ) -> None:
        self.workers, self.label, self.concurrent = workers, label, concurrent
        self.submitted_at, self.settled_at = time.monotonic(), 0.0
        self._read = read
        self._lock = threading.Lock()
        self._left = len(workers)
        self._arrived: list[tuple[Sequence[CallTarget], Sequence[memoryview], float]] = []
        """Workers with their encoded results, and when these arrived."""
        self._answers: dict[CallTarget, tuple[memoryview, float]] = {}
        """The encoded result of each worker, and when it arrived: of so many of `_arrived` as somebody has needed."""
        self._known = 0
        """How many entries of `_arrived` are in `_answers`."""
        self._errors: dict[CallTarget, tuple[Exception, float]] = {}
        self._calls: dict[CallTarget, PendingCall[R]] = {}
        """The handles that were asked for."""
        self._callbacks: Sequence[Callable[[], None]] = _NONE
        self._on_answers: Callable[[Sequence[CallTarget], Callable[[], list[R]]], None] | None = None

    def __len__(self) -> int:
        return len(self.workers)

    def __getitem__(self, index: Any) -> Any:
        chosen = self.workers[index]
        return [self.call_of(each) for each in chosen] if isinstance(index, slice) else self.call_of(chosen)

    def call_of(self, worker: CallTarget) -> PendingCall[R]:
        """The call of one worker."""
        with self._lock:
            call = self._calls.get(worker)
            if call is None:
                call = PendingCall(worker, self.label, self._read, self.concurrent, self.submitted_at)
                answers = self._all_answers()
                if worker in answers:
                    call.settle(*answers[worker])
                elif worker in self._errors:
                    call.fail(*self._errors[worker])
                self._calls[worker] = call
        return call

    def done(self) -> bool:
        """Whether the result or failure of every worker has arrived."""
        return self._left == 0

    def on_done(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once all workers' calls are settled; immediately if they already are."""
        with self._lock:
            if self._left:
                self._callbacks = (*self._callbacks, callback)
                return
        callback()

    def on_answers(self, callback: Callable[[Sequence[CallTarget], Callable[[], list[R]]], None]) -> None:
        """Calls `callback` as the function `on_answers` does."""
        with self._lock:
            self._on_answers = callback if self._left else None
            known, failed = list(self._all_answers().items()), list(self._errors.items())
        for worker, (payload, _) in known:
            callback((worker,), partial(self._read_all, (payload,)))
        for worker, (error, _) in failed:
            callback((worker,), partial(_raise, error))

    def settle(self, workers: Sequence[CallTarget], payloads: Sequence[memoryview], now: float) -> None:
        """Stores the encoded results of some workers; whoever needs the values decodes them."""
        with self._lock:
            self._arrived.append((workers, payloads, now))
            on_answers, callbacks = self._on_answers, self._settled(len(workers), now)
            known = list(filter(self._calls.get, workers)) if self._calls else ()
        if on_answers is not None:
            on_answers(workers, partial(self._read_all, payloads))
        for worker in known:
            self._calls[worker].settle(payloads[workers.index(worker)], now)
        for callback in callbacks:
            callback()

    def fail(self, worker: CallTarget, error: Exception) -> None:
        """Stores why a worker's call has failed."""
        now = time.monotonic()
        with self._lock:
            self._errors[worker] = error, now
            call, on_answers = self._calls.get(worker), self._on_answers
            callbacks = self._settled(1, now)
        if on_answers is not None:
            on_answers((worker,), partial(_raise, error))
        if call is not None:
            call.fail(error, now)
        call_failed(self)
        for callback in callbacks:
            callback()

    def _settled(self, count: int, now: float) -> Sequence[Callable[[], None]]:
        """Counts settled calls. Returns what to call afterwards. The caller holds the lock."""
        self._left -= count
        if self._left:
            return _NONE
        self.settled_at = now
        callbacks, self._callbacks, self._on_answers = self._callbacks, _NONE, None  # breaks the cycle with its owner
        return callbacks

    def _all_answers(self) -> dict[CallTarget, tuple[memoryview, float]]:
        """The encoded result of each worker, and when it arrived. The caller holds the lock."""
        for workers, payloads, now in self._arrived[self._known :]:
            self._answers.update(zip(workers, zip(payloads, repeat(now), strict=False), strict=True))
        self._known = len(self._arrived)
        return self._answers

    def _read_all(self, payloads: Sequence[memoryview]) -> list[R]:
        return list(map(self._read, payloads))

    def values(self) -> list[R]:
        """The workers' results, when all are there and none has failed."""
        with self._lock:
            answers = self._all_answers()
        return [self._read(answers[worker][0]) for worker in self.workers]

    def any_value(self) -> R:
        """The result of one of the workers, when all are there and none has failed."""
        with self._lock:
            payload = self._arrived[0][1][0]
        return self._read(payload)

    def missing(self) -> Sequence[CallTarget]:
        """The workers whose result or failure has not arrived."""
        if not self._left:
            return ()
        with self._lock:
            settled = set(chain.from_iterable(workers for workers, _, _ in self._arrived)).union(self._errors)
        return [each for each in self.workers if each not in settled] if settled else self.workers

    def failures(self) -> Sequence[PendingCall[R]]:
        """The calls that have failed."""
        return [self.call_of(worker) for worker in list(self._errors)] if self._errors else ()

    def one_by_one(self) -> Sequence[PendingCall[R]]:
        """The calls of all workers."""
        return list(self)


def gather_results(pendings: Sequence[PendingResult[R]], why: str, stall_s: float | None = None) -> list[R]:
    """Waits for all calls and returns their results, in order. Raises the first failure, at most `DEATH_NOTICE_S` after
    it; the other calls continue, and their results are dropped.

    Raises:
        Stalled: a worker made no progress for `stall_s` (by default the cluster's limit).
        RemoteError, WorkerDied: the first failure. A death takes precedence over the errors that it caused elsewhere.
    """
    wait_for_calls([pendings], why, stall_s)
    if isinstance(pendings, CallGroup):
        return pendings.values()
    return [_require_pending_call(pending).take() for pending in pendings]


def on_answers(
    workers: Sequence[W],
    pendings: Sequence[PendingResult[R]],
    callback: Callable[[Sequence[W], Callable[[], list[R]]], None],
) -> None:
    """Calls `callback(answered, read)` whenever some of the workers of a call have answered, in the thread that
    receives the answers; at once for those that have. `read()` returns their results in order, or raises RemoteError or
    WorkerDied; a worker that has failed comes alone."""
    if isinstance(pendings, CallGroup):
        pendings.on_answers(callback)  # type: ignore[arg-type]
        return
    for worker, pending in zip(workers, pendings, strict=True):
        pending.on_done(partial(callback, (worker,), partial(_read_one, pending)))


def _read_one(pending: PendingResult[R]) -> list[R]:
    return [pending.result(why="its answer")]


def _raise(error: Exception) -> Any:
    raise error


def gather_identical(pendings: Sequence[PendingResult[R]], why: str) -> R:
    """Like `gather_results` for calls that all have the same result: only one is decoded."""
    wait_for_calls([pendings], why)
    return pendings.any_value() if isinstance(pendings, CallGroup) else _require_pending_call(pendings[0]).take()


def wait_for_calls(groups: Iterable[Sequence[PendingResult[Any]]], why: str, stall_s: float | None = None) -> None:
    """Waits for the calls of all groups, as `gather_results` does, and leaves their results encoded."""
    CallWait([call for group in groups for call in _calls_of(group)], why, stall_s).until_done()


def gather_outcomes(
    pendings: Sequence[PendingResult[R]], why: str, stall_s: float | None = None
) -> list[R | CallError]:
    """Waits for all calls and returns the result or error of each, in order. A failure does not end the wait."""
    left = _calls_of(pendings)
    stalled: dict[PendingCall[R], Stalled] = {}
    while left:
        try:
            CallWait(left, why, stall_s).until_done()
            break
        except Stalled as error:
            calls = [call for each in left for call in each.one_by_one() if not call.done()]
            of_worker = [call for call in calls if call.worker.name == error.waits_for] or calls
            stalled |= dict.fromkeys(of_worker, error)
        except (RemoteError, WorkerDied):
            calls = [call for each in left for call in each.one_by_one()]  # the outcomes are read below
        left = [call for call in calls if not call.done() and call not in stalled]
    if isinstance(pendings, CallGroup) and pendings.done() and not pendings.failures():
        return pendings.values()
    outcomes: list[R | CallError] = []
    for call in map(_require_pending_call, pendings):
        try:
            outcomes.append(call.take() if call.done() else stalled[call])
        except (RemoteError, WorkerDied) as error:
            outcomes.append(error)
    return outcomes


def call_duration_s(pending: PendingResult[Any]) -> float:
    """Duration of a finished call, in seconds."""
    call = _require_pending_call(pending)
    return call.settled_at - call.submitted_at


def last_settled_at(pendings: Sequence[PendingResult[Any]]) -> float:
    """When the last of these finished calls got its result, in monotonic seconds."""
    return max(call.settled_at for call in _calls_of(pendings))


def _require_pending_call(pending: PendingResult[R]) -> PendingCall[R]:
    if not isinstance(pending, PendingCall):
        raise TypeError(f"expected pending calls of a cluster's workers, not {type(pending).__name__}")
    return pending


def _calls_of(pendings: Sequence[PendingResult[R]]) -> "list[PendingCall[R] | CallGroup[R]]":
    return [pendings] if isinstance(pendings, CallGroup) else [_require_pending_call(each) for each in pendings]
