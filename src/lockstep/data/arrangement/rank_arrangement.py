"""Arranges pieces of a batch in rows for ranks of unequal speed.

Ranks of a sharded model compute a micro-batch together: each of their collectives waits for the slowest. So the ranks'
rows of one micro-batch should take equally long, which means that their costs are proportional to the ranks' speeds.
Every rank still gets the same number of rows, and every piece is in exactly one row, so the sum over all targets, and
with it the objective and its gradient, is that of any other arrangement.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

_WORTH_A_ROUND = 0.98
"""A further micro-batch is only planned if the step then takes at most this share of the time: it has a cost of its
own, which the plan does not know."""
SLOWEST = 0.05
"""The least speed, as a share of the fastest, so that no rank is left without work by a single bad measurement."""


class RankArrangement(NamedTuple):
    """The rows of all pieces."""

    row: np.ndarray
    """int64 `[pieces]`: micro-batch m of rank r is row `r * microbatches + m`."""
    microbatches: int
    """Number of micro-batches per rank."""
    duration: float
    """The time of the step in units of one token at speed 1: the sum over micro-batches of the slowest rank's time."""


def normalised_speeds(speeds: Sequence[float] | None, ranks: int) -> np.ndarray | None:
    """Returns the speeds relative to the fastest rank, float64 `[ranks]`; None if all are equal.

    Raises:
        ValueError: there is not one positive number for each rank.
    """
    if speeds is None:
        return None
    found = np.asarray(speeds, np.float64)
    if found.shape != (ranks,) or not (np.isfinite(found).all() and (found > 0).all()):
        raise ValueError(f"speeds of ranks are {list(speeds)}, expected one positive number for each of {ranks} ranks")
    found = np.maximum(found / found.max(), SLOWEST)
    return None if (found == found[0]).all() else found


def arrange_by_speed(
    tokens: np.ndarray, cost: np.ndarray, ranks: int, budget: int | None, speeds: np.ndarray
) -> RankArrangement:
    """Arranges pieces such that the ranks' rows of a micro-batch take about equally long.

    Args:
        tokens: int64 `[pieces]`.
        cost: float64 `[pieces]`, in units of one token.
        budget: largest number of tokens of a row; None if each piece needs a row of its own.
        speeds: float64 `[ranks]`, relative to each other.
    """
    if budget is None or not len(cost):
        return _one_piece_per_row(cost, ranks, speeds)
    best: RankArrangement | None = None
    for found in _attempts(tokens, cost, ranks, budget, speeds):
        if best is not None and found.duration > _WORTH_A_ROUND * best.duration:
            break
        best = found
    assert best is not None  # with a row for each piece all pieces have room
    return best


def _attempts(
    tokens: np.ndarray, cost: np.ndarray, ranks: int, budget: int, speeds: np.ndarray
) -> Iterator[RankArrangement]:
    """Yields arrangements with more and more micro-batches, from the fewest for which there is room."""
    for rounds in range(max(1, math.ceil(int(tokens.sum()) / (ranks * budget))), len(tokens) + 1):
        rows = _fill(tokens, cost, np.repeat(speeds, rounds), budget)
        if rows is not None:
            yield _in_turns(rows, cost, rounds, speeds)


def _fill(tokens: np.ndarray, cost: np.ndarray, speeds: np.ndarray, budget: int) -> np.ndarray | None:
    """Puts pieces, the most expensive first, into the row that is then done first (Graham's rule for machines of
    unequal speed). Returns int64 `[pieces]`; None if a piece fits into no row.

    Args:
        speeds: float64 `[rows]`.
    """
    room, load = np.full(len(speeds), budget, np.int64), np.zeros(len(speeds))
    found = np.empty(len(tokens), np.int64)
    for piece in np.argsort(-cost, kind="stable").tolist():
        ends = np.where(room >= tokens[piece], (load + cost[piece]) / speeds, np.inf)
        row = int(ends.argmin())
        if ends[row] == np.inf:
            return None
        found[piece] = row
        room[row] -= tokens[piece]
        load[row] += cost[piece]
    return found


def _in_turns(rows: np.ndarray, cost: np.ndarray, rounds: int, speeds: np.ndarray) -> RankArrangement:
    """Orders the rows of each rank by cost, so that the ranks compute their most expensive ones at the same time."""
    ranks = len(speeds)
    loads = np.bincount(rows, cost, ranks * rounds).reshape(ranks, rounds)
    order = np.argsort(-loads, axis=1, kind="stable")
    turn = np.empty_like(order)
    np.put_along_axis(turn, order, np.arange(rounds)[None, :], axis=1)
    used = max(1, int((loads > 0).sum(axis=1).max()))
    row = rows // rounds * used + turn.ravel()[rows]
    times = np.take_along_axis(loads, order, axis=1) / speeds[:, None]
    return RankArrangement(row, used, float(times.max(axis=0).sum()))


def _one_piece_per_row(cost: np.ndarray, ranks: int, speeds: np.ndarray) -> RankArrangement:
    """The most expensive pieces go to the fastest ranks, within pieces of similar cost."""
    rounds = max(1, math.ceil(len(cost) / ranks))
    fastest = np.argsort(-speeds, kind="stable")
    by_cost = np.argsort(-cost, kind="stable")
    row = np.empty(len(cost), np.int64)
    duration = 0.0
    for turn in range(rounds):
        now = by_cost[turn * ranks : (turn + 1) * ranks]
        row[now] = fastest[: len(now)] * rounds + turn
        duration += float((cost[now] / speeds[fastest[: len(now)]]).max(initial=0.0))
    return RankArrangement(row, rounds, duration)
