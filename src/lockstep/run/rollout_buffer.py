"""A bounded buffer of rollouts for coming steps, and the prompts each step gets. Each step is generated with weights
at most `max_staleness` versions old.

Engines decode in processes of their own, so generation overlaps training without a thread: the requests of the next
`max_staleness` steps are handed to the engines before a step is trained, and collected when their turn comes.
Published weights are taken between two decode steps, and every token says which version made it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.data.sample_sources import PromptSource
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.ledger.ledger import Ledger
from lockstep.rollout.client.rollout_client import RolloutClient
from lockstep.watch.beacon import writer


class PromptSampler:
    """Hands out every position of the data once.

    Without replacement of groups, a step's prompts follow from its number. With it, nobody knows beforehand how many a
    step will need, so the ledger notes each draw before it is used: a resumed run gives every step the prompts it had.

    Args:
        per_step: prompts of a step's first round.
        replaced: whether steps may need more rounds.
    """

    def __init__(self, source: PromptSource, ledger: Ledger, per_step: int, replaced: bool) -> None:
        self.source, self.ledger = source, ledger
        self.per_step, self.replaced = per_step, replaced

    def draw(self, step: int, round: int = 0, count: int | None = None) -> list[Prompt]:
        """The prompts of a round of a step: `count_newlines` of them, or as many as it was given before a restart."""
        wanted = self.per_step if count is None else count
        if not self.replaced:
            return self.source.take(step * self.per_step, wanted)
        return self.source.take(*self.ledger.draw(step, round, wanted))


PERSIST_INTERVAL_S = 1.0
"""Finished completions of steps under way are made durable this often, and when all of a step are there."""
ROLLOUT_QUEUE = "rollouts"


class TooStale(RuntimeError):
    """A token is older than the config allows. That is a fault of lockstep, and never trained on."""

    def __init__(self, step: int, version: int, limit: int) -> None:
        super().__init__(f"step {step} has a token of version {version}, more than {limit} steps old")
        self.step, self.version, self.limit = step, version, limit


def steps_to_request(step: int, steps: int, max_staleness: int) -> range:
    """The steps whose requests are with the engines while `step` is generated and trained.

    Engines serve version `step` by then. A later step m of them is trained at version m, so its oldest token is
    m - step <= max_staleness versions old: the bound holds by when requests are handed over, however long they take.
    """
    return range(step, min(step + max_staleness, steps - 1) + 1)


@dataclass(slots=True)
class _RolloutRound:
    """Completions of one step that were asked for together."""

    step: int
    version: int
    prompts: Sequence[Prompt]
    ids: list[list[str]]
    wanted: int
    """Completions of all prompts."""
    asked: int
    """Those that the ledger did not have."""
    saved: float
    """When its completions were made durable last, or it was asked for."""
    done: dict[str, Completion] = field(default_factory=dict)
    fresh: list[Completion] = field(default_factory=list)
    """Not durable yet."""
    ready: int = 0
    """Completions that were there when the step's turn came."""

    @property
    def missing(self) -> int:
        return self.wanted - len(self.done)


class RolloutBuffer:
    """Asks engines for the completions of coming steps, and hands them out step by step.

    Args:
        group_size: completions of each prompt.
        steps: of the run; none after them are asked for.
        max_staleness: how many steps ahead; 0 is synchronous.
    """

    def __init__(
        self,
        engines: RolloutClient,
        ledger: Ledger,
        draws: PromptSampler,
        group_size: int,
        steps: int,
        max_staleness: int,
    ) -> None:
        self.engines, self.ledger, self.draws = engines, ledger, draws
        self.group_size, self.steps, self.max_staleness = group_size, steps, max_staleness
        self._rounds: dict[int, _RolloutRound] = {}
        """By step: what is with the engines, or arrived and was not taken."""
        self._round_of: dict[str, _RolloutRound] = {}
        self._asked: dict[int, int] = {}
        """By step: rounds that were asked for."""
        self._told: dict[int, dict[str, float]] = {}
        self._given: dict[int, list[Rollouts]] = {}
        """By step: rounds that were taken; steps that are over are forgotten."""
        self._again: dict[int, list[Rollouts]] = {}
        """By step: rounds that an attempt had taken when it was cut short, to be taken first."""

    def request(self, step: int) -> None:
        """Hands over what is to be with the engines while `step` is generated and trained, as far as it is not."""
        self._given = {each: rounds for each, rounds in self._given.items() if each >= step}
        for ahead in steps_to_request(step, self.steps, self.max_staleness):
            if ahead not in self._asked and not self.ledger.is_collected(ahead):
                self._ask(ahead, self.draws.draw(ahead))

    def take(self, step: int, count: int) -> Rollouts:
        """The next round of a step, as soon as its completions are there: the first as it was requested, later ones of
        `count_newlines` fresh prompts."""
        if self._again.get(step):
            return self._again[step].pop(0)
        if step not in self._rounds:
            self._ask(step, self.draws.draw(step, self._asked.get(step, 0), count))
        current = self._rounds[step]
        self._arrive()
        current.ready += len(current.done)
        self.engines.until(lambda: self._look(current), why=f"rollouts of step {step}", step=step)
        self._keep_due()  # scoring may take as long again; a quick step is not worth the write
        self._forget(current)
        groups = [
            Group(prompt, [current.done[id] for id in ids])
            for prompt, ids in zip(current.prompts, current.ids, strict=True)
        ]
        self._check(step, groups)
        taken = Rollouts(step, current.version, groups)
        self._given.setdefault(step, []).append(taken)
        return taken

    def rewind(self) -> None:
        """Steps begin again: rounds that were taken of one that is not over are handed out again."""
        self._again = {step: list(rounds) for step, rounds in self._given.items()}

    def metrics(self, step: int) -> dict[str, float]:
        """Of what was taken for a step; `rollout/ready` is the share of completions that nobody had to wait for."""
        told = self._told.pop(step, {"asked": 0.0, "ready": 0.0, "all": 0.0})
        found = {"rollout/generated": told["asked"]}
        if self.max_staleness and told["all"]:
            found["rollout/ready"] = told["ready"] / told["all"]
        return found | self.engines.metrics()

    def _ask(self, step: int, prompts: Sequence[Prompt]) -> None:
        ids = [[f"{step}/{prompt.uid}/{k}" for k in range(self.group_size)] for prompt in prompts]
        wanted = {id for group in ids for id in group}
        done = {each.request: each for each in self.ledger.kept(step) if each.request in wanted}
        requests = [
            self.engines.request(id, step, prompt, k)
            for prompt, group in zip(prompts, ids, strict=True)
            for k, id in enumerate(group)
            if id not in done
        ]
        now = time.monotonic()
        version = self.engines.version
        current = _RolloutRound(step, version, prompts, ids, len(wanted), len(requests), now, done)
        self._rounds[step] = current
        self._round_of.update((request.id, current) for request in requests)
        self._asked[step] = self._asked.get(step, 0) + 1
        self.engines.submit(requests, queue=ROLLOUT_QUEUE)

    def _look(self, current: _RolloutRound) -> bool | None:
        self._arrive()
        self._keep_due()
        writer.current_beacon().progress("completions", len(current.done), current.wanted)
        return None if current.missing else True

    def _arrive(self) -> None:
        for completion in self.engines.collect(queue=ROLLOUT_QUEUE):
            owner = self._round_of.pop(completion.request)
            owner.done[completion.request] = completion
            owner.fresh.append(completion)

    def _keep_due(self) -> None:
        for each in self._rounds.values():
            if each.fresh and time.monotonic() - each.saved > PERSIST_INTERVAL_S:
                self.ledger.keep(each.step, each.fresh)
                each.fresh, each.saved = [], time.monotonic()

    def _forget(self, current: _RolloutRound) -> None:
        step, told = current.step, self._told.setdefault(current.step, {"asked": 0.0, "ready": 0.0, "all": 0.0})
        told["asked"] += current.asked
        told["ready"] += current.ready
        told["all"] += current.wanted
        self._asked = {each: number for each, number in self._asked.items() if each >= step}
        del self._rounds[step]

    def _check(self, step: int, groups: Sequence[Group]) -> None:
        versions = [each.own(each.versions) for group in groups for each in group.completions]
        oldest = int(np.concatenate(versions).min(initial=step)) if versions else step
        if oldest < step - self.max_staleness:
            raise TooStale(step, oldest, self.max_staleness)
