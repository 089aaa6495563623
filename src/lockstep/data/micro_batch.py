"""Micro-batches: packed rows with their targets, from the packing plan to the bytes for a rank and the tensors on its
device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.data.forest import Forest, concatenated_ranges, cumulative_bounds
from lockstep.data.packing import PackingPlan
from lockstep.data.row_layout import RowLayout

Array = TypeVar("Array", np.ndarray, Tensor)

Bounds = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Where rows begin and end in columns of tokens, of segments and of targets."""

EncodedMicroBatches = tuple[list[str], bytes, bytes]
"""The micro-batches of one rank on their way to it: names of the fields; int32 `[micro-batches, 3]`, the numbers of
tokens, segments and targets; then each column of all micro-batches, `_COLUMNS` as int32 and the fields as float32."""


@dataclass(slots=True)
class MicroBatch(Generic[Array]):
    """A packed row: a forest of segments with the targets to predict in it. `MicroBatch[np.ndarray]` on the host,
    `MicroBatch[Tensor]` on the device that computes it.

    A target is a pair: the token at `sources[i]` predicts `targets[i]`. The last token of a prompt is the
    source of the first target of each of its completions.
    """

    tokens: Array
    """int32 `[tokens]`; int64 on the device, as all indices there."""
    lengths: np.ndarray
    """int32 `[segments]`; stays on the host."""
    parents: np.ndarray
    """int32 `[segments]`; stays on the host."""
    sources: Array
    """int32 `[targets]`: index of a token in this row."""
    targets: Array
    """int32 `[targets]`: token ids."""
    index: np.ndarray
    """int64 `[targets]`: each target's place in the batch's flat per-target arrays; -1 in an empty micro-batch and
    after the way to a rank. Stays on the host."""
    fields: dict[str, Array] = field(default_factory=dict)
    """Per-target values, float32 `[targets]`. `weight` is always present: the factor of the target's loss, which
    includes the aggregation and its denominator, so that a step's loss is a plain sum over all targets of all
    ranks. GRPO adds `advantage`, `engine_logprob`, and where needed `old_logprob`, `reference_logprob`."""
    sequences: Array | None = None
    """int32 `[targets]`: the number in the batch of each target's sequence, -1 in an empty micro-batch. On the device
    they are numbered from 0 within the row. `pack` always sets it; a row made by hand may leave it out."""

    def layout(self) -> RowLayout:
        """A new layout of the row; it caches masks, so it is made once per forward and released afterwards."""
        return RowLayout(self.lengths.tolist(), self.parents.tolist())

    def to(self: "MicroBatch[np.ndarray]", device: torch.device) -> "MicroBatch[Tensor]":
        """The row as tensors on a device."""

        def indices(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(device, non_blocking=True)

        return MicroBatch(
            tokens=indices(self.tokens),
            lengths=self.lengths,
            parents=self.parents,
            sources=indices(self.sources),
            targets=indices(self.targets),
            index=self.index,
            fields={
                name: torch.from_numpy(values.astype(np.float32)).to(device, non_blocking=True)
                for name, values in self.fields.items()
            },
            sequences=None if self.sequences is None else indices(np.unique(self.sequences, return_inverse=True)[1]),
        )


_TOKEN, _SEGMENT, _TARGET = range(3)
_COLUMNS = {
    "tokens": _TOKEN,
    "lengths": _SEGMENT,
    "parents": _SEGMENT,
    "sources": _TARGET,
    "targets": _TARGET,
    "sequences": _TARGET,
}
"""The int32 columns of a micro-batch that go to a rank, in this order, and what each has one number for."""


@dataclass
class MiniBatch:
    """One optimizer step: the same number of micro-batches for each rank.

    Micro-batch m of rank r is row `r * microbatches + m`. Row i has the values from `bounds[i]` to `bounds[i + 1]` of
    each column.
    """

    columns: MicroBatch[np.ndarray]
    """All rows, concatenated."""
    token_bounds: np.ndarray
    segment_bounds: np.ndarray
    target_bounds: np.ndarray
    ranks: int
    microbatches: int
    """Per rank."""
    targets: int = 0
    """Targets with a loss, over all ranks."""
    sequences: int = 0
    skipped: int = 0
    """Sequences of these that are in no row, because their groups have nothing to learn."""

    @cached_property
    def by_rank(self) -> list[list[MicroBatch[np.ndarray]]]:
        """`[ranks][micro-batches]`, as views of the columns."""
        numbers = range(self.microbatches)
        return [[self.row(rank * self.microbatches + number) for number in numbers] for rank in range(self.ranks)]

    def row(self, number: int) -> MicroBatch[np.ndarray]:
        """One micro-batch, as views of the columns."""
        bounds = (self.token_bounds, self.segment_bounds, self.target_bounds)
        parts = [slice(*each[number : number + 2]) for each in bounds]
        return _map_columns(self.columns, lambda values, kind, _: values[parts[kind]])

    def encode(self) -> Iterator[EncodedMicroBatches]:
        """The micro-batches of each rank as bytes, in the order of ranks; without `index`, which stays here."""
        columns = [*(getattr(self.columns, name) for name in _COLUMNS), *self.columns.fields.values()]
        views = [each.data.cast("B") for each in columns]
        kinds = [*_COLUMNS.values(), *(_TARGET for _ in self.columns.fields)]
        bounds = np.stack([self.token_bounds, self.segment_bounds, self.target_bounds])
        sizes = np.diff(bounds).T.astype(np.int32, order="C").data.cast("B")
        names, step = list(self.columns.fields), 12 * self.microbatches
        at = (4 * bounds[:, :: self.microbatches]).T.tolist()
        for rank, (begin, end) in enumerate(pairwise(at)):
            data = b"".join([view[begin[kind] : end[kind]] for view, kind in zip(views, kinds, strict=True)])
            yield names, bytes(sizes[rank * step : (rank + 1) * step]), data


def decode_micro_batches(encoded: EncodedMicroBatches) -> list[MicroBatch[np.ndarray]]:
    """The micro-batches of a rank, from what `MiniBatch.encode` made of them."""
    names, raw_sizes, data = encoded
    sizes = np.frombuffer(raw_sizes, np.int32).reshape(-1, 3)
    bounds = np.zeros((len(sizes) + 1, 3), np.int64)
    np.cumsum(sizes, axis=0, out=bounds[1:])
    kinds = [*_COLUMNS.values(), *(_TARGET for _ in names)]
    ends = np.cumsum([bounds[-1, kind] for kind in kinds])
    values = np.frombuffer(data, np.int32)
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
            sequences=part(number, 5),
            index=np.full(sizes[number, _TARGET], -1, np.int64),
            fields={name: part(number, len(_COLUMNS) + place).view(np.float32) for place, name in enumerate(names)},
        )
        for number in range(len(sizes))
    ]


def build_mini_batch(plan: PackingPlan, forest: Forest, fields: dict[str, np.ndarray]) -> MiniBatch:
    """The rows of all ranks, as planned.

    Args:
        fields: float32 `[targets]` each, by name.
    """
    order = plan.order()
    count = plan.ranks * plan.microbatches
    row = plan.row[order]
    held = np.diff(plan.first_segment)[order]
    segment = plan.segment[concatenated_ranges(plan.first_segment[:-1][order], held)]
    piece = np.repeat(np.arange(len(order)), held)
    """The piece of each segment, counted in this order."""
    length = forest.length[segment]
    start = cumulative_bounds(length)
    row_of_segment = row[piece]
    token_bounds = cumulative_bounds(np.bincount(row_of_segment, length, count).astype(np.int64))
    # A segment's place among those of its piece, to find parents: pieces have their segments in ascending order.
    key = piece * (len(forest.tree) + 1) + segment
    up = forest.parent[segment]
    parent = np.where(up < 0, -1, np.searchsorted(key, piece * (len(forest.tree) + 1) + up))

    owned = np.diff(plan.first_term)[order]
    term = plan.term[concatenated_ranges(plan.first_term[:-1][order], owned)]
    piece_of_term = np.repeat(np.arange(len(order)), owned)
    source = forest.term_segment[term]
    entry = np.searchsorted(key, piece_of_term * (len(forest.tree) + 1) + source)
    targets = forest.target_count[source]
    offset = forest.target_offset[concatenated_ranges(forest.first_offset[source], targets)]
    begin = start[entry] - token_bounds[row[piece_of_term]]
    above = parent[entry]
    before = start[above] + length[above] - 1 - token_bounds[row[piece_of_term]]  # never used for a root
    sources = np.where(offset == 0, np.repeat(before, targets), np.repeat(begin - 1, targets) + offset)
    index = concatenated_ranges(forest.target_bounds[term], targets)

    if plan.is_path:
        lengths, parents, row_of_part = plan.tokens[order], np.full(len(order), -1), row
    else:
        parts = cumulative_bounds(np.bincount(row_of_segment, minlength=count))
        lengths, row_of_part = length, row_of_segment
        parents = np.where(parent < 0, -1, parent - parts[row_of_segment])
    columns = MicroBatch(
        tokens=forest.tokens[concatenated_ranges(forest.first_token[segment], length)],
        lengths=lengths.astype(np.int32),
        parents=parents.astype(np.int32),
        sources=sources.astype(np.int32),
        targets=forest.tokens[np.repeat(forest.first_token[source], targets) + offset],
        index=index,
        fields={name: values[index] for name, values in fields.items()},
        sequences=forest.sequences[index],
    )
    bounds = (
        token_bounds,
        cumulative_bounds(np.bincount(row_of_part, minlength=count)),
        cumulative_bounds(np.bincount(row[piece_of_term], targets, count).astype(np.int64)),
    )
    columns, bounds = _fill_empty_rows(columns, bounds, np.flatnonzero(np.diff(token_bounds) == 0))
    return MiniBatch(columns, *bounds, plan.ranks, plan.microbatches)


def _fill_empty_rows(
    columns: MicroBatch[np.ndarray], bounds: Bounds, empty: np.ndarray
) -> tuple[MicroBatch[np.ndarray], Bounds]:
    """Gives rows without work one token of weight zero: their rank enters the same collectives as the others."""
    if not empty.size:
        return columns, bounds

    def widened(rows: np.ndarray) -> np.ndarray:
        size = np.diff(rows)
        size[empty] = 1
        return cumulative_bounds(size)

    filler = {"lengths": 1, "parents": -1, "index": -1, "sequences": -1}
    filled = _map_columns(
        columns, lambda values, kind, name: np.insert(values, bounds[kind][empty], filler.get(name, 0))
    )
    tokens, segments, targets = bounds
    return filled, (widened(tokens), widened(segments), widened(targets))


def _map_columns(
    columns: MicroBatch[np.ndarray], change: Callable[[np.ndarray, int, str], np.ndarray]
) -> MicroBatch[np.ndarray]:
    """Each column changed by a function of it, of what it has one number for, and of its name."""
    return MicroBatch(
        tokens=change(columns.tokens, _TOKEN, "tokens"),
        lengths=change(columns.lengths, _SEGMENT, "lengths"),
        parents=change(columns.parents, _SEGMENT, "parents"),
        sources=change(columns.sources, _TARGET, "sources"),
        targets=change(columns.targets, _TARGET, "targets"),
        index=change(columns.index, _TARGET, "index"),
        fields={name: change(values, _TARGET, "field") for name, values in columns.fields.items()},
        sequences=None if columns.sequences is None else change(columns.sequences, _TARGET, "sequences"),
    )
