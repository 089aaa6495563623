"""What goes to a trainer: packed rows, micro-batches per rank, mini-batches."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from lockstep.data.layout import Layout


@dataclass(slots=True)
class Packed:
    """One micro-batch of one rank: a forest row with the targets that are to be predicted in it.

    A target is a pair: the token at `sources[i]` predicts `targets[i]`. The last token of a prompt is the
    source of the first target of each of its completions.
    """

    tokens: np.ndarray
    """int32 `[tokens]`."""
    lengths: np.ndarray
    """int32 `[segments]`."""
    parents: np.ndarray
    """int32 `[segments]`."""
    sources: np.ndarray
    """int32 `[targets]`: index of a token in this row."""
    targets: np.ndarray
    """int32 `[targets]`: token ids."""
    index: np.ndarray
    """int64 `[targets]`: where the target's value belongs in the flat per-target arrays of the batch; -1 in
    an empty micro-batch."""
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    """Per-target values, float32 `[targets]`. `weight` is always there: the factor of the target's loss, with
    the aggregation and its denominator inside, so that a step's loss is a plain sum over all targets of all
    ranks. GRPO adds `advantage`, `engine_logprob`, and where needed `old_logprob`, `reference_logprob`."""
    sequences: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32 `[targets]`: the batch's number of the sequence that each target belongs to; -1 in an empty
    micro-batch. `pack` always fills it; a row made by hand may leave it empty."""

    @property
    def layout(self) -> Layout:
        return Layout(self.lengths.tolist(), self.parents.tolist())


@dataclass(slots=True)
class Hand:
    """What one rank computes in one optimizer step, on its way to it: the columns of its rows as plain bytes."""

    names: list[str]
    """Of the fields."""
    sizes: bytes
    """int32 `[micro-batches, 3]`: tokens, segments and targets of each."""
    data: bytes
    """int32 tokens, lengths, parents, sources, targets, sequences, then float32 fields: each of all micro-batches."""

    def rows(self) -> list[Packed]:
        """One per micro-batch. What a target's value is called in the batch (`index`) stays with whoever packed it."""
        sizes = np.frombuffer(self.sizes, np.int32).reshape(-1, 3)
        bounds = np.zeros((len(sizes) + 1, 3), np.int64)
        np.cumsum(sizes, axis=0, out=bounds[1:])
        kinds = [*_KINDS, *(_TARGET for _ in self.names)]
        ends = np.cumsum([bounds[-1, kind] for kind in kinds])
        values = np.frombuffer(self.data, np.int32)
        columns = [values[end - bounds[-1, kind] : end] for kind, end in zip(kinds, ends, strict=True)]

        def part(number: int, column: int) -> np.ndarray:
            begin, end = bounds[number : number + 2, kinds[column]]
            return columns[column][begin:end]

        return [
            Packed(
                tokens=part(number, 0),
                lengths=part(number, 1),
                parents=part(number, 2),
                sources=part(number, 3),
                targets=part(number, 4),
                index=np.full(sizes[number, _TARGET], -1, np.int64),
                fields={
                    name: part(number, len(_KINDS) + place).view(np.float32) for place, name in enumerate(self.names)
                },
                sequences=part(number, 5),
            )
            for number in range(len(sizes))
        ]


_TOKEN, _SEGMENT, _TARGET = range(3)
_KINDS = (_TOKEN, _SEGMENT, _SEGMENT, _TARGET, _TARGET, _TARGET)
"""What a column of `Hand.data` has one number for."""


@dataclass
class Rows:
    """The rows of all ranks, one after the other: micro-batch m of rank r is row `r * microbatches + m`. Columns are
    those of `Packed`; row i has the numbers from `bounds[i]` to `bounds[i + 1]`."""

    ranks: int
    microbatches: int
    tokens: np.ndarray
    token_bounds: np.ndarray
    lengths: np.ndarray
    parents: np.ndarray
    segment_bounds: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    index: np.ndarray
    sequences: np.ndarray
    target_bounds: np.ndarray
    fields: dict[str, np.ndarray]

    def row(self, number: int) -> Packed:
        tokens = slice(*self.token_bounds[number : number + 2])
        segments = slice(*self.segment_bounds[number : number + 2])
        targets = slice(*self.target_bounds[number : number + 2])
        return Packed(
            tokens=self.tokens[tokens],
            lengths=self.lengths[segments],
            parents=self.parents[segments],
            sources=self.sources[targets],
            targets=self.targets[targets],
            index=self.index[targets],
            fields={name: values[targets] for name, values in self.fields.items()},
            sequences=self.sequences[targets],
        )

    def hands(self) -> Iterator[Hand]:
        """Of all ranks, in their order."""
        whole = (self.tokens, self.lengths, self.parents, self.sources, self.targets, self.sequences)
        views = [each.data.cast("B") for each in (*whole, *self.fields.values())]
        kinds = [*_KINDS, *(_TARGET for _ in self.fields)]
        bounds = np.stack([self.token_bounds, self.segment_bounds, self.target_bounds])
        sizes = np.diff(bounds).T.astype(np.int32, order="C").data.cast("B")
        names, step = list(self.fields), 12 * self.microbatches
        at = (4 * bounds[:, :: self.microbatches]).T.tolist()
        for rank, (begin, end) in enumerate(pairwise(at)):
            data = b"".join([view[begin[kind] : end[kind]] for view, kind in zip(views, kinds, strict=True)])
            yield Hand(names, bytes(sizes[rank * step : (rank + 1) * step]), data)


@dataclass
class Minibatch:
    """One optimizer step: for each rank the same number of micro-batches."""

    rows: Rows
    targets: int
    """Targets with a loss, over all ranks."""
    sequences: int
    skipped: int = 0
    """Sequences of these that are in no row, because nothing is to be learned from their groups."""

    @property
    def microbatches(self) -> int:
        """Micro-batches of every rank."""
        return self.rows.microbatches

    @cached_property
    def ranks(self) -> list[list[Packed]]:
        """`[ranks][micro-batches]`, as views of the columns."""
        each = range(self.rows.microbatches)
        return [[self.rows.row(rank * len(each) + number) for number in each] for rank in range(self.rows.ranks)]
