"""All engine workers: requests are spread over the live engines, and lost engines are replaced.

Finished completions of a lost engine are kept; its unfinished requests go to the other engines at once, or to its
successor if it was the only one. Completions depend on the seeds of their requests, not on the engine that makes
them.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import PendingResult, RemoteError, Worker, WorkerDied, WorkerLauncher
from lockstep.cluster.rpc.futures import CallError
from lockstep.config.rollout import ReissueConfig
from lockstep.data.samples import Completion
from lockstep.rollout.client.engine_failover import EngineFailover, EngineRecovery, WeightSource
from lockstep.rollout.client.engine_slot import HOLD_PER_ENGINE_S, MAX_HOLD_S, EngineSlot
from lockstep.rollout.client.request_router import EngineLoad, RequestRouter
from lockstep.rollout.client.stragglers import StragglerDetector, gather_patiently
from lockstep.rollout.engine_protocol import CompletionBatch, EngineAPI, EngineProgress, Request

T = TypeVar("T")

log = logging.getLogger(__name__)

COUNTERS_INTERVAL_S = 1.0
"""How often the counters of up to 64 engines are read during a wait; of more engines less often."""
_Dispatch = tuple[EngineSlot, Worker, PendingResult[None]]
"""Requests that were sent to an engine, and the call that did so."""


class EnginePool:
    """All engines of a run. The run's thread submits requests and collects completions. Losses are handled by threads
    of the failover. One lock guards the slots, the router and the straggler detector.

    Args:
        changed: set when there may be completions, or an error.
        choose_engine: picks the engine for a group, given the load of the live engines; from any thread.
        launcher, recovery: without them the first loss is an error.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        changed: threading.Event,
        choose_engine: Callable[[Sequence[Request], EngineLoad], int],
        launcher: WorkerLauncher | None = None,
        recovery: EngineRecovery | None = None,
        reissue: ReissueConfig | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._slots = [EngineSlot(rank, worker) for rank, worker in enumerate(workers)]
        self._router = RequestRouter(range(len(workers)), choose_engine)
        self._stragglers = StragglerDetector(reissue or ReissueConfig())
        self._failover = EngineFailover(self, launcher, recovery)
        self._changed = changed
        self._answers: deque[tuple[EngineSlot, PendingResult[CompletionBatch]]] = deque()
        """Answered `collect` calls, appended without the lock: few of a thousand engines answer at a time."""
        self._completions: list[Completion] = []
        """Completions that have arrived and were not collected yet."""
        self._incoming: dict[int, Worker] = {}
        """Engines that are excluded or starting, by rank."""
        self._weights: tuple[WeightSource, int] | None = None
        self._error: Exception | None = None
        self._closed = False
        self._counters_at = 0.0
        self._hold_s = min(MAX_HOLD_S, HOLD_PER_ENGINE_S * len(workers))
        self.changes = 0
        """Grows whenever an engine is lost or joins: progress while there is no other."""
        self.reissued = 0
        """Requests that were reissued because their engine was far behind."""
        for slot, worker in zip(self._slots, workers, strict=True):
            self._watch_for_death(slot, worker)

    @property
    def workers(self) -> list[Worker]:
        """The live engines."""
        return [slot.worker for slot in self._slots if slot.worker is not None]

    @property
    def moves(self) -> int:
        """Changes as engines with open requests make progress, as they report unasked."""
        open_requests = self._router.open_requests
        return sum(slot.worker.moves for slot in self._slots if open_requests(slot.rank) and slot.worker is not None)

    # --- requests

    def submit(self, requests: Sequence[Request]) -> None:
        """Sends requests to engines, each group to the engine that `choose_engine` picks.

        Raises:
            RemoteError: BadRequest.
        """
        self._raise_error()
        with self._lock:
            self._router.add(requests)
            dispatched = self._dispatch()
        for slot, worker, outcome in self._outcomes(dispatched, "hand over requests"):
            if isinstance(outcome, RemoteError):
                raise outcome
            if isinstance(outcome, WorkerDied | Stalled):
                self._handle_loss(slot, worker, outcome)
        self._raise_error()

    def collect(self) -> list[Completion]:
        """The completions since the last call; returns at once. Raises an error that recovery did not handle."""
        self._raise_error()
        while self._answers:
            self._read_answer(*self._answers.popleft())
        self._raise_error()
        with self._lock:
            completions, self._completions = self._completions, []
        return completions

    def begin_wait(self) -> None:
        """Notes that a wait for completions begins: stragglers are measured from now on."""
        with self._lock:
            self._stragglers.begin_wait(time.monotonic())

    def reissue_stragglers(self, step: int) -> None:
        """Reissues the requests of steps up to `step` that only far slower engines still have. Returns at once."""
        now = time.monotonic()
        if now < self._counters_at or not self._stragglers.config.enable:
            return
        with self._lock:
            live = [slot for slot in self._slots if slot.worker is not None]
            self._counters_at = now + max(COUNTERS_INTERVAL_S, COUNTERS_INTERVAL_S * len(live) / 64)
            for slot in live:
                self._update_counters(slot, now)
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
        """Replaces the engines with open requests, because nothing has made progress. Returns whether that began."""
        live = [(slot, slot.worker) for slot in self._slots if slot.worker is not None]
        stalled = [(slot, worker) for slot, worker in live if self._router.open_requests(slot.rank)]
        for slot, worker in stalled:
            self._handle_loss(slot, worker, error)
        return bool(stalled) and self._error is None

    # --- all engines

    def load_weights(self, source: WeightSource, version: int, having: Collection[Worker] = ()) -> None:
        """Makes every engine load a version, except those `having` it. An engine that is being replaced starts with it.
        An engine whose node does not have it is excluded until it has."""
        folders: dict[str, str] = {}
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
                        folders[slot.worker.spec.name] = folder
            self._watch_dispatched(self._dispatch())
        self._call_all(
            lambda worker: worker.submit(EngineAPI.load_weights, folders[worker.spec.name], version),
            f"weights of version {version}", folders,
        )  # fmt: skip

    def sleep(self) -> None:
        """Makes idle engines release the devices to the trainer; they wake for their next request."""
        if not self._router.any_open():
            self._call_all(lambda worker: worker.submit(EngineAPI.sleep), "sleep")

    def counters(self) -> list[EngineProgress]:
        """The counters of the live engines that answer."""
        names = {slot.worker.spec.name for slot in self._slots if slot.worker is not None and not slot.silent}
        return self._call_all(lambda worker: worker.submit(EngineAPI.progress), "progress", names)

    def moves_by_engine(self, selected: Callable[[Worker], bool]) -> dict[str, int]:
        """Progress of engines by name, starting and excluded ones included. From any thread."""
        with self._lock:
            workers = [*self.workers, *self._incoming.values()]
        return {worker.spec.name: worker.moves for worker in workers if selected(worker)}

    def kill_engines(self, selected: Callable[[Worker], bool], why: str) -> bool:
        """Kills and replaces engines, starting and excluded ones included. Whether there was one."""
        if not self._failover.enabled:
            return False
        with self._lock:
            serving = [(slot, slot.worker) for slot in self._slots if slot.worker is not None and selected(slot.worker)]
            ranks = [rank for rank, worker in self._incoming.items() if selected(worker)]
            incoming = [self._incoming.pop(rank) for rank in ranks]
        for worker in (*(worker for _, worker in serving), *incoming):
            log.warning("killing %s: %s", worker.spec.name, why)
        for slot, worker in serving:
            self._handle_loss(slot, worker, WorkerDied(worker.spec.name, slot.rank, None, "", why))
        self._failover.kill([worker for _, worker in serving])
        self._failover.kill(incoming)  # the failover thread that waits for its answer replaces it
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
        """Inside this context the worker, which is in no slot, can be killed by `kill_engines`."""
        with self._lock:
            self._incoming[rank] = worker
        try:
            yield
        finally:
            with self._lock:
                if self._incoming.get(rank) is worker:
                    del self._incoming[rank]

    def install(self, rank: int, worker: Worker, weights: tuple[WeightSource, int] | None) -> bool:
        """Puts a worker with these weights into its slot and sends it requests; False if newer weights are out."""
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

    def _dispatch(self) -> list[_Dispatch]:
        """Sends unassigned requests to live engines."""
        dispatched = []
        for rank, requests in self._router.assign().items():
            slot = self._slots[rank]
            assert slot.worker is not None  # it has a load, so it lives
            dispatched.append((slot, slot.worker, slot.worker.submit(EngineAPI.submit, requests)))
            self._request_completions(slot)
        return dispatched

    def _request_completions(self, slot: EngineSlot) -> None:
        if slot.collecting is None and self._router.open_requests(slot.rank):
            slot.request_completions(self._hold_s, self._answered)

    def _answered(self, slot: EngineSlot, answer: PendingResult[CompletionBatch]) -> None:
        """From any thread, without the lock."""
        self._answers.append((slot, answer))
        self._changed.set()

    def _take_completions(self, slot: EngineSlot, batch: CompletionBatch) -> None:
        """Keeps an engine's completions; requests that another engine has as well are aborted there."""
        slot.acknowledged = batch.sequence
        fresh, duplicates = self._router.complete(slot.rank, batch.completions)
        self._completions += fresh
        for rank, ids in duplicates.items():
            other = self._slots[rank]
            if other.worker is not None:
                other.aborting = other.worker.submit(EngineAPI.abort, ids)

    def _vacate(self, slot: EngineSlot) -> int:
        """Empties a slot; the number of its requests that go to other engines."""
        collecting, slot.worker = slot.collecting, None
        slot.collecting = None
        if collecting is not None and collecting.done():
            with contextlib.suppress(RemoteError, WorkerDied):  # then it had sent nothing
                self._take_completions(slot, collecting.result(why="completions"))
        self._stragglers.forget(slot.rank)
        slot.reset()
        return self._router.remove_engine(slot.rank)

    def _exclude(self, slot: EngineSlot, worker: Worker, until: str) -> None:
        """Gives an engine no requests until it has the current weights."""
        if slot.worker is not worker:
            return
        log.warning("%s is excluded %s", worker.spec.name, until)
        self.changes += 1
        self._vacate(slot)
        self._incoming[slot.rank] = worker
        self._failover.readmit(slot.rank, worker)

    def _update_counters(self, slot: EngineSlot, now: float) -> None:
        """Reads an engine's counters if they have arrived, and requests new ones."""
        busy = bool(self._router.open_requests(slot.rank))
        (self._stragglers.mark_busy if busy else self._stragglers.mark_idle)(slot.rank, now)
        if slot.counters is not None and slot.counters.done():
            with contextlib.suppress(RemoteError, WorkerDied):  # calls that matter report it
                self._stragglers.observe(slot.rank, now, slot.counters.result(why="counters"))
                if not busy and not slot.silent and self._stragglers.penalty_over(slot.rank, now):
                    self._router.release(slot.rank)
            slot.counters = None
        held_back = slot.rank in self._router.load.held_back
        if slot.counters is None and slot.worker is not None and (busy or held_back):
            slot.counters = slot.worker.submit(EngineAPI.progress)

    # --- without the lock

    def _read_answer(self, slot: EngineSlot, answer: PendingResult[CompletionBatch]) -> None:
        with self._lock:
            worker = slot.worker
            if slot.collecting is not answer or worker is None:
                return
        try:
            batch = answer.result(why="completions")
        except (RemoteError, WorkerDied) as error:
            self._handle_loss(slot, worker, error)
            return
        with self._lock:
            if slot.collecting is answer:
                slot.collecting = None
                self._take_completions(slot, batch)
                self._request_completions(slot)

    def _handle_loss(self, slot: EngineSlot, worker: Worker, error: CallError) -> None:
        """An engine is lost: keeps its completions, sends its requests to others, and has it replaced. From any
        thread. Does nothing for a worker that is no longer in the slot."""
        with self._lock:
            if slot.worker is not worker or self._closed:
                return
            self.changes += 1
            unfinished = self._vacate(slot)
            try:
                failure = self._failover.decide(slot.rank, worker, error)
            except Exception as final:  # noqa: BLE001 - raised by the next call of the run's thread
                self._error = final
            else:
                self._watch_dispatched(self._dispatch())
                self._failover.replace(slot.rank, worker, failure, unfinished)
        self._changed.set()

    def _watch_for_death(self, slot: EngineSlot, worker: Worker) -> None:
        if self._failover.enabled:
            worker.on_death(lambda error: self._handle_loss(slot, worker, error))

    def _watch_dispatched(self, dispatched: Sequence[_Dispatch]) -> None:
        """Reports requests that an engine refuses, if no thread blocks on the call. Deaths are reported elsewhere."""

        def answered(pending: PendingResult[None]) -> None:
            try:
                pending.result(why="hand over requests")
            except RemoteError as error:
                self._error = error
                self._changed.set()
            except WorkerDied:
                return

        for _, _, pending in dispatched:
            pending.on_done(lambda pending=pending: answered(pending))  # type: ignore[misc]

    def _call_all(
        self, call: Callable[[Worker], PendingResult[T]], why: str, names: Collection[str] | None = None
    ) -> list[T]:
        """The answers of all live engines (of those names)."""
        self._raise_error()
        with self._lock:
            live = [(slot, slot.worker) for slot in self._slots if slot.worker is not None]
            calls = [
                (slot, worker, call(worker)) for slot, worker in live if names is None or worker.spec.name in names
            ]
        results = []
        for slot, worker, outcome in self._outcomes(calls, why):
            if isinstance(outcome, RemoteError | WorkerDied | Stalled):
                self._handle_loss(slot, worker, outcome)
            else:
                results.append(outcome)
        self._raise_error()
        return results

    def _outcomes(
        self, calls: Sequence[tuple[EngineSlot, Worker, PendingResult[T]]], why: str
    ) -> list[tuple[EngineSlot, Worker, T | CallError]]:
        """The outcome of every call; engines that are silent for too long are excluded until they answer."""
        pendings = [pending for _, _, pending in calls]
        outcomes, silent = gather_patiently(pendings, why, self._stragglers.config, lambda: len(self.workers))
        if silent:
            with self._lock:
                for (slot, worker, _), outcome in zip(calls, outcomes, strict=True):
                    if isinstance(outcome, Stalled):
                        self._exclude(slot, worker, "until it answers")
                self._watch_dispatched(self._dispatch())
        # an excluded engine has no worker in its slot: losing it changes nothing
        return [(slot, worker, outcome) for (slot, worker, _), outcome in zip(calls, outcomes, strict=True)]

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
