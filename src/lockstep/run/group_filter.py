"""Collects the groups of a step: all that were sampled, or only those with a learning signal (dynamic sampling)."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.config.algorithm import FilterGroups
from lockstep.data.samples import Group, Rollouts


class NoSignal(RuntimeError):
    """Too few groups had completions with different rewards, even after the allowed number of rounds."""

    def __init__(self, step: int, rounds: int, found: int, wanted: int, metric: str) -> None:
        super().__init__(
            f"step {step + 1}: after {rounds} rounds of prompts, {found} of {wanted} groups have different values of "
            f"{metric}. The data may be too easy or too hard for the model, or the reward always the same: look at "
            "reward/*. filter_groups.at_limit=fill continues with groups without a signal"
        )
        self.step, self.rounds, self.found, self.wanted = step, rounds, found, wanted


class GroupFilter:
    """Collects the scored groups of a step.

    Yu et al. 2025, "DAPO", section 3.2: a group whose completions all have the same reward has no gradient; with
    `filter_groups` new prompts replace it, for a bounded number of rounds.

    Args:
        wanted: the number of groups of the step.
        stored: the step's rollouts, if they are durable already.
        extra: what `GroupFilter.extra` returned when they were stored.
    """

    def __init__(
        self,
        step: int,
        wanted: int,
        config: FilterGroups,
        stored: Rollouts | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.step, self.wanted, self.config, self.stored = step, wanted, config, stored
        self.rounds = int((extra or {}).get("rounds", 0))
        self._groups: list[Group] = [] if stored is None else stored.groups
        self._discarded: list[Group] = []
        self._stored_discarded = [str(uid) for uid in (extra or {}).get("discarded", [])]
        self._version = -1 if stored is None else stored.version

    @property
    def missing(self) -> int:
        """The number of missing groups; 0 when the step is complete."""
        return 0 if self.stored is not None else max(0, self.wanted - len(self._groups))

    def add(self, rollouts: Rollouts) -> None:
        """Adds the groups of a round.

        Raises:
            NoSignal: groups are missing after the last round, and `at_limit` is `error`.
        """
        self._version = rollouts.version if self.rounds == 0 else self._version
        self.rounds += 1
        for group in rollouts.groups:
            usable = not self.config.enable or has_signal(group, self.config.metric)
            (self._groups if usable and self.missing else self._discarded).append(group)
        if not self.config.enable:  # there is one round, from which rows may have been left out
            self.wanted = len(self._groups)
        if self.missing and self.rounds >= self.config.max_num_gen_batches:
            if self.config.at_limit == "error":
                raise NoSignal(self.step, self.rounds, len(self._groups), self.wanted, self.config.metric)
            count = self.missing
            self._groups += self._discarded[:count]
            del self._discarded[:count]

    @property
    def rollouts(self) -> Rollouts:
        """Returns the step's groups. Raises ValueError while some are missing."""
        if self.stored is not None:
            return self.stored
        if self.missing:
            raise ValueError(f"{self.missing} of {self.wanted} groups of step {self.step + 1} are missing")
        return Rollouts(self.step, self._version, self._groups)

    @property
    def discarded(self) -> list[str]:
        """Uids of the prompts that were sampled and not trained on."""
        return self._stored_discarded or [group.prompt.uid for group in self._discarded]

    @property
    def extra(self) -> dict[str, Any]:
        """Values to store with the rollouts."""
        return {"rounds": self.rounds, "discarded": self.discarded} if self.config.enable else {}

    def metrics(self) -> dict[str, float]:
        if not self.config.enable:
            return {}
        return {"rollout/rounds": float(self.rounds), "rollout/groups_discarded": float(len(self.discarded))}


def has_signal(group: Group, metric: str) -> bool:
    """Whether the group's completions differ in `reward`, or in the reward term of that name. Ignores completions to
    which the term does not apply (NaN). Raises ValueError if there is no such term."""
    values = group.rewards if metric == "reward" else group.breakdown.get(metric)
    if values is None:
        raise ValueError(f"filter_groups.metric {metric!r} is not one of reward, {', '.join(group.breakdown)}")
    known = values[~np.isnan(values)]
    return bool(known.size) and bool(known.max() > known.min())
