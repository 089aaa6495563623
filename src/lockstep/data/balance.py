"""Which pieces of trees share a row, and which rank computes the row.

Everything is a pure function of sizes, so that the controller knows each rank's micro-batches before any rank
does: the same number for all of them, about equal in cost.
"""

import heapq
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lockstep.data.forest import Forest
from lockstep.data.pieces import Pieces, Saw, paths

Packing = Literal["forest", "block", "single"]


class OverBudget(ValueError):
    """One sequence is longer than a row may be."""

    def __init__(self, sample: str, tokens: int, budget: int) -> None:
        self.sample, self.tokens, self.budget = sample, tokens, budget
        super().__init__(
            f"sample {sample!r} is a sequence of {tokens} tokens, but token_budget is {budget}: set token_budget to "
            f"at least {tokens}, or make sequences shorter (model.max_length, rollout.sampling.max_tokens)"
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every rank computes: rows of pieces, the same number for all; a row without pieces is an empty
    micro-batch."""

    pieces: Pieces
    ranks: int
    microbatches: int
    row: np.ndarray
    """int64 `[pieces]`: micro-batch m of rank r is row `r * microbatches + m`."""
    duration: float
    """Cost of the step, in tokens: in every round all ranks wait for the slowest."""

    def order(self) -> np.ndarray:
        """int64 `[pieces]`: the pieces by row, and in a row by tree and segments."""
        if len(np.unique(self.row)) == len(self.row):
            return np.asarray(np.argsort(self.row))
        return np.asarray(np.lexsort((self.pieces.among_equals(), self.row)))


def schedule(forest: Forest, trees: np.ndarray, ranks: int, budget: int, mode: Packing) -> Schedule:
    """The rows of every rank.

    Args:
        trees: int `[trees to place]`, ascending.
        budget: tokens of a row, enough for the longest sequence (`check_budget`).
    """
    if mode != "forest":
        pieces = paths(forest, trees)
        return deal(pieces, np.arange(len(pieces)) if mode == "single" else fill(pieces, ranks, budget), ranks)
    saw = Saw(forest, trees)
    whole = saw.cut(budget)
    best = deal(whole, fill(whole, ranks, budget), ranks)
    before = whole
    # Few large trees leave ranks idle: smaller pieces repeat some prompts, but may end sooner.
    for limit in _smaller_limits(whole, ranks, budget):
        if before.terms_of.max() == 1:
            break  # a sequence is never cut
        pieces = saw.cut(limit)
        if np.array_equal(pieces.first, before.first) and np.array_equal(pieces.segment, before.segment):
            continue
        before = pieces
        candidate = deal(pieces, fill(pieces, ranks, budget), ranks)
        if candidate.duration < best.duration:
            best = candidate
    return best


def check_budget(forest: Forest, budget: int) -> None:
    """Raises OverBudget for the longest sequence that no row can hold."""
    ends = np.where(forest.wanted_count > 0, forest.before + forest.length, 0)
    if ends.size and (longest := int(ends.max())) > budget:
        raise OverBudget(forest.names[forest.tree[int(ends.argmax())]], longest, budget)


def _smaller_limits(pieces: Pieces, ranks: int, budget: int) -> list[int]:
    largest = int(pieces.tokens[pieces.terms_of > 1].max(initial=0))
    total = int(pieces.tokens.sum())
    rounds = max(1, math.ceil(total / (ranks * budget)))
    shares = [total / (ranks * n) * slack for n in (rounds, rounds + 1) for slack in (1.5, 1.25, 1.0)]
    return sorted({math.ceil(share) for share in shares if share < largest}, reverse=True)


def fill(pieces: Pieces, ranks: int, budget: int) -> np.ndarray:
    """Rows of at most `budget` tokens, few and of about equal cost: int64 `[pieces]`, the row of each."""
    order = np.argsort(-pieces.cost, kind="stable")
    tokens, cost = pieces.tokens[order], pieces.cost[order]
    rounds = max(1, math.ceil(int(tokens.sum()) / (ranks * budget)))
    level = _least_loaded(tokens, cost, ranks * rounds, budget)
    if level is None:
        dense = _first_fit(tokens, budget)
        most = math.ceil((int(dense.max(initial=-1)) + 1) / ranks)
        while level is None and rounds < most:
            rounds += 1
            level = _least_loaded(tokens, cost, ranks * rounds, budget)
        level = dense if level is None else level
    found = np.empty(len(pieces), np.int64)
    found[order] = level
    return found


def _least_loaded(tokens: np.ndarray, cost: np.ndarray, count: int, budget: int) -> np.ndarray | None:
    """The row of each piece: of those with room, the one with the least work. None where one fits nowhere."""
    found = np.empty(len(tokens), np.int64)
    alone = min(count, len(tokens))
    found[:alone] = np.arange(alone)  # an empty row has the least
    if alone == len(tokens):
        return found
    room = (budget - tokens[:alone]).tolist()
    smallest = int(tokens.min())
    loads = list(zip(cost[:alone].tolist(), range(alone), strict=True))
    heapq.heapify(loads)  # thousands of ranks have thousands of rows
    rows = []
    for size, work in zip(tokens[alone:].tolist(), cost[alone:].tolist(), strict=True):
        full = []
        while loads and room[loads[0][1]] < size:
            load = heapq.heappop(loads)
            if room[load[1]] >= smallest:
                full.append(load)
        if not loads:
            return None
        had, row = loads[0]
        heapq.heapreplace(loads, (had + work, row))
        for load in full:
            heapq.heappush(loads, load)
        rows.append(row)
        room[row] -= size
    found[alone:] = rows
    return found


def _first_fit(tokens: np.ndarray, budget: int) -> np.ndarray:
    """The row of each piece: the first with room."""
    room = np.full(len(tokens), budget, np.int64)
    rows = np.empty(len(tokens), np.int64)
    used = 0
    for number, size in enumerate(tokens.tolist()):
        row = int((room[: used + 1] >= size).argmax())  # the one after the last is empty
        used = max(used, row + 1)
        rows[number] = row
        room[row] -= size
    return rows


def deal(pieces: Pieces, rows: np.ndarray, ranks: int) -> Schedule:
    """Hands rows to ranks, the same number to each: rows of like cost are computed at the same time."""
    cost = np.bincount(rows, pieces.cost)
    some = np.flatnonzero(cost)
    dearest = some[np.argsort(-cost[some], kind="stable")]
    rounds = max(1, math.ceil(len(dearest) / ranks))
    place = np.empty(len(cost), np.int64)
    load = np.zeros(ranks)
    for turn in range(rounds):
        now = dearest[turn * ranks : (turn + 1) * ranks]
        lightest = np.argsort(load, kind="stable")[: len(now)]
        place[now] = lightest * rounds + turn
        load[lightest] += cost[now]
    slowest = cost[dearest[::ranks]]
    return Schedule(pieces, ranks, rounds, place[rows], float(slowest.sum()))
