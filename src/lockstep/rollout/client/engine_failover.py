"""Brings engines back: the same process with current weights, or a new one.

Every recovery runs in a thread of its own, so that it proceeds while the run waits for something else. What it
cannot recover from is raised by the next call from the run's thread.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from lockstep.base import waits
from lockstep.base.bounded_wait import Stalled, WaitTimeout
from lockstep.cluster.protocol import PendingResult, RemoteError, Worker, WorkerDied
from lockstep.cluster.rpc.futures import CallError
from lockstep.cluster.worker_failures import WorkerFailure, describe_failure
from lockstep.rollout.client.request_router import EngineSlot, RequestRouter
from lockstep.rollout.client.stragglers import StragglerDetector
from lockstep.rollout.engine_protocol import EngineAPI
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.weights.errors import StaleVersion
from lockstep.weights.weight_transport import WeightSource


class EngineLauncher(Protocol):
    """Who starts and ends engines."""

    def engine(self, rank: int) -> Worker: ...

    def dismiss(self, workers: Sequence[Worker]) -> None: ...


log = logging.getLogger(__name__)

NEXT_VERSION_LIMIT_S = 60.0
"""Between the commit of a version and the engines being told of it nothing is done but to bring it to their nodes."""


class EngineFailover:
    """Places without an engine, and engines that are left out.

    Args:
        lock: of the desk and its places.
        hires, recovery: without, the first loss is an error.
    """

    def __init__(
        self,
        desk: RequestRouter,
        laggards: StragglerDetector,
        lock: threading.RLock,
        news: threading.Event,
        hires: EngineLauncher | None,
        recovery: RecoveryManager | None,
    ) -> None:
        self._desk, self._laggards, self._lock, self._news = desk, laggards, lock, news
        self._hires, self._recovery = hires, recovery
        self.weights: tuple[WeightSource, int] | None = None
        """Where the version that all are to serve is found, and which."""
        self.error: Exception | None = None
        """What could not be healed."""
        self.closed = False
        """Nobody is replaced any more."""
        self.changes = 0
        """Engines lost and come back: moves while nothing else does."""
        self._out: dict[int, Worker] = {}
        """Engines that are in no place, by the place that they are for: left out, or on the way in."""

    def watch(self, place: EngineSlot, worker: Worker) -> None:
        """Hears of the end of an engine."""
        if self._hires is not None:
            worker.on_death(lambda error: self.lose(place, worker, error))

    def lose(self, place: EngineSlot, worker: Worker, error: CallError) -> None:
        """An engine is lost: keeps what it has told, gives the rest to others, and has it replaced. From any thread."""
        with self._lock:
            if place.worker is not worker or self.closed:
                return
            self.changes += 1
            unfinished = self._empty(place)
            try:
                failure = self._decide(place, worker, error)
            except Exception as final:  # noqa: BLE001 - raised by whoever of the run's thread comes next
                self.error = final
            else:
                self.listen(self._desk.share_out())
                self._go(f"replaces {worker.spec.name}", lambda: self._replace(place, worker, failure, unfinished))
        self._news.set()

    def bench(self, place: EngineSlot, worker: Worker, until: str) -> None:
        """An engine is left out until it has the current weights. Needs the lock."""
        if place.worker is not worker:
            return
        log.warning("%s is left out %s", worker.spec.name, until)
        self.changes += 1
        self._empty(place)
        self._out[place.rank] = worker
        renewed = worker.submit(EngineAPI.renew)
        self._go(f"catches up {worker.spec.name}", lambda: self._return(place, worker, renewed))

    def moves(self, places: Sequence[EngineSlot], chosen: Callable[[Worker], bool]) -> dict[str, int]:
        """How far engines are, by name, those that are in no place included. From any thread."""
        with self._lock:
            workers = [*(place.worker for place in places if place.worker is not None), *self._out.values()]
        return {worker.spec.name: worker.moves for worker in workers if chosen(worker)}

    def end(self, places: Sequence[EngineSlot], chosen: Callable[[Worker], bool], why: str) -> bool:
        """Ends engines, those that are in no place included; whether there was one. From the run's thread."""
        if self._hires is None:
            return False
        with self._lock:
            serving = [(place, place.worker) for place in places if place.worker is not None and chosen(place.worker)]
            out = [rank for rank, worker in self._out.items() if chosen(worker)]
            waiting = [self._out.pop(rank) for rank in out]
        for worker in (*(worker for _, worker in serving), *waiting):
            log.warning("%s is ended: %s", worker.spec.name, why)
        for place, worker in serving:
            self.lose(place, worker, WorkerDied(worker.spec.name, place.rank, None, "", why))
        self._hires.dismiss([worker for _, worker in serving])
        self._hires.dismiss(waiting)  # whoever waits for its answer has it replaced
        return bool(serving or waiting)

    def listen(self, asked: Sequence[tuple[EngineSlot, Worker, PendingResult[Any]]]) -> None:
        """Requests that were handed over with nobody waiting for the answer: it matters where it is an error. Of a
        death hears who watches the worker."""
        for _, _, pending in asked:
            pending.on_done(lambda pending=pending: self._accepted(pending))  # type: ignore[misc]

    def _accepted(self, pending: PendingResult[Any]) -> None:
        try:
            pending.result(why="hand over requests")
        except RemoteError as error:
            self.error = error
            self._news.set()
        except WorkerDied:
            return

    def _go(self, name: str, way: Callable[[], None]) -> None:
        """A way back, in a thread of its own."""

        def walk() -> None:
            try:
                way()
            except Exception as final:  # noqa: BLE001 - the outermost frame of its thread
                if not self._over():
                    self.error = final
            self._news.set()

        threading.Thread(target=walk, name=name, daemon=True).start()

    def _over(self) -> bool:
        return self.closed or self.error is not None

    def _empty(self, place: EngineSlot) -> int:
        """Takes everything from a place; how many requests it had not finished."""
        asked, place.asked, place.worker = place.asked, None, None
        if asked is not None and asked.done():
            with contextlib.suppress(RemoteError, WorkerDied):  # then it had told nothing
                self._desk.take(place, asked.result(why="completions"))
        self._laggards.forget(place.rank)
        return self._desk.empty(place)

    def _decide(self, place: EngineSlot, worker: Worker, error: CallError, starting: bool = False) -> WorkerFailure:
        """Raises what ends the run, where this does."""
        if self._recovery is None or self._hires is None:
            raise error
        failure = describe_failure(error, "rollout", worker.spec.name, place.rank, self._recovery.step, starting)
        self._recovery.decide(failure, error)
        return failure

    def _replace(self, place: EngineSlot, worker: Worker, failure: WorkerFailure, unfinished: int) -> None:
        """Another process in the place, as often as the budget allows."""
        assert self._hires is not None and self._recovery is not None
        began = time.monotonic()
        while not self._over():
            try:
                self._hires.dismiss([worker])
                worker = self._hires.engine(place.rank)
                with self._on_the_way(place, worker):
                    self._move_in(place, worker)
            except (RemoteError, WorkerDied, Stalled) as error:
                if not self._over():
                    self._decide(place, worker, error, starting=True)
            except WaitTimeout as error:
                if error.kind != "placement" or not self._desk.owed:
                    raise
                log.warning("%s; %d engines go on without engine-%d", error, len(self._desk.owed), place.rank)
            else:
                told = f", {unfinished} requests re-issued" if unfinished else ""
                self._recovery.restarted(failure, time.monotonic() - began, told, requests=unfinished)
                return

    def _return(self, place: EngineSlot, worker: Worker, renewed: PendingResult[None]) -> None:
        """An engine that was left out comes back, or another in its place."""
        began = time.monotonic()
        try:
            with self._on_the_way(place, worker):
                renewed.result(why="forget requests")
                self._move_in(place, worker)
        except (RemoteError, WorkerDied, Stalled) as error:
            if not self._over():
                self._replace(place, worker, self._decide(place, worker, error), 0)
        else:
            log.warning("%s is back after %.1f s", worker.spec.name, time.monotonic() - began)

    @contextlib.contextmanager
    def _on_the_way(self, place: EngineSlot, worker: Worker) -> Iterator[None]:
        """It can be ended while it comes: it may stand in everybody's way."""
        with self._lock:
            self._out[place.rank] = worker
        try:
            yield
        finally:
            with self._lock:
                if self._out.get(place.rank) is worker:
                    del self._out[place.rank]

    def _move_in(self, place: EngineSlot, worker: Worker) -> None:
        """Gives a new engine the current weights, and work."""
        while True:
            weights = self.weights
            if weights is not None and not self._load(worker, weights):
                continue
            with self._lock:
                if self.weights != weights:
                    continue
                place.worker = worker
                self._desk.owed.set(place.rank, 0)
                self.changes += 1
                asked = self._desk.share_out()
            self.watch(place, worker)
            self.listen(asked)
            return

    def _load(self, worker: Worker, weights: tuple[WeightSource, int]) -> bool:
        """Whether the version was still current."""
        source, version = weights
        source.fetch(worker, version)
        folder = source.where(worker, version)
        try:
            if folder is not None:
                worker.submit(EngineAPI.load_weights, folder, version).result(why=f"weights of version {version}")
                return True
        except RemoteError as error:
            if error.code != StaleVersion.error_code:
                raise
        waits.poll(
            lambda: True if self.weights != weights or self._over() else None, kind="queue", whom="controller",
            why="the version after the one that is replaced", stall_s=NEXT_VERSION_LIMIT_S, progress=source.moves,
        )  # fmt: skip
        return self._over()
