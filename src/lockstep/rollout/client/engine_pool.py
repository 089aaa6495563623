"""The pool of all engine workers: spreads requests over the live engines and replaces lost ones.

The pool keeps the finished completions of a lost engine. The unfinished requests go to the other engines at once, or to
the replacement if there is no other engine. A completion depends on the seed of its request, not on the engine.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import PendingResult, RemoteError, Worker, WorkerDied, WorkerLauncher
from lockstep.cluster.rpc.futures import CallError
from lockstep.cluster.rpc.group_calls import submit_all
from lockstep.config.rollout import ReissueConfig
from lockstep.data.samples import Completion
from lockstep.rollout.client import engine_slot
from lockstep.rollout.client.engine_failover import EngineFailover, EngineRecovery, WeightSource
from lockstep.rollout.client.engine_slot import HOLD_PER_ENGINE_S, MAX_HOLD_S, Answer, CollectCall, EngineSlot
from lockstep.rollout.client.request_router import EngineLoad, RequestRouter
from lockstep.rollout.client.stragglers import StragglerDetector, gather_patiently
from lockstep.rollout.engine_protocol import CompletionBatch, EngineAPI, EngineProgress, RequestGroup

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

COUNTERS_INTERVAL_S = 1.0
"""How often the counters of the engines are read during a wait; with more than 64 engines less often."""
_FAILURES = RemoteError, WorkerDied, Stalled
_Dispatched = tuple[list[tuple[EngineSlot, Worker]], Sequence[PendingResult[None]]]
"""Engines that were sent requests, with their workers, and the calls that sent them."""


class EnginePool:
    """All engines of a run. The run's thread submits requests and collects completions; threads of the failover replace
    lost engines. One lock guards the slots, the router and the straggler detector.

    Args:
        changed: set when completions may have arrived, or there is an error.
        choose_engine: picks the engine for a group, given the load of the live engines. Called in any thread.
        launcher, recovery: restart lost engines; without them the first loss is an error.
        reissue: when requests of slow engines are sent to other engines as well.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        changed: threading.Event,
        choose_engine: Callable[[RequestGroup, EngineLoad], int],
        launcher: WorkerLauncher | None = None,
        recovery: EngineRecovery | None = None,
        reissue: ReissueConfig | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._slots = [EngineSlot(rank, worker) for rank, worker in enumerate(workers)]
        self._router = RequestRouter(range(len(workers)), choose_engine)
        self._stragglers = StragglerDetector(reissue or ReissueConfig())
        self.failover = EngineFailover(self, launcher, recovery)
        self._changed = changed
        self._answers: deque[Answer] = deque()
        """Answers to `collect` calls that are not taken yet. Appended without the lock."""
        self._completions: list[Completion] = []
        """Completions that were read from engines and not collected yet."""
        self._incoming: dict[int, Worker] = {}
        """Engines that are excluded or starting, by rank."""
        self._weights: tuple[WeightSource, int] | None = None
        self._error: Exception | None = None
        self._closed = False
        self._counters_at = 0.0
        self._hold_s = min(MAX_HOLD_S, HOLD_PER_ENGINE_S * len(workers))
        self.changes = 0
        """How often an engine was lost or joined, which counts as progress of a wait."""
        self.reissued = 0
        """Number of requests that were reissued because their engine was far behind."""
        for slot, worker in zip(self._slots, workers, strict=True):
            self._watch_for_death(slot, worker)

    @property
    def workers(self) -> list[Worker]:
        """The live engines."""
        return [slot.worker for slot in self._slots if slot.worker is not None]

    @property
    def progress_count(self) -> int:
        """The sum of the progress counts that engines with open requests have reported."""
        workers = [self._slots[rank].worker for rank in self._router.busy_engines()]
        return sum([worker.progress_count for worker in workers if worker is not None])

    # --- requests

    def submit(self, groups: Sequence[RequestGroup]) -> None:
        """Sends requests to engines, each group to the engine that `choose_engine` picks. Raises RemoteError:
        BadRequest."""
        self._raise_error()
        with self._lock:
            self._router.add(groups)
            dispatched = self._dispatch()
        for (slot, worker), outcome in zip(dispatched[0], self._gather(*dispatched, "submit requests"), strict=True):
            if outcome is None:  # as usual
                continue
            if isinstance(outcome, RemoteError):
                raise outcome
            self._handle_loss(slot, worker, outcome)
        self._raise_error()

    def collect(self) -> list[Completion]:
        """Returns the completions since the last call, without waiting. Raises an error that recovery did not
        handle."""
        self._raise_error()
        self._read_answers()
        self._raise_error()
        with self._lock:
            completions, self._completions = self._completions, []
        return completions

    def begin_wait(self) -> None:
        """Begins a wait for completions. Engines that are slow from now on may become stragglers."""
        with self._lock:
            self._stragglers.begin_wait(time.monotonic())

    def reissue_stragglers(self, step: int) -> None:
        """Reissues the open requests of steps up to `step` if only stragglers still have them. Returns at once."""
        now = time.monotonic()
        if now < self._counters_at or not self._stragglers.config.enable:
            return
        with self._lock:
            live = [slot for slot in self._slots if slot.worker is not None]
            self._counters_at = now + max(COUNTERS_INTERVAL_S, COUNTERS_INTERVAL_S * len(live) / 64)
            engine_slot.request_counters([slot for slot in live if self._update_counters(slot, now)])
            router = self._router
            blocking = router.blocking_engines(step)
            if not blocking or router.load.held_back.issuperset(router.load.live - blocking):
                return
            for rank, straggler in self._stragglers.find(blocking, now).items():
                self._stragglers.penalize(rank, straggler, now)
                count = router.reissue(rank, step)
                self._watch_dispatched(self._dispatch())
                self.reissued += count
                log.warning("engine-%d %s: reissuing %d requests to other engines", rank, straggler.why, count)

    def replace_stalled(self, error: Stalled) -> bool:
        """Replaces all engines with open requests, because none of them has made progress. Returns whether it could."""
        live = [(slot, slot.worker) for slot in self._slots if slot.worker is not None]
        stalled = [(slot, worker) for slot, worker in live if self._router.open_requests(slot.rank)]
        for slot, worker in stalled:
            self._handle_loss(slot, worker, error)
        return bool(stalled) and self._error is None

    # --- all engines

    def load_weights(self, source: WeightSource, version: int, having: Collection[Worker] = ()) -> None:
        """Makes every engine load a version, except for the workers `having` it already. A replacement starts with it.
        An engine whose node does not have it yet is excluded until it has arrived."""
        by_name: dict[str, tuple[str, int]] = {}
        with self._lock:
            self._weights = source, version
            for slot in self._slots:
                if slot.worker is not None and slot.worker not in having:
                    folder = source.store_folder(slot.worker, version)
                    if folder is None:
                        self._exclude(slot, slot.worker, "until its node has the weights")
                    elif slot.silent:
                        self._exclude(slot, slot.worker, "until it answers")
                    else:
                        by_name[slot.worker.spec.name] = folder, version
            self._watch_dispatched(self._dispatch())
        self.call_all(EngineAPI.load_weights, f"weights of version {version}", by_name)

    def counters(self) -> list[EngineProgress]:
        """The counters of the live engines that are not silent."""
        names = [slot.worker.spec.name for slot in self._slots if slot.worker is not None and not slot.silent]
        return self.call_all(EngineAPI.progress, "progress", dict.fromkeys(names, ()))

    def progress_by_engine(self, selected: Callable[[Worker], bool]) -> dict[str, int]:
        """Progress counts of engines by name, including starting and excluded engines. Any thread may call."""
        with self._lock:
            workers = [*self.workers, *self._incoming.values()]
        return {worker.spec.name: worker.progress_count for worker in workers if selected(worker)}

    def kill_engines(self, selected: Callable[[Worker], bool], why: str) -> bool:
        """Kills and replaces engines, including starting and excluded ones. Returns whether there was one."""
        if not self.failover.enabled:
            return False
        with self._lock:
            serving = [(slot, slot.worker) for slot in self._slots if slot.worker is not None and selected(slot.worker)]
            ranks = [rank for rank, worker in self._incoming.items() if selected(worker)]
            incoming = [self._incoming.pop(rank) for rank in ranks]
        for worker in (*(worker for _, worker in serving), *incoming):
            log.warning("killing %s: %s", worker.spec.name, why)
        for slot, worker in serving:
            self._handle_loss(slot, worker, WorkerDied(worker.spec.name, slot.rank, None, "", why))
        self.failover.kill([worker for _, worker in serving])
        self.failover.kill(incoming)  # the failover threads that wait for their answers replace them
        return bool(serving or incoming)

    def close(self) -> None:
        """Stops replacing engines."""
        with self._lock:
            self._closed = True

    # --- for the failover

    @property
    def weights(self) -> tuple[WeightSource, int] | None:
        """Where engines find the version that all serve, and the version."""
        return self._weights

    @property
    def stopped(self) -> bool:
        """Whether engines are no longer replaced."""
        return self._closed or self._error is not None

    @property
    def live_engines(self) -> int:
        return len(self._router.load)

    @contextlib.contextmanager
    def incoming(self, rank: int, worker: Worker) -> Iterator[None]:
        """While in this context, `kill_engines` can kill the worker, although it is in no slot."""
        with self._lock:
            self._incoming[rank] = worker
        try:
            yield
        finally:
            with self._lock:
                if self._incoming.get(rank) is worker:
                    del self._incoming[rank]

    def install(self, rank: int, worker: Worker, weights: tuple[WeightSource, int] | None) -> bool:
        """Puts a worker with these weights into its slot. Returns False, and does not, if newer ones were published."""
        slot = self._slots[rank]
        with self._lock:
            if self._weights != weights:
                return False
            slot.worker = worker
            self._router.add_engine(rank)
            self.changes += 1
            dispatched = self._dispatch()
        self._watch_for_death(slot, worker)
        self._watch_dispatched(dispatched)
        self._changed.set()
        return True

    def fail(self, error: Exception) -> None:
        """Makes the next call of the run's thread raise the error."""
        if not self.stopped:
            self._error = error
        self._changed.set()

    # --- with the lock held

    def _dispatch(self) -> _Dispatched:
        """Sends unassigned requests to live engines."""
        assigned = self._router.assign()
        slots = [self._slots[rank] for rank in assigned]
        called = [(slot, slot.worker) for slot in slots if slot.worker is not None]  # all: the router knows who is live
        requests = list(assigned.values())
        if called and all(slot.collecting is None for slot in slots):  # as usual
            return called, CollectCall(slots, self._hold_s, self._on_answers).submit_requests(requests)
        calls = submit_all([worker for _, worker in called], EngineAPI.submit, [(each,) for each in requests])
        self._request_completions(slots)
        return called, calls

    def _request_completions(self, slots: Iterable[EngineSlot]) -> None:
        """Asks engines with open requests for their completions, unless they have been asked already."""
        asked = [slot for slot in slots if slot.collecting is None and self._router.open_requests(slot.rank)]
        if asked:
            CollectCall(asked, self._hold_s, self._on_answers).submit()

    def _on_answers(self, answer: Answer) -> None:
        """Records answers to a `collect` call. Called in any thread, without the lock."""
        self._answers.append(answer)
        if not self._changed.is_set():  # a wait clears it before it takes the answers
            self._changed.set()

    def _take_completions(self, answered: Sequence[tuple[EngineSlot, CompletionBatch]]) -> None:
        """Keeps engines' completions, and aborts the same requests in other engines."""
        unpacked = CompletionBatch.unpack_all([batch for _, batch in answered])
        for (slot, _), completions in zip(answered, unpacked, strict=True):
            fresh, duplicates = self._router.complete(slot.rank, completions)
            self._completions += fresh
            for rank, ids in duplicates.items():
                other = self._slots[rank]
                if other.worker is not None:
                    other.aborting = other.worker.submit(EngineAPI.abort, ids)

    def _vacate(self, slot: EngineSlot) -> int:
        """Empties a slot. Returns the number of its requests that go to other engines."""
        worker, collecting = slot.worker, slot.collecting
        slot.worker = slot.collecting = None
        if worker is not None and collecting is not None and (call := collecting.of(worker)).done():
            with contextlib.suppress(RemoteError, WorkerDied):  # the engine was lost before it sent any
                self._take_completions([(slot, call.result(why="completions"))])
        self._stragglers.forget(slot.rank)
        slot.reset()
        return self._router.remove_engine(slot.rank)

    def _exclude(self, slot: EngineSlot, worker: Worker, until: str) -> None:
        """Takes an engine out of its slot until it has loaded the current weights. `until` completes the warning."""
        if slot.worker is not worker:
            return
        log.warning("%s is excluded %s", worker.spec.name, until)
        self.changes += 1
        self._vacate(slot)
        self._incoming[slot.rank] = worker
        self.failover.readmit(slot.rank, worker)

    def _update_counters(self, slot: EngineSlot, now: float) -> bool:
        """Reads an engine's counters if they have arrived. Returns whether new ones are due."""
        busy = bool(self._router.open_requests(slot.rank))
        (self._stragglers.mark_busy if busy else self._stragglers.mark_idle)(slot.rank, now)
        if slot.counters is not None and slot.counters.done():
            with contextlib.suppress(RemoteError, WorkerDied):  # other calls report the loss
                self._stragglers.observe(slot.rank, now, slot.counters.result(why="counters"))
                if not busy and not slot.silent and self._stragglers.penalty_over(slot.rank, now):
                    self._router.release(slot.rank)
            slot.counters = None
        held_back = slot.rank in self._router.load.held_back
        return slot.counters is None and slot.worker is not None and (busy or held_back)

    # --- without the lock

    def _read_answers(self) -> None:
        """Takes the completions that have arrived, and asks their engines for more."""
        while self._answers:
            with self._lock:
                answered: list[tuple[EngineSlot, CompletionBatch]] = []
                while self._answers:
                    call, workers, outcome = self._answers.popleft()
                    waiting = [call.slots[worker] for worker in workers]
                    if isinstance(outcome, list):
                        answered += [each for each in zip(waiting, outcome, strict=True) if each[0].collecting is call]
                    elif not isinstance(outcome, RemoteError | WorkerDied):
                        raise outcome
                    elif waiting[0].collecting is call:
                        self._handle_loss(waiting[0], workers[0], outcome)
                for slot, _ in answered:
                    slot.collecting = None
                self._take_completions(answered)
                self._request_completions([slot for slot, _ in answered])

    def _handle_loss(self, slot: EngineSlot, worker: Worker, error: CallError) -> None:
        """Handles the loss of an engine: keeps its completions, sends its requests to others, and starts a replacement.
        Called in any thread. Does nothing if the worker is no longer in the slot."""
        with self._lock:
            if slot.worker is not worker or self._closed:
                return
            self.changes += 1
            unfinished = self._vacate(slot)
            try:
                failure = self.failover.decide(slot.rank, worker, error)
            except Exception as final:  # noqa: BLE001 - raised by the next call of the run's thread
                self._error = final
            else:
                self._watch_dispatched(self._dispatch())
                self.failover.replace(slot.rank, worker, failure, unfinished)
        self._changed.set()

    def _watch_for_death(self, slot: EngineSlot, worker: Worker) -> None:
        if self.failover.enabled:
            worker.on_death(lambda error: self._handle_loss(slot, worker, error))

    def _watch_dispatched(self, dispatched: _Dispatched) -> None:
        """Makes the next call raise the error if an engine refuses requests. For calls that no thread waits for."""

        def on_done(pending: PendingResult[None]) -> None:
            try:
                pending.result(why="submit requests")
            except RemoteError as error:
                self._error = error
                self._changed.set()
            except WorkerDied:
                return  # `_watch_for_death` handles it

        for pending in dispatched[1]:
            pending.on_done(lambda pending=pending: on_done(pending))  # type: ignore[misc]

    def call_all(
        self, method: Callable[Concatenate[Any, P], T], why: str, by_name: Mapping[str, tuple[Any, ...]] | None = None
    ) -> list[T]:
        """Calls all live engines, or those with arguments by their names, and returns their answers. Handles lost
        engines."""
        self._raise_error()
        with self._lock:
            live = [(slot, slot.worker) for slot in self._slots if slot.worker is not None]
            called = [(slot, worker) for slot, worker in live if by_name is None or worker.spec.name in by_name]
            arguments = [() if by_name is None else by_name[worker.spec.name] for _, worker in called]
            pendings = submit_all([worker for _, worker in called], method, arguments)
        results = []
        for (slot, worker), outcome in zip(called, self._gather(called, pendings, why), strict=True):
            if isinstance(outcome, _FAILURES):
                self._handle_loss(slot, worker, outcome)
            else:
                results.append(outcome)
        self._raise_error()
        return results

    def _gather(
        self, called: Sequence[tuple[EngineSlot, Worker]], pendings: Sequence[PendingResult[T]], why: str
    ) -> list[T | CallError]:
        """Waits for the outcomes of calls. Engines that are silent for too long are excluded until they answer."""
        outcomes, silent = gather_patiently(pendings, why, self._stragglers.config, lambda: len(self.workers))
        if silent:
            with self._lock:
                for (slot, worker), outcome in zip(called, outcomes, strict=True):
                    if isinstance(outcome, Stalled):
                        self._exclude(slot, worker, "until it answers")
                self._watch_dispatched(self._dispatch())
        # For an excluded engine the outcome is an error, but its slot is empty, so the callers do nothing.
        return outcomes

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
