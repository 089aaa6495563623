"""The training samples of a step as trees, stored as arrays, so that packing needs no object per sample.

A tree consists of segments of tokens, and a sequence is a path from its root to a segment. Sequences with the same
beginning share segments, which are then computed once. Segments are numbered through all trees, ancestors first. A
*term* is a pair of a segment and a sequence that contains it; a *target* is a token of a term that is to be predicted.
Targets are numbered by tree, segment, term and token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lockstep.data.samples import PlacedImage


@dataclass(slots=True)
class Segment:
    """Consecutive tokens that are not cut. Their context are the tokens of the segment's ancestors."""

    tokens: np.ndarray
    """int32 `[tokens]`."""
    parent: int = -1
    """Index of the parent in the tree, smaller than the segment's own; -1 for the root."""
    loss_mask: np.ndarray | None = None
    """bool `[tokens]`: which tokens are targets; None means none."""
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    """Per-token values, float32 `[tokens]`, or `[terms, tokens]` if the segment belongs to several sequences."""
    sequence: int | tuple[int, ...] = ()
    """Numbers (in the batch) of the sequences for which the tokens have a loss. A turn that three sequences share has
    three terms, one for each."""
    images: Sequence[PlacedImage] = ()
    """The images in the segment, with places within the segment."""

    @property
    def sequences(self) -> tuple[int, ...]:
        return (self.sequence,) if isinstance(self.sequence, int) else self.sequence

    @property
    def target_offsets(self) -> np.ndarray:
        """Positions of the tokens to predict within the segment, int64 `[targets of one term]`."""
        if self.loss_mask is None or not self.sequences:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.loss_mask)


def cumulative_bounds(sizes: np.ndarray) -> np.ndarray:
    """Returns where each of n consecutive items begins, and where the last one ends: int64 `[n + 1]`."""
    bounds = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    return bounds


def concatenated_ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Concatenates the ranges `start .. start + size`: int64 `[sum of sizes]`."""
    return np.repeat(starts - cumulative_bounds(sizes)[:-1], sizes) + np.arange(int(sizes.sum()), dtype=np.int64)


@dataclass
class Forest:
    """Trees, stored as arrays over trees, segments, terms and targets."""

    names: list[str]
    """`[trees]`: uid of each tree's sample, for error messages."""
    samples: np.ndarray
    """int64 `[trees]`: as how many samples of a mini-batch each tree counts."""
    tree: np.ndarray
    """int64 `[segments]`: the tree of each segment, ascending."""
    parent: np.ndarray
    """int64 `[segments]`: number of the parent, smaller than the segment's own; -1 for a root."""
    length: np.ndarray
    """int64 `[segments]`: number of tokens."""
    tokens: np.ndarray
    """int32 `[tokens of all segments]`."""
    target_count: np.ndarray
    """int64 `[segments]`: number of targets of one term of the segment."""
    target_offset: np.ndarray
    """int64 `[sum of target_count]`: position of each target within its segment."""
    term_segment: np.ndarray
    """int64 `[terms]`: the segment of each term, ascending."""
    term_sequence: np.ndarray
    """int32 `[terms]`: the sequence of each term."""
    fields: dict[str, np.ndarray]
    """Per-target values, float32 `[targets]` each, by name."""
    images: dict[int, list[PlacedImage]] | None = None
    """The images of each segment that has any, with places within the segment. None means that the data has no images
    at all, `{}` that other steps' samples have some: then the vision tower is called for every row."""

    @classmethod
    def of(
        cls, trees: Sequence[Sequence[Segment]], names: Sequence[str], samples: Sequence[int] | None = None
    ) -> "Forest":
        """Makes a forest of trees, each given as its segments, parents first.

        Args:
            names: name of each tree, for error messages.
            samples: as how many samples of a mini-batch each tree counts; None: the number of its sequences.

        Raises:
            ValueError: segments do not form a tree, a target has no token before it, or a sample lacks a field that
                another sample has.
        """
        for tree, name in zip(trees, names, strict=True):
            _check_tree(tree, name)
        segments = [segment for tree in trees for segment in tree]
        first = cumulative_bounds(np.asarray([len(tree) for tree in trees], np.int64))
        owner = np.repeat(np.arange(len(trees)), np.diff(first))
        parent = np.asarray([segment.parent for segment in segments], np.int64)
        targets = [segment.target_offsets for segment in segments]
        terms = [segment.sequences for segment in segments]
        counts = [_sequence_count(tree) for tree in trees] if samples is None else list(samples)
        return cls(
            names=list(names),
            samples=np.asarray(counts, np.int64),
            tree=owner,
            parent=np.where(parent < 0, -1, parent + first[:-1][owner]),
            length=np.asarray([segment.tokens.size for segment in segments], np.int64),
            tokens=np.concatenate([np.empty(0, np.int32), *(segment.tokens for segment in segments)]).astype(np.int32),
            target_count=np.asarray([each.size for each in targets], np.int64),
            target_offset=np.concatenate([np.empty(0, np.int64), *targets]),
            term_segment=np.repeat(np.arange(len(segments)), [len(each) for each in terms]),
            term_sequence=np.asarray([number for each in terms for number in each], np.int32),
            fields=_target_fields(segments, targets, [names[number] for number in owner.tolist()]),
            images={n: list(each.images) for n, each in enumerate(segments) if each.images} or None,
        )

    def __len__(self) -> int:
        return len(self.names)

    # --- derived arrays

    @cached_property
    def first_token(self) -> np.ndarray:
        """int64 `[segments + 1]`: where each segment begins in `tokens`."""
        return cumulative_bounds(self.length)

    @cached_property
    def first_offset(self) -> np.ndarray:
        """int64 `[segments + 1]`: where each segment begins in `target_offset`."""
        return cumulative_bounds(self.target_count)

    @cached_property
    def target_bounds(self) -> np.ndarray:
        """int64 `[terms + 1]`: where each term's targets begin."""
        return cumulative_bounds(self.target_count[self.term_segment])

    @cached_property
    def tree_bounds(self) -> np.ndarray:
        """int64 `[trees + 1]`: where each tree's targets begin."""
        first = np.searchsorted(self.tree[self.term_segment], np.arange(len(self) + 1))
        return self.target_bounds[first]

    @cached_property
    def sequences(self) -> np.ndarray:
        """int32 `[targets]`: the sequence of each target."""
        return np.repeat(self.term_sequence, self.target_count[self.term_segment])

    @cached_property
    def sequences_of_tree(self) -> np.ndarray:
        """int64 `[trees]`: number of sequences of each tree."""
        first = np.unique(self.term_sequence, return_index=True)[1]
        return np.bincount(self.tree[self.term_segment[first]], minlength=len(self))

    @cached_property
    def depth(self) -> np.ndarray:
        """int64 `[segments]`: number of tokens of all ancestors."""
        depth = np.zeros(len(self.parent), np.int64)
        above = self.parent
        while (deeper := above >= 0).any():
            depth += np.where(deeper, self.length[above], 0)
            above = np.where(deeper, self.parent[above], -1)
        return depth

    @cached_property
    def has_targets_below(self) -> np.ndarray:
        """bool `[segments]`: whether a descendant has a target."""
        found = np.zeros(len(self.parent), np.bool_)
        at = np.flatnonzero(self.target_count)
        while (at := np.unique(self.parent[at][self.parent[at] >= 0])).size:
            found[at] = True
        return found

    @cached_property
    def features(self) -> np.ndarray:
        """int64 `[segments]`: number of features of the images in each segment."""
        found = np.zeros(len(self.parent), np.int64)
        for segment, images in (self.images or {}).items():
            found[segment] = sum(image.places.size for image in images)
        return found

    def path(self, segment: int) -> list[int]:
        """Returns the segments from the root to the given one."""
        found = [segment]
        while (above := int(self.parent[found[-1]])) >= 0:
            found.append(above)
        return found[::-1]

    def check_sequences(self) -> None:
        """Raises ValueError if two trees have the same sequence, or a sequence is not a single path."""
        order = np.argsort(self.term_sequence, kind="stable")
        repeated = np.flatnonzero(np.diff(self.term_sequence[order]) == 0)
        for one, other in zip(order[repeated].tolist(), order[repeated + 1].tolist(), strict=True):
            above, below = int(self.term_segment[one]), int(self.term_segment[other])
            sequence, names = int(self.term_sequence[one]), [self.names[self.tree[each]] for each in (above, below)]
            if self.tree[above] != self.tree[below]:
                raise ValueError(f"samples {names[0]!r} and {names[1]!r} both have sequence {sequence}")
            if above not in self.path(below):
                raise ValueError(f"sequence {sequence} of sample {names[0]!r} is not one path of its tree")


def _check_tree(segments: Sequence[Segment], name: str) -> None:
    """Raises ValueError if the segments do not form a tree, or a target has no token before it."""
    for index, segment in enumerate(segments):
        where = f"segment {index} of sample {name!r}"
        if segment.tokens.size == 0:
            raise ValueError(f"{where} has no tokens")
        if not -1 <= segment.parent < index:
            raise ValueError(f"{where} has parent {segment.parent}, expected -1 or an earlier segment")
        if segment.loss_mask is not None and segment.loss_mask.shape != segment.tokens.shape:
            raise ValueError(
                f"{where} has a loss mask of shape {segment.loss_mask.shape} for {segment.tokens.size} tokens"
            )
        if segment.parent < 0 and segment.target_offsets.size and segment.target_offsets[0] == 0:
            raise ValueError(f"{where} has its first token as a target, but no token precedes it")
        for image in segment.images:
            if image.places.size and not 0 <= image.places[0] <= image.places[-1] < segment.tokens.size:
                span = f"{image.places[0]} to {image.places[-1]}"
                raise ValueError(f"{where} has {segment.tokens.size} tokens, but an image at places {span}")
        shapes: list[tuple[int, ...]] = [(len(segment.sequences), segment.tokens.size)]
        if len(segment.sequences) == 1:
            shapes.append((segment.tokens.size,))
        for field_name, values in segment.fields.items():
            if values.shape not in shapes:
                raise ValueError(f"{where} has field {field_name!r} of shape {values.shape}, expected {shapes[-1]}")


def _sequence_count(segments: Sequence[Segment]) -> int:
    return len({number for segment in segments for number in segment.sequences})


def _target_fields(
    segments: Sequence[Segment], targets: Sequence[np.ndarray], names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Returns each field of all targets, by name."""
    values: dict[str, list[np.ndarray]] = {
        name: [] for name in sorted({name for segment in segments for name in segment.fields})
    }
    for segment, which, sample in zip(segments, targets, names, strict=True):
        if which.size:
            for name, parts in values.items():
                if name not in segment.fields:
                    raise ValueError(f"sample {sample!r} has no field {name!r}, which others have")
                parts.append(np.atleast_2d(segment.fields[name])[:, which].ravel())
    return {
        name: np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)
        for name, parts in values.items()
    }
