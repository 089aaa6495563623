"""Plans which parts of which trees share a row, and which rank computes the row.

A tree that fits into a row is not cut. A larger one is cut into pieces: leaves, in the order of their paths' lengths,
join the piece to which they add the fewest tokens, and every piece repeats the ancestors of its leaves. A sequence is
never cut: all its terms belong to the first piece that has its last segment. Segments without targets in themselves or
in descendants are left out.

The plan is a pure function of sizes. All ranks get the same number of micro-batches, at about equal cost.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from lockstep.data.arrangement.rank_arrangement import arrange_by_speed
from lockstep.data.forest import Forest, concatenated_ranges, cumulative_bounds

PackingMode = Literal["forest", "block", "single"]

PAIRS_PER_TOKEN = 4096
"""Number of attention pairs that cost as much as the dense layers of one token: six times the hidden size h (24 h² and
4 h floating point operations per layer), here for a hidden size of about 700."""


class TokenBudgetExceeded(ValueError):
    """A sequence is longer than a row may be."""

    def __init__(self, sample: str, tokens: int, budget: int) -> None:
        self.sample, self.tokens, self.budget = sample, tokens, budget
        super().__init__(
            f"sample {sample!r} is a sequence of {tokens} tokens, but token_budget is {budget}: set token_budget to "
            f"at least {tokens}, or make sequences shorter (model.max_length, rollout.sampling.max_tokens)"
        )


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """The pieces into which trees are cut, their segments and terms, and the row of each piece.

    A piece is a part of a tree that is not divided among rows. Micro-batch m of rank r is row `r * microbatches + m`. A
    row without pieces is an empty micro-batch.
    """

    tree: np.ndarray
    """int64 `[pieces]`: the tree of each piece, ascending."""
    tokens: np.ndarray
    """int64 `[pieces]`: number of tokens."""
    cost: np.ndarray
    """float64 `[pieces]`, in units of one token. Sums are exact, because costs are multiples of 1 / `PAIRS_PER_TOKEN`,
    a power of two."""
    term_count: np.ndarray
    """int64 `[pieces]`: number of terms that belong to each piece."""
    first_segment: np.ndarray
    """int64 `[pieces + 1]`: where each piece begins in `segment`."""
    segment: np.ndarray
    """int64: the segments of all pieces, ancestors first. A piece with a segment has all its ancestors."""
    first_term: np.ndarray
    """int64 `[pieces + 1]`: where each piece begins in `term`."""
    term: np.ndarray
    """int64: the terms that belong to the pieces."""
    is_path: bool
    """Whether each piece is one path, which then becomes a single segment of its row."""
    row: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """int64 `[pieces]`: the row of each piece; empty before `assign_rows_to_ranks`."""
    ranks: int = 0
    microbatches: int = 0
    """Number of micro-batches per rank."""
    duration: float = math.inf
    """Cost of the step in units of one token: the sum over micro-batches of the slowest rank's cost."""

    def __len__(self) -> int:
        return len(self.tree)

    def order(self) -> np.ndarray:
        """Returns the pieces sorted by row, within a row by tree and segments: int64 `[pieces]`."""
        if len(np.unique(self.row)) == len(self.row):
            return np.asarray(np.argsort(self.row))
        return np.asarray(np.lexsort((self._order_by_segments(), self.row)))

    def _order_by_segments(self) -> np.ndarray:
        """Returns the rank of each piece in the order by tree and segments: int64 `[pieces]`."""
        segments, first = self.segment.tolist(), self.first_segment.tolist()
        keys = [segments[begin:end] for begin, end in pairwise(first)]
        trees = self.tree.tolist()
        order = sorted(range(len(self)), key=lambda piece: (trees[piece], keys[piece]))
        found = np.empty(len(self), np.int64)
        found[order] = np.arange(len(self))
        return found


def plan_packing(
    forest: Forest, trees: np.ndarray, ranks: int, budget: int, mode: PackingMode, whole_trees: bool = False,
    speeds: np.ndarray | None = None,
) -> PackingPlan:  # fmt: skip
    """Plans the rows of every rank.

    Args:
        trees: numbers of the trees to pack, ascending.
        budget: largest number of tokens of a row, enough for the longest sequence (`check_token_budget`).
        whole_trees: cut only trees over the budget.
        speeds: float64 `[ranks]`, relative to each other, if the ranks are not equally fast.
    """
    if mode != "forest":
        return _arrange(split_into_paths(forest, trees), ranks, None if mode == "single" else budget, speeds)
    splitter = TreeSplitter(forest, trees)
    uncut = splitter.cut(budget)
    best = _arrange(uncut, ranks, budget, speeds)
    previous = uncut
    # With few large trees some ranks would be idle. Smaller pieces repeat some prompts, but may be faster in total.
    slowest = 1.0 if speeds is None else float(speeds.min() / speeds.mean())
    for limit in () if whole_trees else _smaller_limits(uncut, ranks, budget, slowest):
        if previous.term_count.max() == 1:
            break  # a sequence is never cut
        pieces = splitter.cut(limit)
        if np.array_equal(pieces.first_segment, previous.first_segment) and np.array_equal(
            pieces.segment, previous.segment
        ):
            continue
        previous = pieces
        candidate = _arrange(pieces, ranks, budget, speeds)
        if candidate.duration < best.duration:
            best = candidate
    return best


def _arrange(pieces: PackingPlan, ranks: int, budget: int | None, speeds: np.ndarray | None) -> PackingPlan:
    """Assigns pieces to rows and ranks.

    Args:
        budget: None if each piece needs a row of its own.
    """
    if speeds is not None:
        found = arrange_by_speed(pieces.tokens, pieces.cost, ranks, budget, speeds)
        row, microbatches, duration = found
        return replace(pieces, row=row, ranks=ranks, microbatches=microbatches, duration=duration)
    rows = np.arange(len(pieces)) if budget is None else fill_rows(pieces, ranks, budget)
    return assign_rows_to_ranks(pieces, rows, ranks)


def check_token_budget(forest: Forest, budget: int) -> None:
    """Raises TokenBudgetExceeded if the longest sequence does not fit into a row."""
    ends = np.where(forest.target_count > 0, forest.depth + forest.length, 0)
    if ends.size and (longest := int(ends.max())) > budget:
        raise TokenBudgetExceeded(forest.names[forest.tree[int(ends.argmax())]], longest, budget)


def _smaller_limits(pieces: PackingPlan, ranks: int, budget: int, slowest: float) -> list[int]:
    """The sizes to which pieces could be cut; `slowest` is the part of a mean share that the slowest rank can take."""
    largest = int(pieces.tokens[pieces.term_count > 1].max(initial=0))
    total = int(pieces.tokens.sum())
    rounds = max(1, math.ceil(total / (ranks * budget)))
    shares = [total / (ranks * n) * slack for n in (rounds, rounds + 1) for slack in (1.5, 1.25, 1.0)]
    shares += [share * slowest for share in shares if slowest < 1]
    return sorted({math.ceil(share) for share in shares if share < largest}, reverse=True)


def fill_rows(pieces: PackingPlan, ranks: int, budget: int) -> np.ndarray:
    """Assigns pieces to few rows of at most `budget` tokens and about equal cost. Returns int64 `[pieces]`, the
    rows."""
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
    """Returns the row of each piece: of the rows with room, the one with the least cost. None if a piece fits into no
    row."""
    found = np.empty(len(tokens), np.int64)
    first_rows = min(count, len(tokens))
    found[:first_rows] = np.arange(first_rows)  # an empty row has the least cost
    if first_rows == len(tokens):
        return found
    room = (budget - tokens[:first_rows]).tolist()
    smallest = int(tokens.min())
    row_loads = list(zip(cost[:first_rows].tolist(), range(first_rows), strict=True))
    heapq.heapify(row_loads)  # thousands of ranks have thousands of rows
    rows = []
    for size, work in zip(tokens[first_rows:].tolist(), cost[first_rows:].tolist(), strict=True):
        full = []
        while row_loads and room[row_loads[0][1]] < size:
            load = heapq.heappop(row_loads)
            if room[load[1]] >= smallest:
                full.append(load)
        if not row_loads:
            return None
        load_before, row = row_loads[0]
        heapq.heapreplace(row_loads, (load_before + work, row))
        for load in full:
            heapq.heappush(row_loads, load)
        rows.append(row)
        room[row] -= size
    found[first_rows:] = rows
    return found


def _first_fit(tokens: np.ndarray, budget: int) -> np.ndarray:
    """Returns the row of each piece: the first one with room."""
    room = np.full(len(tokens), budget, np.int64)
    rows = np.empty(len(tokens), np.int64)
    used = 0
    for number, size in enumerate(tokens.tolist()):
        row = int((room[: used + 1] >= size).argmax())  # the row after the last used one is empty
        used = max(used, row + 1)
        rows[number] = row
        room[row] -= size
    return rows


def assign_rows_to_ranks(pieces: PackingPlan, rows: np.ndarray, ranks: int) -> PackingPlan:
    """Assigns the same number of rows to each rank, such that ranks compute rows of similar cost at the same time."""
    cost = np.bincount(rows, pieces.cost)
    nonempty = np.flatnonzero(cost)
    by_cost = nonempty[np.argsort(-cost[nonempty], kind="stable")]
    rounds = max(1, math.ceil(len(by_cost) / ranks))
    place = np.empty(len(cost), np.int64)
    load = np.zeros(ranks)
    for turn in range(rounds):
        now = by_cost[turn * ranks : (turn + 1) * ranks]
        lightest = np.argsort(load, kind="stable")[: len(now)]
        place[now] = lightest * rounds + turn
        load[lightest] += cost[now]
    slowest = cost[by_cost[::ranks]]
    return replace(pieces, row=place[rows], ranks=ranks, microbatches=rounds, duration=float(slowest.sum()))


PieceColumns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""int64 arrays: piece of each segment, segment; piece of each term, term."""


def split_into_paths(forest: Forest, trees: np.ndarray) -> PackingPlan:
    """Makes one piece per sequence: its path from the root."""
    term = _terms_with_targets(forest, trees)
    _, begins, piece = np.unique(forest.term_sequence[term], return_index=True, return_inverse=True)
    number = np.empty(len(begins), np.int64)
    number[np.argsort(begins)] = np.arange(len(begins))
    piece = number[piece]
    at = np.zeros(len(begins), np.int64)
    at[piece] = forest.term_segment[term]  # the sequence's last segment: later values overwrite earlier ones
    owner, pieces, segments = np.arange(len(begins)), [], []
    while at.size:
        pieces.append(owner)
        segments.append(at)
        up = forest.parent[at]
        owner, at = owner[up >= 0], up[up >= 0]
    none = [np.empty(0, np.int64)]
    return _plan_of(forest, np.concatenate(pieces or none), np.concatenate(segments or none), piece, term, True)


class TreeSplitter:
    """Cuts the trees of a mini-batch into pieces of limited size; `cut` can be called for several limits."""

    def __init__(self, forest: Forest, trees: np.ndarray) -> None:
        self.forest = forest
        inside = np.zeros(len(forest), np.bool_)
        inside[trees] = True
        inside = inside[forest.tree]
        with_targets = (forest.target_count > 0) & inside
        self._needed = np.flatnonzero(with_targets | (forest.has_targets_below & inside))
        self._leaf = np.flatnonzero(with_targets & ~forest.has_targets_below)
        self._term = _terms_with_targets(forest, trees)
        self._tree = forest.tree[self._needed]
        self._tokens = np.bincount(self._tree, forest.length[self._needed], len(forest))
        self._is_star = self._stars(with_targets)
        self._forks = np.bincount(forest.tree[self._leaf], minlength=len(forest)) > 1

    def _stars(self, with_targets: np.ndarray) -> np.ndarray:
        """Returns whether each tree is a star, bool `[trees]`: a root without targets, and children of one sequence
        each."""
        forest = self.forest
        star = np.ones(len(forest), np.bool_)
        star[forest.tree[with_targets & (forest.has_targets_below | (forest.parent < 0))]] = False
        deep = self._leaf[forest.parent[forest.parent[self._leaf]] >= 0]
        star[forest.tree[deep]] = False
        terms = np.bincount(forest.term_segment[self._term], minlength=len(forest.tree))
        star[forest.tree[terms > 1]] = False
        return star

    def cut(self, limit: int) -> PackingPlan:
        """Makes pieces of at most `limit` tokens, or of a single path if that is longer."""
        forest = self.forest
        large = (self._tokens > limit) & self._forks
        # All segments and terms of an uncut tree get the first piece number of the tree.
        width = len(forest.tree) + 1
        of_segment, of_term = self._tree * width, forest.tree[forest.term_segment[self._term]] * width
        segment, term = self._needed, self._term
        if large.any():
            stays, owned = ~large[self._tree], ~large[forest.tree[forest.term_segment[term]]]
            parts = [(of_segment[stays], segment[stays], of_term[owned], term[owned])]
            parts.append(self._cut_stars(large & self._is_star, limit, width))
            for tree in np.flatnonzero(large & ~self._is_star).tolist():
                parts.append(self._cut_tree(tree, limit, width))
            of_segment, segment, of_term, term = (np.concatenate(column) for column in zip(*parts, strict=True))
        numbers, piece = np.unique(of_segment, return_inverse=True)
        return _plan_of(forest, piece, segment, np.searchsorted(numbers, of_term), term, False)

    def _cut_stars(self, which: np.ndarray, limit: int, width: int) -> PieceColumns:
        """Cuts all star-shaped trees at once. Leaves, longest first, go to the fullest piece that has room for them;
        every piece has the root."""
        forest = self.forest
        leaf = self._leaf[which[forest.tree[self._leaf]]]
        leaf = leaf[np.lexsort((leaf, -forest.length[leaf], forest.tree[leaf]))]
        trees, row = np.unique(forest.tree[leaf], return_inverse=True)
        count = np.bincount(row, minlength=len(trees))
        nth = concatenated_ranges(np.zeros(len(trees), np.int64), count)
        sizes = np.zeros((len(trees), int(count.max(initial=0))), np.int64)
        group = np.zeros(len(leaf), np.int64)
        used = np.zeros(len(trees), np.int64)
        root = forest.length[forest.parent[leaf]]
        for turn in range(sizes.shape[1]):
            now = np.flatnonzero(nth == turn)
            tree, size = row[now], forest.length[leaf[now]]
            held = sizes[tree, : int(used.max()) + 1]
            room = np.where((held > 0) & (held + size[:, None] <= limit), held, 0)
            best = room.argmax(axis=1)
            fresh = room.max(axis=1) == 0
            best[fresh] = used[tree[fresh]]
            sizes[tree, best] += size + np.where(fresh, root[now], 0)
            used[tree[fresh]] += 1
            group[now] = best
        number = trees[row] * width + group
        heads, one = np.unique(number, return_index=True)
        of_leaf = np.empty(len(forest.tree), np.int64)
        of_leaf[leaf] = number
        term = self._term[which[forest.tree[forest.term_segment[self._term]]]]
        return (
            np.concatenate([heads, number]), np.concatenate([forest.parent[leaf[one]], leaf]),
            of_leaf[forest.term_segment[term]], term,
        )  # fmt: skip

    def _cut_tree(self, tree: int, limit: int, width: int) -> PieceColumns:
        """Cuts a tree of any shape."""
        forest = self.forest
        length = dict(zip(*(each.tolist() for each in (self._needed, forest.length[self._needed])), strict=True))
        leaves = [forest.path(leaf) for leaf in self._leaf[forest.tree[self._leaf] == tree].tolist()]
        leaves.sort(key=lambda path: (-sum(length[each] for each in path), path[-1]))
        groups: list[set[int]] = []
        sizes: list[int] = []
        for path in leaves:
            added = [sum(length[each] for each in path if each not in group) for group in groups]
            fitting = [g for g in range(len(groups)) if sizes[g] + added[g] <= limit]
            if fitting:
                best = min(fitting, key=lambda g: (added[g], -sizes[g], g))
                groups[best].update(path)
                sizes[best] += added[best]
            else:
                groups.append(set(path))
                sizes.append(sum(length[each] for each in path))
        term = self._term[forest.tree[forest.term_segment[self._term]] == tree]
        return _columns_of_groups(forest, groups, term, tree * width)


def _columns_of_groups(forest: Forest, groups: Sequence[set[int]], term: np.ndarray, first: int) -> PieceColumns:
    """Returns the columns of pieces with these segments. The pieces are numbered from `first` on."""
    segments = forest.term_segment[term].tolist()
    sequences = forest.term_sequence[term].tolist()
    last = dict(zip(sequences, segments, strict=True))
    owner = {
        sequence: next(number for number, group in enumerate(groups) if segment in group)
        for sequence, segment in last.items()
    }
    held = [(first + number, each) for number, group in enumerate(groups) for each in sorted(group)]
    return (
        np.asarray([number for number, _ in held], np.int64), np.asarray([each for _, each in held], np.int64),
        np.asarray([first + owner[sequence] for sequence in sequences], np.int64), term,
    )  # fmt: skip


def _terms_with_targets(forest: Forest, trees: np.ndarray) -> np.ndarray:
    """Returns the terms of these trees that have targets, int64."""
    inside = np.zeros(len(forest), np.bool_)
    inside[trees] = True
    return np.flatnonzero(inside[forest.tree[forest.term_segment]] & (forest.target_count[forest.term_segment] > 0))


def _plan_of(
    forest: Forest, of_segment: np.ndarray, segment: np.ndarray, of_term: np.ndarray, term: np.ndarray, is_path: bool
) -> PackingPlan:
    """Makes a plan, without rows, from the piece of each segment and term. Every piece must have a segment."""
    count = int(of_segment.max(initial=-1)) + 1
    order = np.lexsort((segment, of_segment))
    of_segment, segment = of_segment[order], segment[order]
    order = np.lexsort((term, of_term))
    of_term, term = of_term[order], term[order]
    size, before = forest.length[segment], forest.depth[segment]
    # The vision tower costs about as much per feature as the language model per token (Qwen2.5-VL-3B: 5.6, 5.8 GFLOP).
    # Sums of integers below 2^53 are exact in floating point.
    tokens = np.bincount(of_segment, size, count)
    pairs = np.bincount(of_segment, size * before + size * (size + 1) // 2, count)
    tower = np.bincount(of_segment, forest.features[segment], count) if forest.images else 0.0
    first = cumulative_bounds(np.bincount(of_segment, minlength=count))
    term_count = np.bincount(of_term, minlength=count)
    return PackingPlan(
        tree=forest.tree[segment[first[:-1]]],
        tokens=tokens.astype(np.int64),
        cost=tokens + pairs / PAIRS_PER_TOKEN + tower,
        term_count=term_count,
        first_segment=first,
        segment=segment,
        first_term=cumulative_bounds(term_count),
        term=term,
        is_path=is_path,
    )
