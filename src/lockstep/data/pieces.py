"""Cutting trees: which of their segments go into one row together.

All pieces of a step are columns, as the forest is. A tree whose segments fit a row is one piece. What is larger is
cut: each leaf goes where it needs the fewest new tokens, longest path first; ancestors are repeated in every piece that
needs them. All losses of a sequence belong to the first piece that has its last segment: a sequence is never cut, so
that what depends on all of it (its ratio, say) is known where it is computed. Nothing is there that is
not learned from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lockstep.data.forest import Forest, bounds_of, spans

PAIRS_PER_TOKEN = 4096
"""Attention pairs that cost as much as the dense layers do for one token: about six times the hidden size
(24 h² against 4 h floating point operations a layer), here of a hidden size of about 700."""


Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""int64: of segments the piece each is in, and the segments; likewise of terms."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Segments of one tree each, that go into one row together."""

    tree: np.ndarray
    """int64 `[pieces]`, ascending."""
    tokens: np.ndarray
    """int64 `[pieces]`."""
    cost: np.ndarray
    """float64 `[pieces]`, in tokens. Multiples of 1 / `PAIRS_PER_TOKEN`, a power of two: any sum is exact."""
    terms_of: np.ndarray
    """int64 `[pieces]`: how many terms each owns."""
    first: np.ndarray
    """int64 `[pieces + 1]`: of each piece in `segment`."""
    segment: np.ndarray
    """int64: those of the pieces one after the other, ancestors first; closed under ancestors."""
    first_term: np.ndarray
    """int64 `[pieces + 1]`: of each piece in `term`."""
    term: np.ndarray
    """int64: the loss terms that the pieces own."""
    path: bool
    """Whether each piece is one path, that its row holds as a single segment."""

    def __len__(self) -> int:
        return len(self.tree)

    def among_equals(self) -> np.ndarray:
        """int64 `[pieces]`: the order of the pieces by tree and segments."""
        segments, first = self.segment.tolist(), self.first.tolist()
        keys = [segments[begin:end] for begin, end in pairwise(first)]
        trees = self.tree.tolist()
        order = sorted(range(len(self)), key=lambda piece: (trees[piece], keys[piece]))
        found = np.empty(len(self), np.int64)
        found[order] = np.arange(len(self))
        return found


def paths(forest: Forest, trees: np.ndarray) -> Pieces:
    """One piece per sequence: its own copy of everything from the root on."""
    term = _terms_with_targets(forest, trees)
    _, begins, piece = np.unique(forest.term_sequence[term], return_index=True, return_inverse=True)
    number = np.empty(len(begins), np.int64)
    number[np.argsort(begins)] = np.arange(len(begins))
    piece = number[piece]
    at = np.zeros(len(begins), np.int64)
    at[piece] = forest.term_segment[term]  # of several the last, as later values stay
    owner, pieces, segments = np.arange(len(begins)), [], []
    while at.size:
        pieces.append(owner)
        segments.append(at)
        up = forest.parent[at]
        owner, at = owner[up >= 0], up[up >= 0]
    none = [np.empty(0, np.int64)]
    return _pieces(forest, np.concatenate(pieces or none), np.concatenate(segments or none), piece, term, True)


class Saw:
    """Cuts the trees of a mini-batch at one limit after the other."""

    def __init__(self, forest: Forest, trees: np.ndarray) -> None:
        self.forest = forest
        inside = np.zeros(len(forest), np.bool_)
        inside[trees] = True
        inside = inside[forest.tree]
        wanted = (forest.wanted_count > 0) & inside
        self._needed = np.flatnonzero(wanted | (forest.ancestor & inside))
        self._leaf = np.flatnonzero(wanted & ~forest.ancestor)
        self._term = _terms_with_targets(forest, trees)
        self._tree = forest.tree[self._needed]
        self._tokens = np.bincount(self._tree, forest.length[self._needed], len(forest))
        self._is_star = self._stars(wanted)
        self._forks = np.bincount(forest.tree[self._leaf], minlength=len(forest)) > 1

    def _stars(self, wanted: np.ndarray) -> np.ndarray:
        """bool `[trees]`: a root from which nothing is learned, and its children with a sequence each."""
        forest = self.forest
        star = np.ones(len(forest), np.bool_)
        star[forest.tree[wanted & (forest.ancestor | (forest.parent < 0))]] = False
        deep = self._leaf[forest.parent[forest.parent[self._leaf]] >= 0]
        star[forest.tree[deep]] = False
        terms = np.bincount(forest.term_segment[self._term], minlength=len(forest.tree))
        star[forest.tree[terms > 1]] = False
        return star

    def cut(self, limit: int) -> Pieces:
        """Pieces of at most `limit` tokens, or of one path where that is longer."""
        forest = self.forest
        large = (self._tokens > limit) & self._forks
        # Every segment and term that stays with its whole tree has the tree's first number.
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
        return _pieces(forest, piece, segment, np.searchsorted(numbers, of_term), term, False)

    def _cut_stars(self, which: np.ndarray, limit: int, width: int) -> Columns:
        """All such trees at a time, their longest leaves first. An ancestor is never new, so each leaf goes to the
        fullest piece that has room for it."""
        forest = self.forest
        leaf = self._leaf[which[forest.tree[self._leaf]]]
        leaf = leaf[np.lexsort((leaf, -forest.length[leaf], forest.tree[leaf]))]
        trees, row = np.unique(forest.tree[leaf], return_inverse=True)
        count = np.bincount(row, minlength=len(trees))
        nth = spans(np.zeros(len(trees), np.int64), count)
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

    def _cut_tree(self, tree: int, limit: int, width: int) -> Columns:
        """One of any shape."""
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
        return _of_groups(forest, groups, term, tree * width)


def _of_groups(forest: Forest, groups: Sequence[set[int]], term: np.ndarray, first: int) -> Columns:
    """The columns of pieces with these segments, the first of which has the number `first`."""
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
    """int64: the terms of these trees in which something is to be predicted."""
    inside = np.zeros(len(forest), np.bool_)
    inside[trees] = True
    return np.flatnonzero(inside[forest.tree[forest.term_segment]] & (forest.wanted_count[forest.term_segment] > 0))


def _pieces(
    forest: Forest, of_segment: np.ndarray, segment: np.ndarray, of_term: np.ndarray, term: np.ndarray, path: bool
) -> Pieces:
    """From which piece has which segment and term. Every piece has a segment."""
    count = int(of_segment.max(initial=-1)) + 1
    order = np.lexsort((segment, of_segment))
    of_segment, segment = of_segment[order], segment[order]
    order = np.lexsort((term, of_term))
    of_term, term = of_term[order], term[order]
    size, before = forest.length[segment], forest.before[segment]
    # Sums of integers below 2^53 are exact in floating point.
    tokens = np.bincount(of_segment, size, count)
    pairs = np.bincount(of_segment, size * before + size * (size + 1) // 2, count)
    first = bounds_of(np.bincount(of_segment, minlength=count))
    terms_of = np.bincount(of_term, minlength=count)
    return Pieces(
        tree=forest.tree[segment[first[:-1]]],
        tokens=tokens.astype(np.int64),
        cost=tokens + pairs / PAIRS_PER_TOKEN,
        terms_of=terms_of,
        first=first,
        segment=segment,
        first_term=bounds_of(terms_of),
        term=term,
        path=path,
    )
