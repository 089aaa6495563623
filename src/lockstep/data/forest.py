"""The trees of a step as columns: what packing reads of thousands of samples, without an object for each.

A sequence is a path from a root to a segment. Sequences that begin alike share the segments they have in common, so
that these are computed once. Segments are numbered through all trees, ancestors first. A *term* is a segment for
one of the sequences that it belongs to; a *target* is a token of a term that is to be predicted. Targets are
numbered by tree, segment, term and token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np


@dataclass(slots=True)
class Segment:
    """A run of tokens that stays together; its context is its ancestors."""

    tokens: np.ndarray
    """int32 `[tokens]`."""
    parent: int = -1
    """Index of the parent in the tree, smaller than the own one; -1 for the root."""
    loss_mask: np.ndarray | None = None
    """bool `[tokens]`: which tokens are to be predicted; None means none of them."""
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    """Per-token values, float32 `[tokens]`, or `[terms, tokens]` where the segment belongs to several sequences."""
    sequence: int | tuple[int, ...] = ()
    """The batch's numbers of the sequences that these tokens' losses belong to. A turn shared by three branches
    carries three loss terms, one for each of them."""

    @property
    def sequences(self) -> tuple[int, ...]:
        return (self.sequence,) if isinstance(self.sequence, int) else self.sequence

    @property
    def wanted(self) -> np.ndarray:
        """int64 `[targets of one term]`: which of the tokens are to be predicted."""
        if self.loss_mask is None or not self.sequences:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.loss_mask)


@dataclass(slots=True)
class Tree:
    """One prompt with its completions, a document, or a conversation with branches."""

    segments: list[Segment]
    name: str = ""
    """What errors call it: the sample's uid."""
    size: int | None = None
    """How many samples of a mini-batch it counts for; the number of its sequences when None."""

    @property
    def samples(self) -> int:
        return len(self.sequences) if self.size is None else self.size

    @property
    def sequences(self) -> list[int]:
        """The numbers of its sequences, in order of appearance."""
        return list(dict.fromkeys(number for segment in self.segments for number in segment.sequences))

    def path(self, segment: int) -> list[int]:
        """The segments from the root to the given one."""
        found = [segment]
        while (parent := self.segments[found[-1]].parent) >= 0:
            found.append(parent)
        return found[::-1]

    def check(self) -> None:
        """Raises ValueError where the tree is not one, or a target has no token that could predict it."""
        for index, segment in enumerate(self.segments):
            where = f"segment {index} of sample {self.name!r}"
            if segment.tokens.size == 0:
                raise ValueError(f"{where} has no tokens")
            if not -1 <= segment.parent < index:
                raise ValueError(f"{where} has parent {segment.parent}, expected -1 or an earlier segment")
            if segment.loss_mask is not None and segment.loss_mask.shape != segment.tokens.shape:
                raise ValueError(
                    f"{where} has a loss mask of shape {segment.loss_mask.shape} for {segment.tokens.size} tokens"
                )
            if segment.parent < 0 and segment.wanted.size and segment.wanted[0] == 0:
                raise ValueError(f"{where} wants its first token predicted, but nothing precedes it")
            shapes: list[tuple[int, ...]] = [(len(segment.sequences), segment.tokens.size)]
            if len(segment.sequences) == 1:
                shapes.append((segment.tokens.size,))
            for name, values in segment.fields.items():
                if values.shape not in shapes:
                    raise ValueError(f"{where} has field {name!r} of shape {values.shape}, expected {shapes[-1]}")


def cumulative_bounds(sizes: np.ndarray) -> np.ndarray:
    """int64 `[n + 1]`: where each of n neighbours begins, and the last one ends."""
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    return bounds


def concatenated_ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The numbers from each start on, as many as its size, one after the other: int64 `[sum of sizes]`."""
    return np.repeat(starts - cumulative_bounds(sizes)[:-1], sizes) + np.arange(int(sizes.sum()), dtype=np.int64)


@dataclass
class Forest:
    """Trees by columns."""

    names: list[str]
    """`[trees]`: what errors call each."""
    samples: np.ndarray
    """int64 `[trees]`: how many samples of a mini-batch each counts for."""
    tree: np.ndarray
    """int64 `[segments]`, ascending."""
    parent: np.ndarray
    """int64 `[segments]`: the number of the parent, smaller than the own one; -1 for a root."""
    length: np.ndarray
    """int64 `[segments]`: tokens."""
    tokens: np.ndarray
    """int32 `[tokens of all segments]`."""
    wanted_count: np.ndarray
    """int64 `[segments]`: tokens of it that are to be predicted, of one term."""
    wanted: np.ndarray
    """int64 `[sum of wanted_count]`: which ones, counted within the segment."""
    term_segment: np.ndarray
    """int64 `[terms]`, ascending."""
    term_sequence: np.ndarray
    """int32 `[terms]`."""
    fields: dict[str, np.ndarray]
    """float32 `[targets]` each, by name."""

    @classmethod
    def of(cls, trees: Sequence[Tree]) -> "Forest":
        """Raises ValueError for trees that are none, and for samples of which one has a field that another lacks."""
        for tree in trees:
            tree.check()
        segments = [segment for tree in trees for segment in tree.segments]
        first = cumulative_bounds(np.asarray([len(tree.segments) for tree in trees], np.int64))
        owner = np.repeat(np.arange(len(trees)), np.diff(first))
        parent = np.asarray([segment.parent for segment in segments], np.int64)
        wanted = [segment.wanted for segment in segments]
        terms = [segment.sequences for segment in segments]
        return cls(
            names=[tree.name for tree in trees],
            samples=np.asarray([tree.samples for tree in trees], np.int64),
            tree=owner,
            parent=np.where(parent < 0, -1, parent + first[:-1][owner]),
            length=np.asarray([segment.tokens.size for segment in segments], np.int64),
            tokens=np.concatenate([np.empty(0, np.int32), *(segment.tokens for segment in segments)]).astype(np.int32),
            wanted_count=np.asarray([each.size for each in wanted], np.int64),
            wanted=np.concatenate([np.empty(0, np.int64), *wanted]),
            term_segment=np.repeat(np.arange(len(segments)), [len(each) for each in terms]),
            term_sequence=np.asarray([number for each in terms for number in each], np.int32),
            fields=_target_fields(segments, wanted, [trees[number].name for number in owner.tolist()]),
        )

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Tree]:
        """Each as a tree of its own. Fields are zero where nothing is to be predicted."""
        of_terms = np.split(self.term_sequence, np.searchsorted(self.term_segment, np.arange(1, len(self.tree))))
        first = np.searchsorted(self.tree, np.arange(len(self) + 1))
        for number, name in enumerate(self.names):
            own = range(first[number], first[number + 1])
            yield Tree([self._segment(s, first[number], of_terms[s]) for s in own], name, int(self.samples[number]))

    def _segment(self, number: int, first: int, sequences: np.ndarray) -> Segment:
        size, start = int(self.length[number]), int(self.first_token[number])
        where = self.wanted[self.first_wanted[number] : self.first_wanted[number + 1]]
        mask = np.zeros(size, np.bool_)
        mask[where] = True
        fields = {}
        for name, values in self.fields.items():
            if len(where):
                begin = int(self.target_bounds[np.searchsorted(self.term_segment, number)])
                field = np.zeros((len(sequences), size), np.float32)
                field[:, where] = values[begin : begin + field.shape[0] * len(where)].reshape(len(sequences), -1)
                fields[name] = field[0] if len(sequences) == 1 else field
        parent = int(self.parent[number])
        return Segment(
            self.tokens[start : start + size], parent if parent < 0 else parent - first, mask if len(where) else None,
            fields, int(sequences[0]) if len(sequences) == 1 else tuple(sequences.tolist()),
        )  # fmt: skip

    # --- what follows from the columns

    @cached_property
    def first_token(self) -> np.ndarray:
        """int64 `[segments + 1]`: of each segment, in `tokens`."""
        return cumulative_bounds(self.length)

    @cached_property
    def first_wanted(self) -> np.ndarray:
        """int64 `[segments + 1]`: of each segment, in `resource_requests`."""
        return cumulative_bounds(self.wanted_count)

    @cached_property
    def target_bounds(self) -> np.ndarray:
        """int64 `[terms + 1]`: the numbers of each term's targets."""
        return cumulative_bounds(self.wanted_count[self.term_segment])

    @cached_property
    def tree_bounds(self) -> np.ndarray:
        """int64 `[trees + 1]`: the numbers of each tree's targets."""
        first = np.searchsorted(self.tree[self.term_segment], np.arange(len(self) + 1))
        return self.target_bounds[first]

    @cached_property
    def sequences(self) -> np.ndarray:
        """int32 `[targets]`: the sequence of each."""
        return np.repeat(self.term_sequence, self.wanted_count[self.term_segment])

    @cached_property
    def sequences_of_tree(self) -> np.ndarray:
        """int64 `[trees]`: how many each has."""
        first = np.unique(self.term_sequence, return_index=True)[1]
        return np.bincount(self.tree[self.term_segment[first]], minlength=len(self))

    @cached_property
    def before(self) -> np.ndarray:
        """int64 `[segments]`: tokens of all ancestors."""
        found = np.zeros(len(self.parent), np.int64)
        above = self.parent
        while (deeper := above >= 0).any():
            found += np.where(deeper, self.length[above], 0)
            above = np.where(deeper, self.parent[above], -1)
        return found

    @cached_property
    def ancestor(self) -> np.ndarray:
        """bool `[segments]`: whether something is to be predicted below it."""
        found = np.zeros(len(self.parent), np.bool_)
        at = np.flatnonzero(self.wanted_count)
        while (at := np.unique(self.parent[at][self.parent[at] >= 0])).size:
            found[at] = True
        return found

    def path(self, segment: int) -> list[int]:
        """The segments from the root to the given one."""
        found = [segment]
        while (above := int(self.parent[found[-1]])) >= 0:
            found.append(above)
        return found[::-1]

    def check(self) -> None:
        """Raises ValueError where two trees have the same sequence, or one is not a path."""
        order = np.argsort(self.term_sequence, kind="stable")
        again = np.flatnonzero(np.diff(self.term_sequence[order]) == 0)
        for one, other in zip(order[again].tolist(), order[again + 1].tolist(), strict=True):
            above, below = int(self.term_segment[one]), int(self.term_segment[other])
            sequence, names = int(self.term_sequence[one]), [self.names[self.tree[each]] for each in (above, below)]
            if self.tree[above] != self.tree[below]:
                raise ValueError(f"samples {names[0]!r} and {names[1]!r} both have sequence {sequence}")
            if above not in self.path(below):
                raise ValueError(f"sequence {sequence} of sample {names[0]!r} is not one path of its tree")


def _target_fields(
    segments: Sequence[Segment], wanted: Sequence[np.ndarray], names: Sequence[str]
) -> dict[str, np.ndarray]:
    """By name, of all targets."""
    values: dict[str, list[np.ndarray]] = {
        name: [] for name in sorted({name for segment in segments for name in segment.fields})
    }
    for segment, which, sample in zip(segments, wanted, names, strict=True):
        if which.size:
            for name, parts in values.items():
                if name not in segment.fields:
                    raise ValueError(f"sample {sample!r} has no field {name!r}, which others have")
                parts.append(np.atleast_2d(segment.fields[name])[:, which].ravel())
    return {
        name: np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)
        for name, parts in values.items()
    }
