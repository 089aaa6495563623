"""Replaces lost engines by new processes, and readmits excluded ones when they have the current weights.

Each engine is recovered in its own thread, so that the run's thread can continue. An error that cannot be recovered
from is raised by the next call of the run's thread. Engines that share devices with other roles are recovered only
while these have left them: an engine takes memory as it starts, and vLLM does not start if its share is not free.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from lockstep.base import waits
from lockstep.base.text import count_noun
from lockstep.base.wait_state import Stalled, WaitTimeout
from lockstep.cluster.protocol import PendingResult, RemoteError, Worker, WorkerDied, WorkerLauncher
from lockstep.cluster.rpc.futures import CallError
from lockstep.cluster.worker_failures import WorkerFailure, describe_failure
from lockstep.rollout.engine_protocol import EngineAPI

log = logging.getLogger(__name__)

NEXT_VERSION_LIMIT_S = 60.0
"""How long to wait without progress for the version after a stale one: until engines are called to load it, it is only
transferred to their nodes."""
_STALE_VERSION = "stale_version"
"""Error code of a weight store that has replaced the version by a newer one."""


class WeightSource(Protocol):
    """Where engines find the weights. Any thread may call."""

    def store_folder(self, worker: Worker, version: int) -> str | None:
        """The folder of the weight store on the engine's node; None if the store does not have the version (yet)."""

    def fetch(self, worker: Worker, version: int) -> None:
        """Transfers the version to the engine's node. Raises Stalled, WorkerDied, RemoteError."""

    def progress(self) -> object:
        """A value that changes as long as any transfer makes progress."""


class EngineRecovery(Protocol):
    """Decides about restarts; implemented by the run's recovery manager. Any thread may call."""

    step: int

    def decide(self, failure: WorkerFailure, cause: Exception) -> object:
        """Raises an error if the failure ends the run."""

    def restarted(self, failure: WorkerFailure, seconds: float, text: str, **facts: Any) -> None:
        """Reports a completed restart."""


class EngineSlots(Protocol):
    """The engine pool as failover sees it. Any thread may call."""

    @property
    def weights(self) -> tuple[WeightSource, int] | None:
        """Where engines find the version that all serve, and the version."""

    @property
    def stopped(self) -> bool:
        """Whether engines are no longer replaced."""

    @property
    def live_engines(self) -> int: ...

    def incoming(self, rank: int, worker: Worker) -> AbstractContextManager[None]:
        """While in this context, `EnginePool.kill_engines` can kill the worker, although it is in no slot."""

    def install(self, rank: int, worker: Worker, weights: tuple[WeightSource, int] | None) -> bool:
        """Puts a worker with these weights into its slot and sends it requests. Returns False and does nothing if newer
        weights were published."""

    def fail(self, error: Exception) -> None:
        """Makes the next call of the run's thread raise the error."""


class EngineFailover:
    """Replaces lost engines and readmits excluded ones.

    Args:
        launcher, recovery: restart lost engines; without them the first loss is an error.
    """

    def __init__(self, slots: EngineSlots, launcher: WorkerLauncher | None, recovery: EngineRecovery | None) -> None:
        self._slots, self._launcher, self._recovery = slots, launcher, recovery
        self._lock = threading.Lock()
        self._under_way, self._paused = 0, False
        self._deferred: list[tuple[str, Callable[[], None]]] = []
        """Recoveries to begin after the pause, with the names of their threads."""

    @property
    def enabled(self) -> bool:
        return self._launcher is not None

    def decide(self, rank: int, worker: Worker, error: CallError, starting: bool = False) -> WorkerFailure:
        """Describes the failure behind an error. Raises an error if the failure ends the run."""
        if self._recovery is None or self._launcher is None:
            raise error
        failure = describe_failure(error, "rollout", worker.spec.name, rank, self._recovery.step, starting)
        self._recovery.decide(failure, error)
        return failure

    def replace(self, rank: int, worker: Worker, failure: WorkerFailure, unfinished: int) -> None:
        """Starts a new process in place of a lost worker. Returns at once."""
        began = time.monotonic()

        def recover() -> None:
            self.kill([worker])
            self._place(rank, worker, failure, unfinished, began)

        with self._lock:
            self._under_way += 1  # also in a pause: until it has ended, the worker is on the devices
        self._in_thread(f"replace {worker.spec.name}", recover, self._ended)

    def readmit(self, rank: int, worker: Worker) -> None:
        """Makes an excluded engine drop its requests, load the current weights and rejoin. Returns at once."""
        renewed = worker.submit(EngineAPI.renew)
        self._begin(f"readmit {worker.spec.name}", lambda: self._readmit(rank, worker, renewed))

    def kill(self, workers: Sequence[Worker]) -> None:
        if self._launcher is not None:
            self._launcher.kill(workers)

    @property
    def under_way(self) -> int:
        """The number of recoveries that use devices: they end or start a process, or load weights."""
        with self._lock:
            return self._under_way

    def pause(self) -> None:
        """Lets no recovery begin until `resume`. Those under way continue."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Begins the recoveries that came up since `pause`."""
        with self._lock:
            self._paused, deferred, self._deferred = False, self._deferred, []
        for name, recover in deferred:
            self._begin(name, recover)

    def _begin(self, name: str, recover: Callable[[], None]) -> None:
        """Begins a recovery in a thread of its own, after `resume` if they are paused."""
        with self._lock:
            if self._paused:
                self._deferred.append((name, recover))
                return
            self._under_way += 1

        self._in_thread(name, recover, self._ended)

    def _ended(self) -> None:
        with self._lock:
            self._under_way -= 1

    def _in_thread(self, name: str, work: Callable[[], None], ended: Callable[[], None] = lambda: None) -> None:
        def run() -> None:
            try:
                if not self._slots.stopped:
                    work()
            except Exception as error:  # noqa: BLE001 - the outermost frame of its thread
                self._slots.fail(error)
            ended()

        threading.Thread(target=run, name=name, daemon=True).start()

    def _place(self, rank: int, worker: Worker, failure: WorkerFailure, unfinished: int, began: float) -> None:
        """Waits in a thread of its own until there is a place for the successor of a worker that was killed, and then
        begins to start it. The wait may take hours, and uses no devices."""
        name = f"replace {worker.spec.name}"

        def place() -> None:
            assert self._launcher is not None
            while not self._slots.stopped:
                try:
                    self._launcher.place("rollout", [rank])
                except WaitTimeout as error:
                    if error.kind != "placement" or not self._slots.live_engines:
                        raise
                    log.warning(
                        "%s; continuing with %d engines without engine-%d", error, self._slots.live_engines, rank
                    )
                else:
                    self._begin(name, lambda: self._start_process(rank, worker, failure, unfinished, began))
                    return

        self._in_thread(name, place)

    def _start_process(self, rank: int, worker: Worker, failure: WorkerFailure, unfinished: int, began: float) -> None:
        """Starts a process in place of a worker that was killed. If it does not serve, another one follows, as often as
        the restart budget allows."""
        assert self._launcher is not None and self._recovery is not None
        try:
            (worker,) = self._launcher.launch("rollout", [rank])
            with self._slots.incoming(rank, worker):
                self._install(rank, worker)
        except (RemoteError, WorkerDied, Stalled) as error:
            if self._slots.stopped:
                return
            self.decide(rank, worker, error, starting=True)
            self._launcher.kill([worker])  # before this recovery ends: it must leave the devices
            self._place(rank, worker, failure, unfinished, began)
        except WaitTimeout as error:
            if error.kind != "placement":
                raise
            self._place(rank, worker, failure, unfinished, began)  # the place was lost again
        else:
            reissued = f", {count_noun(unfinished, 'request')} re-issued" if unfinished else ""
            self._recovery.restarted(failure, time.monotonic() - began, reissued, requests=unfinished)

    def _readmit(self, rank: int, worker: Worker, renewed: PendingResult[None]) -> None:
        began = time.monotonic()
        try:
            with self._slots.incoming(rank, worker):
                renewed.result(why="drop requests")
                self._install(rank, worker)
        except (RemoteError, WorkerDied, Stalled) as error:
            if not self._slots.stopped:
                failure = self.decide(rank, worker, error)
                self.kill([worker])
                self._place(rank, worker, failure, 0, began)
        else:
            log.warning("%s rejoined after %.1f s", worker.spec.name, time.monotonic() - began)

    def _install(self, rank: int, worker: Worker) -> None:
        """Loads the current weights and puts the worker into its slot. Repeats if newer weights are published
        meanwhile."""
        while True:
            weights = self._slots.weights
            if weights is not None and not self._load(worker, weights):
                continue
            if self._slots.install(rank, worker, weights):
                return

    def _load(self, worker: Worker, weights: tuple[WeightSource, int]) -> bool:
        """Makes a worker load these weights. Returns False if they are no longer current.

        If the store has replaced the version by a newer one, waits until that one is published.
        """
        source, version = weights
        source.fetch(worker, version)
        folder = source.store_folder(worker, version)
        try:
            if folder is not None:
                worker.submit(EngineAPI.load_weights, folder, version).result(why=f"weights of version {version}")
                return True
        except RemoteError as error:
            if error.code != _STALE_VERSION:
                raise
        waits.poll(
            lambda: True if self._slots.weights != weights or self._slots.stopped else None, kind="queue",
            waits_for="controller", why="the version after the one that is replaced", stall_s=NEXT_VERSION_LIMIT_S,
            progress=source.progress,
        )  # fmt: skip
        return self._slots.stopped
