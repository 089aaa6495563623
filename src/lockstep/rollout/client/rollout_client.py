"""The controller's client of the rollout engines: sends requests and collects completions."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import TypeVar

import numpy as np

from lockstep.base import waits
from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import Worker, WorkerLauncher
from lockstep.config.rollout import ReissueConfig, SamplingConfig
from lockstep.data.samples import Completion, Prompt
from lockstep.rollout.client.engine_failover import EngineRecovery, WeightSource
from lockstep.rollout.client.engine_pool import EnginePool
from lockstep.rollout.client.engine_sleep import EngineSleep
from lockstep.rollout.client.request_router import EngineLoad
from lockstep.rollout.engine_protocol import EngineProgress, RequestGroup, RequestSettings, request_seeds
from lockstep.watch.beacon.writer import current_beacon

T = TypeVar("T")
_REQUEST = attrgetter("request")

PROGRESS_INTERVAL_S = 0.25
"""How often a wait for completions reads the engines' progress. Arriving completions wake it at once."""
POLL_PAUSE_PER_ENGINE_S = 5e-5
"""Times the number of engines: the least time between two polls, so that with a thousand engines a poll finds many
completions."""


class RolloutClient:
    """Sends requests to all rollout engines and collects their completions. All requests of a group go to the engine
    with the fewest open requests, so that their prompt is prefilled once.

    Args:
        stall_s: a wait without progress for so long is a stall of the engines with open requests.
        launcher, recovery: restart lost engines; without them the first loss is an error.
        reissue: when requests of slow engines are sent to other engines as well.
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
        self._sleep = EngineSleep(self._pool, stall_s)
        self._queue_of: dict[str, str] = {}
        """The queue of every open request, by request id."""
        self._arrived: dict[str, list[Completion]] = {}
        """Completions that have arrived and were not collected yet, by queue."""
        self.sampling, self.seed = sampling, seed
        self.stall_s, self.poll_interval_s = stall_s, PROGRESS_INTERVAL_S
        self.version = 0
        self._sampled = 0
        """Number of calls of `sample`."""
        self._progress_count, self._progress_read_at = 0, 0.0
        """The engines' progress count, and when it was read."""
        self._reissued = 0
        """Number of reissued requests at the last call of `metrics`."""

    @property
    def workers(self) -> list[Worker]:
        """The live engines."""
        return self._pool.workers

    def sample(self, prompts: Sequence[Prompt], sampling: SamplingConfig, purpose: str, n: int = 1) -> list[Completion]:
        """Returns `n` completions of each prompt, outside of training, with the same seeds in every call of the same
        purpose. The completions of a prompt are next to each other.

        Ids are new in each call, so that a late abort of an earlier call's request cannot end one of this call.
        """
        self._sampled += 1
        groups: list[RequestGroup] = []
        for prompt in prompts:
            id = f"{purpose}.{self._sampled}/{prompt.uid}"
            numbers = {f"{id}/{k}": k for k in range(n)} if n > 1 else {id: 0}
            groups.append(self.requests(-1, prompt, numbers, sampling, suffix=purpose))
        done = self.complete(groups, why=purpose)
        return [done[id] for group in groups for id in group.ids]

    def complete(self, groups: Sequence[RequestGroup], why: str) -> dict[str, Completion]:
        """Submits requests and waits for all their completions, as long as there is progress."""
        self.submit(groups, queue=why)
        total = sum(len(group.ids) for group in groups)
        done: dict[str, Completion] = {}
        beacon = current_beacon()

        def poll() -> dict[str, Completion] | None:
            done.update((completion.request, completion) for completion in self.collect(queue=why))
            beacon.progress("completions", len(done), total)
            return done if len(done) == total else None

        return self.wait_until(poll, why)

    def submit(self, groups: Sequence[RequestGroup], queue: str = "") -> None:
        """Sends requests to the engines and returns. `collect` of the same queue returns their completions.

        Raises:
            RemoteError: BadRequest, for a request that cannot be served or whose id is already open.
        """
        self._queue_of |= dict.fromkeys(chain.from_iterable([group.ids for group in groups]), queue)
        self._pool.submit(groups)

    def _choose_engine(self, group: RequestGroup, load: EngineLoad) -> int:
        """The engine for a group, given the load of the live engines."""
        return load.least_loaded()

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call. With several engines, `rollout/reissued` is the number of requests that were
        sent to a second engine because the first was far behind."""
        if len(self.workers) < 2:
            return {}
        before, self._reissued = self._reissued, self._pool.reissued
        return {"rollout/reissued": float(self._reissued - before)}

    def collect(self, queue: str = "") -> list[Completion]:
        """Returns the completions of a queue since the last call, without waiting.

        Raises:
            RemoteError, WorkerDied, GaveUp: an engine failed, and recovery did not handle it.
        """
        self._all_arrived()
        return self._arrived.pop(queue, [])

    def _all_arrived(self) -> bool | None:
        """Takes the completions that have arrived, for their queues. Returns True if no request is open, else None."""
        completions = self._pool.collect()
        queues = list(map(self._queue_of.pop, map(_REQUEST, completions)))
        if completions and queues.count(queues[0]) == len(queues):  # as usual
            self._arrived.setdefault(queues[0], []).extend(completions)
        else:
            for queue, completion in zip(queues, completions, strict=True):
                self._arrived.setdefault(queue, []).append(completion)
        return None if self._queue_of else True

    def wait_until(self, poll: Callable[[], T | None], why: str, step: int = -1) -> T:
        """Calls `poll` until it returns something other than None, and returns that.

        Args:
            why: what is waited for, in messages.
            step: the wait is for completions of steps up to this one. Their requests are reissued if only engines that
                are far behind still have them.

        Raises:
            Stalled: there was no progress for `stall_s`, and engines could not be replaced.
        """
        pause_s = POLL_PAUSE_PER_ENGINE_S * len(self.workers)

        def poll_with_pause() -> T | None:
            if pause_s > 1e-3:
                waits.sleep(pause_s, "completions of more engines")
            result = poll()
            if result is None:
                self._pool.reissue_stragglers(step)
            return result

        self._pool.begin_wait()
        while True:
            try:
                return waits.poll(
                    poll_with_pause,
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
        """A value that changes as long as engines generate tokens or completions arrive."""
        now = time.monotonic()
        if now - self._progress_read_at >= PROGRESS_INTERVAL_S:
            self._progress_count, self._progress_read_at = self._pool.progress_count, now
        return len(self._queue_of), self._progress_count, self._pool.changes

    def load_weights(self, source: WeightSource, version: int, having: Collection[Worker] = ()) -> None:
        """Makes every engine load a version between two decode steps, except for the workers `having` it already. An
        engine whose node does not have the version yet is excluded until it has arrived."""
        self._pool.load_weights(source, version, having)
        self.version = version

    def progress_by_engine(self, selected: Callable[[Worker], bool]) -> dict[str, int]:
        """Progress counts of engines by name, including starting and excluded engines."""
        return self._pool.progress_by_engine(selected)

    def kill_engines(self, selected: Callable[[Worker], bool], why: str) -> bool:
        """Kills and replaces engines, including starting and excluded ones. Returns whether there was one."""
        return self._pool.kill_engines(selected, why)

    def sleep(self) -> None:
        """Makes the engines leave the devices that they share with other roles, once they have completed their open
        requests. Lost engines are replaced after `wake`. Does nothing if the engines sleep already.

        Raises:
            Stalled, RemoteError, WorkerDied, GaveUp: an engine failed, and recovery did not handle it.
        """
        if self._queue_of:
            self.wait_until(self._all_arrived, "open requests, after which the engines sleep")
        self._sleep.begin()

    def wake(self) -> None:
        """Lets the engines use the devices after `sleep`: they wake for their next request, and lost ones are
        replaced."""
        self._sleep.end()

    def counters(self) -> list[EngineProgress]:
        """The counters of the live engines that are not silent."""
        return self._pool.counters()

    def close(self) -> None:
        """Stops replacing lost engines."""
        self._pool.close()

    def requests(
        self,
        step: int,
        prompt: Prompt,
        numbers: Mapping[str, int],
        sampling: SamplingConfig | None = None,
        suffix: str = "",
    ) -> RequestGroup:
        """Makes requests for completions of a prompt. Evaluation (step -1) and earlier steps have priority.

        Args:
            numbers: by id of the request, the number of the completion in the group.
            suffix: added to the prompt's uid in the group's name and the seed, for completions outside of training.
        """
        chosen = self.sampling if sampling is None else sampling
        uid = prompt.uid + suffix
        settings = RequestSettings(
            temperature=chosen.temperature, top_p=chosen.top_p, top_k=chosen.top_k, min_p=chosen.min_p,
            max_tokens=chosen.max_tokens, stop=tuple(chosen.stop), ignore_eos=chosen.ignore_eos, priority=step,
        )  # fmt: skip
        tokens = np.asarray(prompt.tokens, np.int32).tobytes()
        seeds = request_seeds(self.seed, step, uid, numbers.values())
        return RequestGroup(f"{step}/{uid}", tokens, list(numbers), seeds, settings, tuple(prompt.images))
