"""The controller's client of the rollout engines: sends requests and collects completions."""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from lockstep.base import waits
from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import Worker, WorkerLauncher
from lockstep.config.rollout import ReissueConfig, SamplingConfig
from lockstep.data.samples import Completion, Prompt
from lockstep.rollout.client.engine_failover import EngineRecovery, WeightSource
from lockstep.rollout.client.engine_pool import EnginePool
from lockstep.rollout.client.request_router import EngineLoad
from lockstep.rollout.engine_protocol import EngineProgress, Request
from lockstep.rollout.requests import request_seed
from lockstep.watch.beacon.writer import current_beacon

T = TypeVar("T")

PROGRESS_INTERVAL_S = 0.25
"""How often a wait for completions looks at the engines' progress. Completions end the wait at once."""


POLL_PAUSE_PER_ENGINE_S = 5e-5
"""Times the number of engines: the least time between two polls, so that a poll finds many completions of a thousand
engines."""


class RolloutClient:
    """Sends requests to all rollout engines and collects their completions. A group goes to the engine with the fewest
    open requests as a whole, so that its prompt is prefilled once.

    Args:
        stall_s: a wait without progress for so long counts as a stall of the engines with open requests.
        launcher, recovery: restart lost engines; without them the first loss is an error.
        reissue: when requests of slow engines are reissued to others.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        sampling: SamplingConfig,
        seed: int,
        stall_s: float = 900.0,
        launcher: WorkerLauncher | None = None,
        recovery: EngineRecovery | None = None,
        reissue: ReissueConfig | None = None,
    ) -> None:
        self._changed = threading.Event()
        """Set when completions may have arrived."""
        self._pool = EnginePool(workers, self._changed, self._choose_engine, launcher, recovery, reissue)
        self._queue_of: dict[str, str] = {}
        """The queue of every open request, by request id."""
        self._arrived: dict[str, list[Completion]] = {}
        """Completions that were not collected yet, by queue."""
        self.sampling, self.seed = sampling, seed
        self.stall_s, self.poll_interval_s = stall_s, PROGRESS_INTERVAL_S
        self.version = 0
        self._sampled = 0
        """Number of calls of `sample`."""
        self._moves, self._moves_at = 0, 0.0
        """The engines' progress counter, and when it was read."""
        self._reissued = 0
        """Number of reissued requests at the last call of `metrics`."""

    @property
    def workers(self) -> list[Worker]:
        """The live engines."""
        return self._pool.workers

    def sample(self, prompts: Sequence[Prompt], sampling: SamplingConfig, purpose: str) -> list[Completion]:
        """One completion per prompt, outside of training, with the same seeds in every call of the same purpose. Ids
        are new in each call: an abort of a request of an earlier call cannot hit one of this call."""
        self._sampled += 1
        requests = [
            self.request(f"{purpose}.{self._sampled}/{prompt.uid}", -1, prompt, 0, sampling, suffix=purpose)
            for prompt in prompts
        ]
        done = self.complete(requests, why=purpose)
        return [done[request.id] for request in requests]

    def complete(self, requests: Sequence[Request], why: str) -> dict[str, Completion]:
        """Submits requests and waits for all their completions, as long as there is progress."""
        self.submit(requests, queue=why)
        done: dict[str, Completion] = {}
        counter = current_beacon()

        def poll() -> dict[str, Completion] | None:
            done.update((completion.request, completion) for completion in self.collect(queue=why))
            counter.progress("completions", len(done), len(requests))
            return done if len(done) == len(requests) else None

        return self.wait_until(poll, why)

    def submit(self, requests: Sequence[Request], queue: str = "") -> None:
        """Sends requests to the engines and returns; `collect` of the same queue gives their completions.

        Raises:
            RemoteError: BadRequest, for a request that cannot be served or an id that is open already.
        """
        self._queue_of.update((request.id, queue) for request in requests)
        self._pool.submit(requests)

    def _choose_engine(self, group: Sequence[Request], load: EngineLoad) -> int:
        """The engine for a group, given the load of the live engines."""
        return load.least_loaded()

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call. With several engines, `rollout/reissued` counts completions that were requested
        from a second engine because the first was far behind."""
        if len(self.workers) < 2:
            return {}
        before, self._reissued = self._reissued, self._pool.reissued
        return {"rollout/reissued": float(self._reissued - before)}

    def collect(self, queue: str = "") -> list[Completion]:
        """The completions of a queue since the last call; returns at once.

        Raises:
            RemoteError, WorkerDied, GaveUp: an engine failed, and recovery did not handle it.
        """
        for completion in self._pool.collect():
            self._arrived.setdefault(self._queue_of.pop(completion.request), []).append(completion)
        return self._arrived.pop(queue, [])

    def wait_until(self, poll: Callable[[], T | None], why: str, step: int = -1) -> T:
        """Polls until the result is not None, as long as tokens or completions come, and returns it. The wait is for
        completions of steps up to `step`: engines that are far behind with them do not hold it up.

        Raises:
            Stalled: there was no progress for `stall_s`, and replacing engines cannot help.
        """
        pause_s = POLL_PAUSE_PER_ENGINE_S * len(self.workers)

        def paused() -> T | None:
            if pause_s > 1e-3:
                waits.sleep(pause_s, "news of more engines")
            found = poll()
            if found is None:
                self._pool.reissue_stragglers(step)
            return found

        self._pool.begin_wait()
        while True:
            try:
                return waits.poll(
                    paused,
                    kind="queue",
                    waits_for="rollout engines",
                    why=why,
                    stall_s=self.stall_s,
                    progress=self._progress,
                    every_s=self.poll_interval_s,
                    wake=self._changed,
                )
            except Stalled as error:
                if not self._pool.replace_stalled(error):
                    raise

    def _progress(self) -> object:
        """Changes as long as completions come or tokens are made."""
        now = time.monotonic()
        if now - self._moves_at >= PROGRESS_INTERVAL_S:
            self._moves, self._moves_at = self._pool.moves, now
        return len(self._queue_of), self._moves, self._pool.changes

    def load_weights(self, source: WeightSource, version: int, having: Collection[Worker] = ()) -> None:
        """Makes every engine load a version between two decode steps, except those `having` it. An engine whose node
        does not have it yet is excluded until it has."""
        self._pool.load_weights(source, version, having)
        self.version = version

    def moves_by_engine(self, selected: Callable[[Worker], bool]) -> dict[str, int]:
        """Progress counters of engines by name, starting and excluded ones included."""
        return self._pool.moves_by_engine(selected)

    def kill_engines(self, selected: Callable[[Worker], bool], why: str) -> bool:
        """Kills and replaces engines, starting and excluded ones included. Whether there was one."""
        return self._pool.kill_engines(selected, why)

    def sleep(self) -> None:
        """Makes idle engines release shared devices to the trainer, until their next request."""
        self._pool.sleep()

    def counters(self) -> list[EngineProgress]:
        """The counters of the live engines that answer."""
        return self._pool.counters()

    def close(self) -> None:
        """Stops replacing engines that end from now on."""
        self._pool.close()

    def request(
        self, id: str, step: int, prompt: Prompt, k: int, sampling: SamplingConfig | None = None, suffix: str = ""
    ) -> Request:
        """The request for completion `k` of a prompt. Earlier steps have priority, evaluation (step -1) comes first."""
        chosen = self.sampling if sampling is None else sampling
        return Request(
            id=id,
            group=f"{step}/{prompt.uid}{suffix}",
            prompt=prompt.tokens,
            seed=request_seed(self.seed, step, prompt.uid + suffix, k),
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
            min_p=chosen.min_p,
            max_tokens=chosen.max_tokens,
            stop=chosen.stop,
            ignore_eos=chosen.ignore_eos,
            priority=step,
        )
