"""What is packed: trees of segments, made from rollouts or documents.

A sequence is a path from a root to a segment. Sequences that begin alike share the segments they have in
common, so that these are computed once.
"""

from dataclasses import dataclass, field

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
