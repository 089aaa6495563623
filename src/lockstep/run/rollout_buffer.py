"""A bounded buffer of rollouts for coming steps, and the prompts of each step. A step is generated with weights that
are at most `max_staleness` versions old.

Engines decode in processes of their own, so generation overlaps training without a thread: the requests of the next
`max_staleness` steps are handed to the engines before a step is trained, and collected when their turn comes.
Engines load published weights between two decode steps, and every token records the version that generated it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from lockstep.base.text import count_noun
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.ledger.ledger import Ledger
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.rollout.engine_protocol import RequestGroup
from lockstep.watch.beacon.writer import current_beacon


class PromptSampler:
    """Draws prompts from the data, each position once.

    Normally a step's prompts follow from its number. If groups are filtered, the number of prompts that a step needs is
    not known beforehand, so the ledger records each draw before it is used: a resumed run repeats the draws.

    Args:
        take: returns prompts of a step from a position on, so many; fewer if rows are left out because their images
            have become unusable.
        per_step: prompts of a step's first round.
        filtered: whether groups are filtered, so that steps may need more rounds.
    """

    def __init__(
        self, take: Callable[[int, int, int], list[Prompt]], ledger: Ledger, per_step: int, filtered: bool
    ) -> None:
        self.take, self.ledger = take, ledger
        self.per_step, self.filtered = per_step, filtered

    def draw(self, step: int, round: int = 0, count: int | None = None) -> list[Prompt]:
        """Returns the prompts of a round of a step: `count` new ones, or those that the round had before a restart."""
        wanted = self.per_step if count is None else count
        if not self.filtered:
            return self.take(step, step * self.per_step, wanted)
        return self.take(step, *self.ledger.draw(step, round, wanted))


PERSIST_INTERVAL_S = 1.0
"""How often finished completions of unfinished steps are made durable; those of a complete step always are."""
_REQUEST = attrgetter("request")


class TooStale(RuntimeError):
    """A token is older than the config allows: a bug in Lockstep. Such a token is never trained on."""

    def __init__(self, step: int, version: int, limit: int) -> None:
        super().__init__(
            f"step {step + 1}, which trains version {step}, has a token of version {version}: "
            f"older than {count_noun(limit, 'step')}"
        )
        self.step, self.version, self.limit = step, version, limit


def steps_to_request(step: int, steps: int, max_staleness: int) -> range:
    """Returns the steps whose requests are at the engines while `step` is generated and trained.

    Engines serve version `step` by then. A later step m of them is trained at version m, so its oldest token is
    m - step <= max_staleness versions old: the time of the request gives the bound, however long generation takes.
    """
    return range(step, min(step + max_staleness, steps - 1) + 1)


@dataclass(slots=True)
class _RolloutRound:
    """Completions of one step that were requested together."""

    step: int
    version: int
    queue: str
    """Of its requests, see `RolloutClient.submit`."""
    prompts: Sequence[Prompt]
    ids: list[list[str]]
    total: int
    """Completions of all prompts."""
    requested: int
    """Completions that the ledger did not have."""
    saved_at: float
    """When its completions were last made durable; at first, when they were requested."""
    done: dict[str, Completion] = field(default_factory=dict)
    unsaved: list[Completion] = field(default_factory=list)
    """Completions that are not durable yet."""
    ready: int = 0
    """Completions that had arrived when `take` was called."""

    @property
    def missing(self) -> int:
        return self.total - len(self.done)


class RolloutBuffer:
    """Requests the completions of coming steps from the engines, and returns them step by step.

    Args:
        group_size: completions of each prompt.
        steps: the run's number of steps; nothing is requested for later ones.
        max_staleness: how many steps ahead completions are requested; 0 is synchronous.
    """

    def __init__(
        self,
        engines: RolloutClient,
        ledger: Ledger,
        sampler: PromptSampler,
        group_size: int,
        steps: int,
        max_staleness: int,
    ) -> None:
        self.engines, self.ledger, self.sampler = engines, ledger, sampler
        self.group_size, self.steps, self.max_staleness = group_size, steps, max_staleness
        self._rounds: dict[int, _RolloutRound] = {}
        """The round of each step that was requested and not taken yet."""
        self._requested: dict[int, int] = {}
        """The number of requested rounds of each step."""
        self._counts: dict[int, dict[str, float]] = {}
        """Counts of each step, for `metrics`."""
        self._taken: dict[int, list[Rollouts]] = {}
        """The rounds of each unfinished step that were taken."""
        self._replay: dict[int, list[Rollouts]] = {}
        """The rounds of each step that were taken before a rewind; they are taken again first."""

    def request(self, step: int) -> None:
        """Submits the requests that engines serve while `step` is generated and trained, unless submitted before."""
        self._taken = {each: rounds for each, rounds in self._taken.items() if each >= step}
        for ahead in steps_to_request(step, self.steps, self.max_staleness):
            if ahead not in self._requested and not self.ledger.is_collected(ahead):
                self._request_round(ahead, self.sampler.draw(ahead))

    def take(self, step: int, count: int) -> Rollouts:
        """Waits for the next round of a step: the first round as requested, later rounds of `count` new prompts."""
        if self._replay.get(step):
            return self._replay[step].pop(0)
        if step not in self._rounds:
            self._request_round(step, self.sampler.draw(step, self._requested.get(step, 0), count))
        current = self._rounds[step]
        self._collect()
        current.ready += len(current.done)
        self.engines.wait_until(lambda: self._poll(current), why=f"rollouts of step {step + 1}", step=step)
        self._finish(current)
        groups = [
            Group(prompt, [current.done[id] for id in ids])
            for prompt, ids in zip(current.prompts, current.ids, strict=True)
        ]
        self._check_staleness(step, groups)
        taken = Rollouts(step, current.version, groups)
        self._taken.setdefault(step, []).append(taken)
        return taken

    def rewind(self) -> None:
        """Prepares for repeating an unfinished step: `take` will return the rounds that the step has taken again."""
        self._replay = {step: list(rounds) for step, rounds in self._taken.items()}

    def metrics(self, step: int) -> dict[str, float]:
        """Metrics of the rounds of a step; `rollout/ready` is the share of completions that caused no wait."""
        counts = self._counts.pop(step, {"requested": 0.0, "ready": 0.0, "total": 0.0})
        metrics = {"rollout/generated": counts["requested"]}
        if self.max_staleness and counts["total"]:
            metrics["rollout/ready"] = counts["ready"] / counts["total"]
        return metrics | self.engines.metrics()

    def _request_round(self, step: int, prompts: Sequence[Prompt]) -> None:
        number, numbers = self.ledger.number(step), range(self.group_size)
        ids = [[f"{number}/{prompt.uid}/{k}" for k in numbers] for prompt in prompts]
        done: dict[str, Completion] = {}
        if kept := self.ledger.kept_completions(step):
            wanted = {id for group in ids for id in group}
            done = {each.request: each for each in kept if each.request in wanted}
        requests: list[RequestGroup] = []
        for prompt, group in zip(prompts, ids, strict=True):
            missing = {id: k for id, k in zip(group, numbers, strict=True) if id not in done}
            if missing:
                requests.append(self.engines.requests(step, prompt, missing))
        now = time.monotonic()
        version = self.engines.version
        queue = f"rollouts {step}.{self._requested.get(step, 0)}"
        total = sum(map(len, ids))
        current = _RolloutRound(step, version, queue, prompts, ids, total, total - len(done), now, done)
        self._rounds[step] = current
        self._requested[step] = self._requested.get(step, 0) + 1
        self.engines.submit(requests, queue=current.queue)

    def _poll(self, current: _RolloutRound) -> bool | None:
        self._collect()
        self._persist_due()
        current_beacon().progress("completions", len(current.done), current.total)
        return None if current.missing else True

    def _collect(self) -> None:
        for each in self._rounds.values():
            completions = self.engines.collect(queue=each.queue)
            each.done.update(zip(map(_REQUEST, completions), completions, strict=True))
            each.unsaved += completions

    def _persist_due(self) -> None:
        for each in self._rounds.values():
            if each.unsaved and time.monotonic() - each.saved_at > PERSIST_INTERVAL_S:
                self.ledger.keep(each.step, each.unsaved)
                each.unsaved, each.saved_at = [], time.monotonic()

    def _finish(self, current: _RolloutRound) -> None:
        step = current.step
        counts = self._counts.setdefault(step, {"requested": 0.0, "ready": 0.0, "total": 0.0})
        counts["requested"] += current.requested
        counts["ready"] += current.ready
        counts["total"] += current.total
        self._requested = {each: number for each, number in self._requested.items() if each >= step}
        del self._rounds[step]

    def _check_staleness(self, step: int, groups: Sequence[Group]) -> None:
        versions = [
            each.versions if each.mask is None else each.own(each.versions)
            for group in groups
            for each in group.completions
        ]
        oldest = int(np.concatenate(versions).min(initial=step)) if versions else step
        if oldest < step - self.max_staleness:
            raise TooStale(step, oldest, self.max_staleness)
