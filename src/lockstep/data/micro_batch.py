"""Micro-batches: packed rows with their targets, from the packing plan to the bytes that go to a rank and the tensors
on its device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from lockstep.data.forest import Forest, concatenated_ranges, cumulative_bounds
from lockstep.data.packing_plan import PackingPlan
from lockstep.data.row_layout import RowLayout


@dataclass(slots=True)
class MicroBatch:
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
    def layout(self) -> RowLayout:
        return RowLayout(self.lengths.tolist(), self.parents.tolist())


@dataclass(slots=True)
class EncodedMicroBatches:
    """What one rank computes in one optimizer step, on its way to it: the columns of its rows as plain bytes."""

    names: list[str]
    """Of the fields."""
    sizes: bytes
    """int32 `[micro-batches, 3]`: tokens, segments and targets of each."""
    data: bytes
    """int32 tokens, lengths, parents, sources, targets, sequences, then float32 fields: each of all micro-batches."""

    def rows(self) -> list[MicroBatch]:
        """One per micro-batch. What a target's value is called in the batch (`index_tensor`) stays with whoever
        packed it."""
        sizes = np.frombuffer(self.sizes, np.int32).reshape(-1, 3)
        bounds = np.zeros((len(sizes) + 1, 3), np.int64)
        np.cumsum(sizes, axis=0, out=bounds[1:])
        kinds = [*_COLUMN_KINDS, *(_TARGET for _ in self.names)]
        ends = np.cumsum([bounds[-1, kind] for kind in kinds])
        values = np.frombuffer(self.data, np.int32)
        columns = [values[end - bounds[-1, kind] : end] for kind, end in zip(kinds, ends, strict=True)]

        def part(number: int, column: int) -> np.ndarray:
            begin, end = bounds[number : number + 2, kinds[column]]
            return columns[column][begin:end]

        return [
            MicroBatch(
                tokens=part(number, 0),
                lengths=part(number, 1),
                parents=part(number, 2),
                sources=part(number, 3),
                targets=part(number, 4),
                index=np.full(sizes[number, _TARGET], -1, np.int64),
                fields={
                    name: part(number, len(_COLUMN_KINDS) + place).view(np.float32)
                    for place, name in enumerate(self.names)
                },
                sequences=part(number, 5),
            )
            for number in range(len(sizes))
        ]


_TOKEN, _SEGMENT, _TARGET = range(3)
_COLUMN_KINDS = (_TOKEN, _SEGMENT, _SEGMENT, _TARGET, _TARGET, _TARGET)
"""What a column of `Hand.data` has one number for."""


@dataclass
class MicroBatchColumns:
    """The rows of all ranks, one after the other: micro-batch m of rank r is row `r * microbatches + m`. Columns are
    those of `MicroBatch`; row i has the numbers from `bounds[i]` to `bounds[i + 1]`."""

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

    def row(self, number: int) -> MicroBatch:
        tokens = slice(*self.token_bounds[number : number + 2])
        segments = slice(*self.segment_bounds[number : number + 2])
        targets = slice(*self.target_bounds[number : number + 2])
        return MicroBatch(
            tokens=self.tokens[tokens],
            lengths=self.lengths[segments],
            parents=self.parents[segments],
            sources=self.sources[targets],
            targets=self.targets[targets],
            index=self.index[targets],
            fields={name: values[targets] for name, values in self.fields.items()},
            sequences=self.sequences[targets],
        )

    def hands(self) -> Iterator[EncodedMicroBatches]:
        """Of all ranks, in their order."""
        whole = (self.tokens, self.lengths, self.parents, self.sources, self.targets, self.sequences)
        views = [each.data.cast("B") for each in (*whole, *self.fields.values())]
        kinds = [*_COLUMN_KINDS, *(_TARGET for _ in self.fields)]
        bounds = np.stack([self.token_bounds, self.segment_bounds, self.target_bounds])
        sizes = np.diff(bounds).T.astype(np.int32, order="C").data.cast("B")
        names, step = list(self.fields), 12 * self.microbatches
        at = (4 * bounds[:, :: self.microbatches]).T.tolist()
        for rank, (begin, end) in enumerate(pairwise(at)):
            data = b"".join([view[begin[kind] : end[kind]] for view, kind in zip(views, kinds, strict=True)])
            yield EncodedMicroBatches(names, bytes(sizes[rank * step : (rank + 1) * step]), data)


@dataclass
class MiniBatch:
    """One optimizer step: for each rank the same number of micro-batches."""

    rows: MicroBatchColumns
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
    def ranks(self) -> list[list[MicroBatch]]:
        """`[ranks][micro-batches]`, as views of the columns."""
        each = range(self.rows.microbatches)
        return [[self.rows.row(rank * len(each) + number) for number in each] for rank in range(self.rows.ranks)]


def build_micro_batches(plan: PackingPlan, forest: Forest, fields: dict[str, np.ndarray]) -> MicroBatchColumns:
    """The rows of all ranks.

    Args:
        fields: float32 `[targets]` each, by name.
    """
    pieces, order = plan.pieces, plan.order()
    count = plan.ranks * plan.microbatches
    row = plan.row[order]
    held = np.diff(pieces.first)[order]
    segment = pieces.segment[concatenated_ranges(pieces.first[:-1][order], held)]
    piece = np.repeat(np.arange(len(order)), held)
    """Of each segment: which piece, counted in this order."""
    length = forest.length[segment]
    start = cumulative_bounds(length)
    row_of_segment = row[piece]
    in_row = cumulative_bounds(np.bincount(row_of_segment, length, count).astype(np.int64))
    # A segment's place among those of its piece, to find parents: pieces have their segments in ascending order.
    key = piece * (len(forest.tree) + 1) + segment
    up = forest.parent[segment]
    parent = np.where(up < 0, -1, np.searchsorted(key, piece * (len(forest.tree) + 1) + up))

    owned = np.diff(pieces.first_term)[order]
    term = pieces.term[concatenated_ranges(pieces.first_term[:-1][order], owned)]
    piece_of_term = np.repeat(np.arange(len(order)), owned)
    source = forest.term_segment[term]
    entry = np.searchsorted(key, piece_of_term * (len(forest.tree) + 1) + source)
    targets = forest.wanted_count[source]
    offset = forest.wanted[concatenated_ranges(forest.first_wanted[source], targets)]
    begin = start[entry] - in_row[row[piece_of_term]]
    above = parent[entry]
    before = start[above] + length[above] - 1 - in_row[row[piece_of_term]]  # of a root it is never taken
    sources = np.where(offset == 0, np.repeat(before, targets), np.repeat(begin - 1, targets) + offset)
    index = concatenated_ranges(forest.target_bounds[term], targets)

    if pieces.path:
        lengths, parents, row_of_part = pieces.tokens[order], np.full(len(order), -1), row
    else:
        parts = cumulative_bounds(np.bincount(row_of_segment, minlength=count))
        lengths, row_of_part = length, row_of_segment
        parents = np.where(parent < 0, -1, parent - parts[row_of_segment])
    rows = MicroBatchColumns(
        ranks=plan.ranks,
        microbatches=plan.microbatches,
        tokens=forest.tokens[concatenated_ranges(forest.first_token[segment], length)],
        token_bounds=in_row,
        lengths=lengths.astype(np.int32),
        parents=parents.astype(np.int32),
        segment_bounds=cumulative_bounds(np.bincount(row_of_part, minlength=count)),
        sources=sources.astype(np.int32),
        targets=forest.tokens[np.repeat(forest.first_token[source], targets) + offset],
        index=index,
        sequences=forest.sequences[index],
        target_bounds=cumulative_bounds(np.bincount(row[piece_of_term], targets, count).astype(np.int64)),
        fields={name: values[index] for name, values in fields.items()},
    )
    return _fill_empty_rows(rows, np.flatnonzero(np.diff(in_row) == 0))


def _fill_empty_rows(rows: MicroBatchColumns, empty: np.ndarray) -> MicroBatchColumns:
    """One token of weight zero in rows without work: a rank without any enters the same collectives as the others."""
    if not empty.size:
        return rows

    def filled(values: np.ndarray, bounds: np.ndarray, one: int) -> np.ndarray:
        return np.insert(values, bounds[empty], one)

    def wider(bounds: np.ndarray) -> np.ndarray:
        size = np.diff(bounds)
        size[empty] = 1
        return cumulative_bounds(size)

    tokens, segments, targets = rows.token_bounds, rows.segment_bounds, rows.target_bounds
    return MicroBatchColumns(
        ranks=rows.ranks,
        microbatches=rows.microbatches,
        tokens=filled(rows.tokens, tokens, 0),
        token_bounds=wider(tokens),
        lengths=filled(rows.lengths, segments, 1),
        parents=filled(rows.parents, segments, -1),
        segment_bounds=wider(segments),
        sources=filled(rows.sources, targets, 0),
        targets=filled(rows.targets, targets, 0),
        index=filled(rows.index, targets, -1),
        sequences=filled(rows.sequences, targets, -1),
        target_bounds=wider(targets),
        fields={name: filled(values, targets, 0) for name, values in rows.fields.items()},
    )


@dataclass(slots=True)
class DeviceMicroBatch:
    """One packed row as tensors."""

    tokens: Tensor
    """int64 `[tokens]`."""
    layout: RowLayout
    sources: Tensor
    """int64 `[targets]`."""
    targets: Tensor
    """int64 `[targets]`."""
    fields: dict[str, Tensor]
    """float32 `[targets]` each."""
    sequences: Tensor | None = None
    """int64 `[targets]`: equal for targets of the same sequence, numbered from 0 in this row; None where the packed
    row does not say."""

    @classmethod
    def of(cls, packed: MicroBatch, device: torch.device) -> Self:
        def whole(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(device, non_blocking=True)

        return cls(
            tokens=whole(packed.tokens),
            layout=packed.layout,
            sources=whole(packed.sources),
            targets=whole(packed.targets),
            fields={
                name: torch.from_numpy(values.astype(np.float32)).to(device, non_blocking=True)
                for name, values in packed.fields.items()
            },
            sequences=whole(np.unique(packed.sequences, return_inverse=True)[1]) if packed.sequences.size else None,
        )
