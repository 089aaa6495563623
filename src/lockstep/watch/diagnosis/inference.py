"""The inference that live beacons, dumps and logs share.

Proposers make hypotheses, and each says which observations it covers: those that would follow from it. Factors are
questions about a hypothesis, answered yes, no or not at all; its log-odds are a prior plus the weights of the answers.
The explanation is the cheapest set of hypotheses that covers the observations. A hypothesis costs its surprise,
-ln(probability); an observation that no chosen hypothesis covers costs what its source says.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.watch.diagnosis.wait_graph import BoolArray

MAX_EXACT = 12
"""The most hypotheses of which every subset is tried; among more, the best value for its cost is taken first."""


@dataclass(frozen=True, slots=True)
class FactorWeight:
    """What the answers to a factor add to the log-odds of a hypothesis; no answer adds nothing."""

    yes: float
    no: float = 0.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Turns log-odds into the confidence of a source: logistic(slope * log-odds + offset), at most the ceiling.

    The ceiling is what the source cannot know: whether the cause lies outside of what it sees.
    """

    slope: float = 1.0
    offset: float = 0.0
    ceiling: float = 0.97

    def confidence(self, log_odds: float) -> float:
        return min(self.ceiling, logistic(self.slope * log_odds + self.offset))


def logistic(log_odds: float) -> float:
    """Returns the probability that has these log-odds."""
    if log_odds >= 0:
        return 1 / (1 + math.exp(-log_odds))
    odds = math.exp(log_odds)
    return odds / (1 + odds)


def surprise(log_odds: float) -> float:
    """Returns the cost of a hypothesis, -ln(probability)."""
    return max(-log_odds, 0.0) + math.log1p(math.exp(-abs(log_odds)))


def add_up(prior: float, answers: Mapping[str, bool | None], weights: Mapping[str, FactorWeight]) -> float:
    """Returns the log-odds of a hypothesis.

    Args:
        answers: By factor; None: not observed.

    Raises:
        KeyError: An answered factor has no weight.
    """
    total = prior
    for name, answer in answers.items():
        if answer is not None:
            total += weights[name].yes if answer else weights[name].no
    return total


def cheapest_cover(covers: BoolArray, costs: Sequence[float], left_over: Sequence[float]) -> list[int]:
    """Returns the hypotheses whose costs and those of the observations left over add up to the least, ascending.

    Independent incidents, which share no observation, are solved one by one: exactly up to `MAX_EXACT` hypotheses, and
    beyond that greedily. Of equally cheap sets the one with fewer hypotheses, then with earlier ones, is taken.

    Args:
        covers: `[hypotheses, observations]`, true where the hypothesis covers the observation.
        costs: `[hypotheses]`, at least 0.
        left_over: `[observations]`, at least 0; infinite: must be covered if any hypothesis covers it.
    """
    covers, cost, missing = np.asarray(covers, dtype=bool), np.asarray(costs, float), np.asarray(left_over, float)
    if not covers.size:
        return []
    chosen: list[int] = []
    for rows in _incidents(covers):
        columns = covers[rows].any(axis=0)
        part = covers[rows][:, columns]
        solve = _exact if len(rows) <= MAX_EXACT else _greedy
        chosen += [rows[at] for at in solve(part, cost[rows], missing[columns])]
    return sorted(chosen)


def _incidents(covers: BoolArray) -> list[list[int]]:
    """Returns the groups of hypotheses that are connected by shared observations; those that cover nothing are left
    out."""
    rest = [row for row in range(len(covers)) if covers[row].any()]
    groups = []
    while rest:
        group = [rest.pop(0)]
        columns = covers[group[0]].copy()
        while near := [row for row in rest if (covers[row] & columns).any()]:
            group += near
            rest = [row for row in rest if row not in near]
            columns |= covers[near].any(axis=0)
        groups.append(sorted(group))
    return groups


def _exact(covers: BoolArray, costs: np.ndarray, left_over: np.ndarray) -> list[int]:
    """Tries every subset."""
    count = len(covers)
    subsets = (np.arange(2**count)[:, None] >> np.arange(count)) & 1
    covered = subsets @ covers.astype(np.int64) > 0
    total = subsets @ costs + np.where(covered, 0.0, left_over).sum(axis=1)
    best = np.flatnonzero(total <= total.min() + 1e-9)
    first = min(best.tolist(), key=lambda each: (subsets[each].sum(), np.flatnonzero(subsets[each]).tolist()))
    return [row for row in range(count) if subsets[first, row]]


def _greedy(covers: BoolArray, costs: np.ndarray, left_over: np.ndarray) -> list[int]:
    """Takes the hypothesis that saves most for its cost until none saves anything; then drops what became needless."""
    chosen: list[int] = []
    open_ = np.ones(covers.shape[1], dtype=bool)
    while True:
        gain = np.where(covers & open_, left_over, 0.0).sum(axis=1)
        worth = np.where(gain > costs, gain / np.maximum(costs, 1e-9), 0.0)
        worth[chosen] = 0.0
        best = int(worth.argmax())
        if not worth[best] > 0.0:
            break
        chosen.append(best)
        open_ &= ~covers[best]
    for each in sorted(chosen, key=lambda row: -costs[row]):
        others = [row for row in chosen if row != each]
        alone = covers[each] & ~covers[others].any(axis=0) if others else covers[each]
        if left_over[alone].sum() <= costs[each]:
            chosen = others
    return sorted(chosen)
