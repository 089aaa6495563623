"""A reference for packing: the same rules with an object per sample. The arrays of the package must equal its
results."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.data.forest import Forest, Segment
from lockstep.data.micro_batch import MicroBatch
from lockstep.data.packing import PAIRS_PER_TOKEN
from lockstep.data.samples import Rollouts

Packing = str


@dataclass(slots=True)
class Tree:
    """One prompt with its completions, a document, or a conversation with branches."""

    segments: list[Segment]
    name: str = ""
    size: int | None = None
    """As how many samples of a mini-batch it counts; None: the number of its sequences."""

    @property
    def samples(self) -> int:
        return (
            len({number for segment in self.segments for number in segment.sequences})
            if self.size is None
            else self.size
        )

    def path(self, segment: int) -> list[int]:
        """Returns the segments from the root to the given one."""
        found = [segment]
        while (parent := self.segments[found[-1]].parent) >= 0:
            found.append(parent)
        return found[::-1]


def forest_of(trees: Sequence[Tree]) -> Forest:
    return Forest.of([tree.segments for tree in trees], [tree.name for tree in trees], [tree.samples for tree in trees])


def trees_of(forest: Forest) -> list[Tree]:
    """Converts a forest to trees. Fields are zero for tokens that are not targets."""
    of_terms = np.split(forest.term_sequence, np.searchsorted(forest.term_segment, np.arange(1, len(forest.tree))))
    first = np.searchsorted(forest.tree, np.arange(len(forest) + 1))
    return [
        Tree(
            [_segment(forest, s, first[number], of_terms[s]) for s in range(first[number], first[number + 1])],
            name,
            int(forest.samples[number]),
        )
        for number, name in enumerate(forest.names)
    ]


def _segment(forest: Forest, number: int, first: int, sequences: np.ndarray) -> Segment:
    size, start = int(forest.length[number]), int(forest.first_token[number])
    where = forest.target_offset[forest.first_offset[number] : forest.first_offset[number + 1]]
    mask = np.zeros(size, np.bool_)
    mask[where] = True
    fields = {}
    for name, values in forest.fields.items():
        if len(where):
            begin = int(forest.target_bounds[np.searchsorted(forest.term_segment, number)])
            field = np.zeros((len(sequences), size), np.float32)
            field[:, where] = values[begin : begin + field.shape[0] * len(where)].reshape(len(sequences), -1)
            fields[name] = field[0] if len(sequences) == 1 else field
    parent = int(forest.parent[number])
    return Segment(
        forest.tokens[start : start + size], parent if parent < 0 else parent - first, mask if len(where) else None,
        fields, int(sequences[0]) if len(sequences) == 1 else tuple(sequences.tolist()),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Piece:
    """Segments of one tree that are in one row."""

    tree: int
    segments: tuple[int, ...]
    """Segments, ancestors first. A piece with a segment has all its ancestors."""
    terms: tuple[tuple[int, int], ...]
    """(segment, term) of each term that belongs to this piece."""
    path: bool
    """Whether the segments are one path, which becomes a single segment of the row."""
    tokens: int
    pairs: int

    @property
    def cost(self) -> float:
        return self.tokens + self.pairs / PAIRS_PER_TOKEN


def plain_trees(rollouts: Rollouts, advantages: np.ndarray, mask_truncated: bool = False) -> list[Tree]:
    """Trees of completions without turns."""
    trees = []
    for g, group in enumerate(rollouts.groups):
        segments = [Segment(group.prompt.tokens)]
        for k, each in enumerate(group.completions):
            if len(each.tokens) and not (mask_truncated and each.finish == "length"):
                size = len(each.tokens)
                given = advantages[g, k]
                fields = {
                    "engine_logprob": each.logprobs,
                    "advantage": np.full(size, given, np.float32) if given.ndim == 0 else given[:size],
                }
                number = g * len(group.completions) + k
                segments.append(Segment(each.tokens, 0, np.ones(size, np.bool_), fields, number))
        trees.append(Tree(segments, group.prompt.uid, len(group.completions)))
    return trees


def plain_rows(
    trees: Sequence[Tree], ranks: int, budget: int, mode: Packing, present: Sequence[str] = ()
) -> list[list[MicroBatch[np.ndarray]]]:
    """Returns `[ranks][micro-batches]`, without weights.

    Args:
        present: fields that rows have even if nothing is learned.
    """
    first: list[list[int]] = []
    names = sorted({*present, *(name for tree in trees for segment in tree.segments for name in segment.fields)})
    values: dict[str, list[float]] = {name: [] for name in names}
    numbers: list[int] = []
    for tree in trees:
        first.append([])
        for segment in tree.segments:
            first[-1].append(len(numbers))
            for term, sequence in enumerate(segment.sequences):
                for token in segment.target_offsets.tolist():
                    numbers.append(sequence)
                    for name in names:
                        values[name].append(np.atleast_2d(segment.fields[name])[term, token])
    fields = {name: np.asarray(each, np.float32) for name, each in values.items()}
    hands = schedule(list(enumerate(trees)), ranks, budget, mode)
    flat = np.asarray(numbers, np.int32)
    return [[_row(trees, pieces, first, fields, flat) for pieces in hand] for hand in hands]


def _row(
    trees: Sequence[Tree],
    pieces: Sequence[Piece],
    first: list[list[int]],
    fields: dict[str, np.ndarray],
    numbers: np.ndarray,
) -> MicroBatch[np.ndarray]:
    if not pieces:
        return _empty_row(list(fields))
    tokens: list[np.ndarray] = []
    lengths: list[int] = []
    parents: list[int] = []
    sources, targets, index = [], [], []
    end = 0
    for piece in pieces:
        segments = trees[piece.tree].segments
        start: dict[int, int] = {}
        place: dict[int, int] = {-1: -1}
        if piece.path:
            lengths.append(piece.tokens)
            parents.append(-1)
        for position in piece.segments:
            segment = segments[position]
            start[position] = end
            end += segment.tokens.size
            tokens.append(segment.tokens)
            if not piece.path:
                place[position] = len(lengths)
                lengths.append(segment.tokens.size)
                parents.append(place[segment.parent])
        for position, term in piece.terms:
            segment = segments[position]
            with_targets = segment.target_offsets
            before = -1  # never taken: the first token of a root is no target
            if segment.parent >= 0:
                before = start[segment.parent] + segments[segment.parent].tokens.size - 1
            sources.append(np.where(with_targets == 0, before, start[position] + with_targets - 1))
            targets.append(segment.tokens[with_targets])
            own = first[piece.tree][position] + term * with_targets.size
            index.append(np.arange(own, own + with_targets.size, dtype=np.int64))
    where = np.concatenate(index)
    return MicroBatch(
        tokens=np.concatenate(tokens).astype(np.int32),
        lengths=np.asarray(lengths, np.int32),
        parents=np.asarray(parents, np.int32),
        sources=np.concatenate(sources).astype(np.int32),
        targets=np.concatenate(targets).astype(np.int32),
        index=where,
        fields={name: values[where] for name, values in fields.items()},
        sequences=numbers[where],
    )


def _empty_row(names: Sequence[str]) -> MicroBatch[np.ndarray]:
    """Returns one token of weight zero, so that a rank without work enters the same collectives as the others."""
    zero = np.zeros(1, np.int32)
    return MicroBatch(
        tokens=zero,
        lengths=np.ones(1, np.int32),
        parents=np.full(1, -1, np.int32),
        sources=zero.copy(),
        targets=zero.copy(),
        index=np.full(1, -1, np.int64),
        fields={name: np.zeros(1, np.float32) for name in names},
        sequences=np.full(1, -1, np.int32),
    )


def paths(tree: Tree, index: int) -> list[Piece]:
    """Makes one piece per sequence of the tree: its path from the root."""
    members: dict[int, list[tuple[int, int]]] = {}
    for position, segment in enumerate(tree.segments):
        for term, sequence in enumerate(segment.sequences):
            if segment.target_offsets.size:
                members.setdefault(sequence, []).append((position, term))
    return [_piece(tree, index, tree.path(terms[-1][0]), terms, True) for terms in members.values()]


@dataclass(frozen=True, slots=True)
class Outline:
    """The properties of a tree that are needed to cut it."""

    with_targets: list[int]
    """Segments with targets."""
    ancestors: set[int]
    """Terms of the segments with targets."""
    leaves: list[list[int]]
    """Paths to the leaves, longest first."""
    length: list[int]
    """Number of tokens of each segment."""


def outline(tree: Tree) -> Outline:
    with_targets = [position for position, segment in enumerate(tree.segments) if segment.target_offsets.size]
    ancestors = {above for position in with_targets for above in tree.path(position)[:-1]}
    leaves = [tree.path(position) for position in with_targets if position not in ancestors]
    length = [int(segment.tokens.size) for segment in tree.segments]
    leaves.sort(key=lambda path: (-sum(length[position] for position in path), path[-1]))
    return Outline(with_targets, ancestors, leaves, length)


def cut(tree: Tree, index: int, limit: int, known: Outline | None = None) -> list[Piece]:
    """Cuts the tree into pieces of at most `limit` tokens, or of a single path if that is longer.

    Each leaf goes where it needs the fewest new tokens, longest path first; ancestors are repeated in every
    piece that needs them. All losses of a sequence belong to the first piece that has its last segment: a sequence is
    never cut, so that what depends on all of it (its ratio, say) is known where it is computed. Leaves that nothing is
    to be learned from are left out.
    """
    known = known or outline(tree)
    with_targets, ancestors, leaves, length = known.with_targets, known.ancestors, known.leaves, known.length
    groups: list[set[int]] = []
    sizes: list[int] = []
    if sum(length[position] for position in {*ancestors, *with_targets}) <= limit:
        groups, leaves = [{*ancestors, *with_targets}] if with_targets else [], []
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
    last = {sequence: position for position in with_targets for sequence in tree.segments[position].sequences}
    pieces = []
    for group in groups:
        whole = {sequence for sequence, position in last.items() if position in group}
        terms = [
            (position, term)
            for position in with_targets
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
    """Returns the rows of every rank, `[ranks][micro-batches][pieces]`. A row without pieces is an empty micro-batch.

    Args:
        trees: (index, tree) of the trees to place.
        budget: tokens of a row, enough for the longest sequence (`check_token_budget`).
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


def _smaller_limits(pieces: Sequence[Piece], ranks: int, budget: int) -> list[int]:
    largest = max((piece.tokens for piece in pieces if len(piece.terms) > 1), default=0)
    total = sum(piece.tokens for piece in pieces)
    rounds = max(1, math.ceil(total / (ranks * budget)))
    shares = [total / (ranks * n) * slack for n in (rounds, rounds + 1) for slack in (1.5, 1.25, 1.0)]
    return sorted({math.ceil(share) for share in shares if share < largest}, reverse=True)


def fill(pieces: Sequence[Piece], ranks: int, budget: int) -> list[list[Piece]]:
    """Assigns pieces to few rows of at most `pair_test_budget` tokens and about equal cost."""
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
    """Assigns the same number of rows to each rank, such that ranks compute rows of similar cost at the same time."""
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
    """Returns the cost of a step: the sum over micro-batches of the slowest rank's cost."""
    return sum(max(row_cost(row) for row in turn) for turn in zip(*hands, strict=True))
