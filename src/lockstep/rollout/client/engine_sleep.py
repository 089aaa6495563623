"""Engines that share devices with other roles: they leave the devices before another role computes."""

import logging

from lockstep.base import waits
from lockstep.base.wait_state import Stalled
from lockstep.rollout.client.engine_pool import EnginePool
from lockstep.rollout.engine_protocol import EngineAPI

log = logging.getLogger(__name__)


class EngineSleep:
    """Makes the engines of a pool leave their devices, and lets them come back. While they sleep, lost engines are not
    replaced: an engine takes memory as it starts, and vLLM does not start if its share of a GPU is not free.

    Args:
        stall_s: engines that are starting or excluded are killed after so long without progress.
    """

    def __init__(self, pool: EnginePool, stall_s: float) -> None:
        self._pool, self._stall_s = pool, stall_s
        self._asleep = False

    def begin(self) -> None:
        """Makes the engines, which must have no open requests, leave their devices. When this returns, no engine is on
        them: those that are starting or excluded leave them as soon as they serve, and those that fail to sleep are
        killed. Does nothing if the engines sleep already.

        Raises:
            RemoteError, WorkerDied, GaveUp: an engine failed, and recovery did not handle it.
        """
        if self._asleep:
            return
        pool = self._pool
        pool.failover.pause()
        self._finish_recoveries()
        before = pool.workers
        pool.call_all(EngineAPI.sleep, "sleep")
        pool.failover.kill([worker for worker in before if worker not in pool.workers])
        self._asleep = True

    def end(self) -> None:
        """Lets the engines use their devices: they wake for their next request, and lost ones are replaced."""
        self._asleep = False
        self._pool.failover.resume()

    def _finish_recoveries(self) -> None:
        """Waits until the engines that are starting or excluded serve. Kills those that make no progress."""
        pool, failover = self._pool, self._pool.failover

        def progress() -> object:
            return pool.changes, failover.under_way, pool.progress_by_engine(lambda _: True)

        while failover.under_way and not pool.stopped:
            try:
                waits.poll(
                    lambda: True if pool.stopped or not failover.under_way else None, kind="queue",
                    waits_for="rollout engines", why="engines that are starting leave the devices to other roles",
                    stall_s=self._stall_s, progress=progress,
                )  # fmt: skip
            except Stalled as error:
                if not pool.kill_engines(lambda worker: worker not in pool.workers, str(error)):
                    log.warning("%s; continuing without them", error)
                    return
