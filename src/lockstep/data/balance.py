"""Which pieces of trees share a row, and which rank computes the row.

Everything is a pure function of sizes, so that the controller knows each rank's micro-batches before any rank
does: the same number for all of them, about equal in cost.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lockstep.data.trees import Tree

Packing = Literal["forest", "block", "single"]

PAIRS_PER_TOKEN = 4096
"""Attention pairs that cost as much as the dense layers do for one token: about six times the hidden size
(24 h² against 4 h floating point operations a layer), here of a hidden size of about 700."""


class OverBudget(ValueError):
    """One sequence is longer than a row may be."""

    def __init__(self, sample: str, tokens: int, budget: int) -> None:
        self.sample, self.tokens, self.budget = sample, tokens, budget
        super().__init__(
            f"sample {sample!r} is a sequence of {tokens} tokens, but token_budget is {budget}: set token_budget to "
            f"at least {tokens}, or make sequences shorter (model.max_length, rollout.sampling.max_tokens)"
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """Segments of one tree that go into one row together."""

    tree: int
    segments: tuple[int, ...]
    """Ancestors first; closed under ancestors."""
    terms: tuple[tuple[int, int], ...]
    """(segment, term) of each loss term that this piece owns."""
    path: bool
    """Whether the segments are one path that the row holds as a single segment."""
    tokens: int
    pairs: int

    @property
    def cost(self) -> float:
        return self.tokens + self.pairs / PAIRS_PER_TOKEN


def paths(tree: Tree, index: int) -> list[Piece]:
    """One piece per sequence of the tree: its own copy of everything from the root on."""
    members: dict[int, list[tuple[int, int]]] = {}
    for position, segment in enumerate(tree.segments):
        for term, sequence in enumerate(segment.sequences):
            if segment.wanted.size:
                members.setdefault(sequence, []).append((position, term))
    return [_piece(tree, index, tree.path(terms[-1][0]), terms, True) for terms in members.values()]


@dataclass(frozen=True, slots=True)
class Outline:
    """What cutting a tree needs to know of it, whatever the limit."""

    wanted: list[int]
    """Segments with targets."""
    ancestors: set[int]
    """Of those."""
    leaves: list[list[int]]
    """Paths to those that are nobody's ancestors, longest first."""
    length: list[int]
    """Tokens of each segment."""


def outline(tree: Tree) -> Outline:
    wanted = [position for position, segment in enumerate(tree.segments) if segment.wanted.size]
    ancestors = {above for position in wanted for above in tree.path(position)[:-1]}
    leaves = [tree.path(position) for position in wanted if position not in ancestors]
    length = [int(segment.tokens.size) for segment in tree.segments]
    leaves.sort(key=lambda path: (-sum(length[position] for position in path), path[-1]))
    return Outline(wanted, ancestors, leaves, length)


def cut(tree: Tree, index: int, limit: int, known: Outline | None = None) -> list[Piece]:
    """The tree in pieces of at most `limit` tokens, or of one path where that is longer.

    Each leaf goes where it needs the fewest new tokens, longest path first; ancestors are repeated in every
    piece that needs them. All losses of a sequence belong to the first piece that has its last segment: a sequence is
    never cut, so that what depends on all of it (its ratio, say) is known where it is computed. Leaves that nothing is
    to be learned from are left out.
    """
    known = known or outline(tree)
    wanted, ancestors, leaves, length = known.wanted, known.ancestors, known.leaves, known.length
    groups: list[set[int]] = []
    sizes: list[int] = []
    if sum(length[position] for position in {*ancestors, *wanted}) <= limit:
        groups, leaves = [{*ancestors, *wanted}] if wanted else [], []
    for path in leaves:
        added = [sum(length[position] for position in path if position not in group) for group in groups]
        fitting = [g for g in range(len(groups)) if sizes[g] + added[g] <= limit]
        if fitting:
            best = min(fitting, key=lambda g: (added[g], -sizes[g], g))
            groups[best].update(path)
            sizes[best] += added[best]
        else:
            groups.append(set(path))
            sizes.append(sum(length[position] for position in path))
    last = {sequence: position for position in wanted for sequence in tree.segments[position].sequences}
    pieces = []
    for group in groups:
        whole = {sequence for sequence, position in last.items() if position in group}
        terms = [
            (position, term)
            for position in wanted
            for term, sequence in enumerate(tree.segments[position].sequences)
            if sequence in whole
        ]
        last = {sequence: position for sequence, position in last.items() if sequence not in whole}
        pieces.append(_piece(tree, index, sorted(group), terms, False))
    return pieces


def _piece(tree: Tree, index: int, segments: list[int], terms: list[tuple[int, int]], path: bool) -> Piece:
    above: dict[int, int] = {}
    tokens = pairs = 0
    for position in segments:
        segment = tree.segments[position]
        size = int(segment.tokens.size)
        above[position] = 0 if segment.parent < 0 else above[segment.parent] + tree.segments[segment.parent].tokens.size
        tokens += size
        pairs += size * above[position] + size * (size + 1) // 2
    return Piece(index, tuple(segments), tuple(terms), path, tokens, int(pairs))


def schedule(trees: Sequence[tuple[int, Tree]], ranks: int, budget: int, mode: Packing) -> list[list[list[Piece]]]:
    """`[ranks][micro-batches][pieces]`: the rows of every rank; a row without pieces is an empty micro-batch.

    Args:
        trees: (index, tree) of the trees to place.
        budget: tokens of a row, enough for the longest sequence (`check_budget`).
    """
    if mode != "forest":
        pieces = [piece for index, tree in trees for piece in paths(tree, index)]
        return deal([[piece] for piece in pieces] if mode == "single" else fill(pieces, ranks, budget), ranks)
    outlined = [(index, tree, outline(tree)) for index, tree in trees]
    whole = [piece for index, tree, known in outlined for piece in cut(tree, index, budget, known)]
    best = deal(fill(whole, ranks, budget), ranks)
    shortest = duration(best)
    # Few large trees leave ranks idle: smaller pieces repeat some prompts, but may end sooner.
    for limit in _smaller_limits(whole, ranks, budget):
        pieces = [piece for index, tree, known in outlined for piece in cut(tree, index, limit, known)]
        candidate = deal(fill(pieces, ranks, budget), ranks)
        if (took := duration(candidate)) < shortest:
            best, shortest = candidate, took
    return best


def check_budget(trees: Sequence[Tree], budget: int) -> None:
    """Raises OverBudget for the longest sequence that no row can hold."""
    longest, name = 0, ""
    for tree in trees:
        end: list[int] = []
        for segment in tree.segments:
            end.append(int(segment.tokens.size) + (0 if segment.parent < 0 else end[segment.parent]))
            if segment.wanted.size and end[-1] > longest:
                longest, name = end[-1], tree.name
    if longest > budget:
        raise OverBudget(name, longest, budget)


def _smaller_limits(pieces: Sequence[Piece], ranks: int, budget: int) -> list[int]:
    largest = max((piece.tokens for piece in pieces if len(piece.terms) > 1), default=0)
    total = sum(piece.tokens for piece in pieces)
    rounds = max(1, math.ceil(total / (ranks * budget)))
    shares = [total / (ranks * n) * slack for n in (rounds, rounds + 1) for slack in (1.5, 1.25, 1.0)]
    return sorted({math.ceil(share) for share in shares if share < largest}, reverse=True)


def fill(pieces: Sequence[Piece], ranks: int, budget: int) -> list[list[Piece]]:
    """Rows of at most `budget` tokens, few and of about equal cost."""
    order = sorted(range(len(pieces)), key=lambda i: (-pieces[i].cost, i))
    dense = _first_fit([pieces[i] for i in order], budget)
    total = sum(piece.tokens for piece in pieces)
    for rounds in range(max(1, math.ceil(total / (ranks * budget))), math.ceil(len(dense) / ranks) + 1):
        level = _least_loaded([pieces[i] for i in order], ranks * rounds, budget)
        if level is not None:
            return level
    return dense


def _least_loaded(pieces: Sequence[Piece], count: int, budget: int) -> list[list[Piece]] | None:
    rows: list[list[Piece]] = [[] for _ in range(count)]
    room = [budget] * count
    smallest = min((piece.tokens for piece in pieces), default=0)
    loads = [(0.0, row) for row in range(count)]  # a heap: thousands of ranks have thousands of rows
    for piece in pieces:
        full = []
        while loads and room[loads[0][1]] < piece.tokens:
            load = heapq.heappop(loads)
            if room[load[1]] >= smallest:
                full.append(load)
        if not loads:
            return None
        cost, row = loads[0]
        heapq.heapreplace(loads, (cost + piece.cost, row))
        for load in full:
            heapq.heappush(loads, load)
        rows[row].append(piece)
        room[row] -= piece.tokens
    return rows


def _first_fit(pieces: Sequence[Piece], budget: int) -> list[list[Piece]]:
    rows: list[list[Piece]] = []
    room = np.empty(len(pieces), np.int64)
    for piece in pieces:
        row = int((room[: len(rows)] >= piece.tokens).argmax()) if rows else 0
        if not rows or room[row] < piece.tokens:
            row = len(rows)
            rows.append([])
            room[row] = budget
        rows[row].append(piece)
        room[row] -= piece.tokens
    return rows


def row_cost(row: Sequence[Piece]) -> float:
    return sum(piece.cost for piece in row)


def deal(rows: Sequence[list[Piece]], ranks: int) -> list[list[list[Piece]]]:
    """Hands rows to ranks, the same number to each: rows of like cost are computed at the same time."""
    rows = sorted((row for row in rows if row), key=row_cost, reverse=True)
    rounds = max(1, math.ceil(len(rows) / ranks))
    hands: list[list[list[Piece]]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for n in range(rounds):
        turn = [*rows[n * ranks : (n + 1) * ranks]]
        turn += [[] for _ in range(ranks - len(turn))]
        for rank, row in zip(sorted(range(ranks), key=lambda r: (load[r], r)), turn, strict=True):
            hands[rank].append(sorted(row, key=lambda piece: (piece.tree, piece.segments)))
            load[rank] += row_cost(row)
    return hands


def duration(hands: Sequence[Sequence[Sequence[Piece]]]) -> float:
    """Cost of a step: in every round all ranks wait for the slowest."""
    return sum(max(row_cost(row) for row in turn) for turn in zip(*hands, strict=True))
