"""The rollout engines as the controller sees them: requests go out, completions come back."""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from lockstep.base import waits
from lockstep.base.bounded_wait import Stalled
from lockstep.cluster.protocol import Worker
from lockstep.config.rollout import ReissueConfig, SamplingConfig
from lockstep.data.samples import Completion, Prompt
from lockstep.rollout.client.engine_failover import EngineLauncher
from lockstep.rollout.client.engine_pool import EnginePool
from lockstep.rollout.client.request_router import EngineLoad
from lockstep.rollout.engine_protocol import EngineProgress, Request
from lockstep.rollout.requests import request_seed
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.watch.beacon import writer
from lockstep.weights.weight_transport import WeightSource

T = TypeVar("T")

PROGRESS_INTERVAL_S = 0.25
"""How often somebody who waits for completions looks at the progress; news of completions come by themselves."""


POLL_PAUSE_PER_ENGINE_S = 5e-5
"""Times the number of engines: the least time between two looks. Whoever waits for a thousand engines hears of many
completions at a time."""


class RolloutClient:
    """All rollout engines. Whole groups go to the engine that owes least, so that a prompt is prefilled once."""

    def __init__(
        self,
        workers: Sequence[Worker],
        sampling: SamplingConfig,
        seed: int,
        stall_s: float = 900.0,
        hires: EngineLauncher | None = None,
        recovery: RecoveryManager | None = None,
        reissue: ReissueConfig | None = None,
    ) -> None:
        self._news = threading.Event()
        """An engine has told something."""
        self._fleet = EnginePool(workers, self._news, self._place, hires, recovery, reissue)
        self._queue_of: dict[str, str] = {}
        """Of every request under way, the queue that its completion goes to."""
        self._arrived: dict[str, list[Completion]] = {}
        """By queue: what finished and was not collected yet."""
        self.sampling, self.seed = sampling, seed
        self.stall_s, self.look_s = stall_s, PROGRESS_INTERVAL_S
        self.version = 0
        self._sampled = 0
        """Calls of `sample_tokens`."""
        self._seen, self._seen_at = 0, 0.0
        """The engines' moves, and when they were counted."""
        self._reissued = 0
        """Requests that were issued again until metrics were asked for."""

    @property
    def workers(self) -> list[Worker]:
        """Those that live."""
        return self._fleet.workers

    def sample(self, prompts: Sequence[Prompt], sampling: SamplingConfig, purpose: str) -> list[Completion]:
        """One completion per prompt, outside of training; the same seeds at every call of the same purpose. Ids are
        new at each: what an engine was told to leave of an earlier call may be told in this one."""
        self._sampled += 1
        requests = [
            self.request(f"{purpose}.{self._sampled}/{prompt.uid}", -1, prompt, 0, sampling, suffix=purpose)
            for prompt in prompts
        ]
        done = self.complete(requests, why=purpose)
        return [done[request.id] for request in requests]

    def complete(self, requests: Sequence[Request], why: str) -> dict[str, Completion]:
        """Sends requests to the engines and collects completions until all are there, as long as tokens move."""
        self.submit(requests, queue=why)
        done: dict[str, Completion] = {}
        counter = writer.current_beacon()

        def look() -> dict[str, Completion] | None:
            done.update((completion.request, completion) for completion in self.collect(queue=why))
            counter.progress("completions", len(done), len(requests))
            return done if len(done) == len(requests) else None

        return self.until(look, why)

    def submit(self, requests: Sequence[Request], queue: str = "") -> None:
        """Hands requests to the engines, whole groups to the one that owes least, and returns; they decode on by
        themselves. Their completions come with `collect` of the same queue.

        Raises:
            RemoteError: BadRequest, for a request that cannot be served or an id that is under way already.
        """
        self._queue_of.update((request.id, queue) for request in requests)
        self._fleet.submit(requests)

    def _place(self, group: Sequence[Request], owed: EngineLoad) -> int:
        """Which engine gets a group, by what those that live owe."""
        return owed.least()

    def metrics(self) -> dict[str, float]:
        """Of the engines' work since the last call: with several, `rollout/reissued` completions were asked of a second
        engine, because the first was far behind."""
        if len(self.workers) < 2:
            return {}
        before, self._reissued = self._reissued, self._fleet.reissued
        return {"rollout/reissued": float(self._reissued - before)}

    def collect(self, queue: str = "") -> list[Completion]:
        """What finished of a queue since the last call; returns at once. What finished of others waits for theirs.

        Raises:
            RemoteError, WorkerDied, GaveUp: what stopped an engine and could not be healed.
        """
        for completion in self._fleet.collect():
            self._arrived.setdefault(self._queue_of.pop(completion.request), []).append(completion)
        return self._arrived.pop(queue, [])

    def until(self, look: Callable[[], T | None], why: str, step: int = -1) -> T:
        """The first answer of `look` that is not None, asked again and again as long as tokens or completions move.
        What it waits for are completions of `step` and of those before: engines far behind do not hold it up.

        Raises:
            Stalled: none did for `stall_s`, and replacing the engines that owe something is out of the question.
        """
        rest_s = POLL_PAUSE_PER_ENGINE_S * len(self.workers)

        def rested() -> T | None:
            if rest_s > 1e-3:
                waits.sleep(rest_s, "news of more engines")
            found = look()
            if found is None:
                self._fleet.hurry(step)
            return found

        self._fleet.begin_wait()
        while True:
            try:
                return waits.poll(
                    rested,
                    kind="queue",
                    whom="rollout engines",
                    why=why,
                    stall_s=self.stall_s,
                    progress=self._moves,
                    every_s=self.look_s,
                    wake=self._news,
                )
            except Stalled as error:
                if not self._fleet.stalled(error):
                    raise

    def _moves(self) -> object:
        """Changes as long as completions come or tokens are made."""
        now = time.monotonic()
        if now - self._seen_at >= PROGRESS_INTERVAL_S:
            self._seen, self._seen_at = self._fleet.moves, now
        return len(self._queue_of), self._seen, self._fleet.changes

    def load_weights(self, source: WeightSource, version: int, having: Collection[Worker] = ()) -> None:
        """Every engine takes the weights of `version_numbers`, between two decode steps, but those `having` them;
        those whose node does not have them yet are left out until it does."""
        self._fleet.load_weights(source, version, having)
        self.version = version

    def moves_of(self, chosen: Callable[[Worker], bool]) -> dict[str, int]:
        """How far engines are, by name, as they say by themselves; those on the way into their places included."""
        return self._fleet.moves_of(chosen)

    def end(self, chosen: Callable[[Worker], bool], why: str) -> bool:
        """Ends engines that are in everybody's way, those without a place included; others come in their places.
        Whether there was one."""
        return self._fleet.end(chosen, why)

    def sleep(self) -> None:
        """Engines that have nothing to do leave shared devices to the trainer, until something is wanted of them."""
        self._fleet.sleep()

    def progress(self) -> list[EngineProgress]:
        return self._fleet.progress()

    def close(self) -> None:
        """Engines that end from now on were meant to."""
        self._fleet.close()

    def request(
        self, id: str, step: int, prompt: Prompt, k: int, sampling: SamplingConfig | None = None, suffix: str = ""
    ) -> Request:
        """What is asked of an engine for completion `k` of a prompt. Earlier steps come first, evaluation (step -1)
        before all of them."""
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
