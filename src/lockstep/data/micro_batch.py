"""Builds micro-batches (packed rows with their targets) from a packing plan, and encodes them to be sent to ranks."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from lockstep.data.arrangement.placed_segments import place_segments
from lockstep.data.forest import Forest, concatenated_ranges, cumulative_bounds
from lockstep.data.packing import PackingPlan
from lockstep.data.row_layout import RowLayout
from lockstep.data.samples import PlacedImage

Array = TypeVar("Array", np.ndarray, Tensor)

Bounds = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Bounds of the rows in the columns of tokens, segments and targets."""

EncodedMicroBatches = tuple[list[str], int, dict[int, int], np.ndarray]
"""The encoded micro-batches of one rank: names of the fields; the number of micro-batches; the columns that are sent as
runs (a place in `_COLUMNS` and then the fields) with the increment in their runs; uint8 `[bytes]`. The bytes are the
numbers of tokens, segments and targets as int32 `[micro-batches, 3]`, the number of runs of each column of runs as
int32, each column of all micro-batches (`_COLUMNS` as int32 and the fields as float32; of runs int32 `[runs, 2]`, the
first value, whose bits are those of the float, and the length), and the images of each micro-batch as JSON if the data
has any."""


@dataclass(slots=True)
class MicroBatch(Generic[Array]):
    """A packed row: segments that form trees, and the targets to predict in them. `MicroBatch[np.ndarray]` on the host,
    `MicroBatch[Tensor]` on a rank's device.

    A target is a pair: the token at `sources[i]` predicts `targets[i]`. The last token of a prompt is the
    source of the first target of each of its completions.
    """

    tokens: Array
    """int32 `[tokens]`. On the device, this and all indices are int64."""
    lengths: np.ndarray
    """int32 `[segments]`. Always on the host."""
    parents: np.ndarray
    """int32 `[segments]`. Always on the host."""
    sources: Array
    """int32 `[targets]`: index of a token in this row."""
    targets: Array
    """int32 `[targets]`: token ids."""
    index: np.ndarray
    """int64 `[targets]`: index of each target in the per-target arrays of the batch; -1 in an empty micro-batch, and on
    ranks, which do not get it. Always on the host."""
    fields: dict[str, Array] = field(default_factory=dict)
    """Per-target values, float32 `[targets]`. `weight`, the factor of the target's loss, is always present. It includes
    the aggregation and its denominator, so that a step's loss is a sum over all targets of all ranks. GRPO adds
    `advantage`, `engine_logprob`, and if needed `old_logprob` and `reference_logprob`."""
    sequences: Array | None = None
    """int32 `[targets]`: number of each target's sequence in the batch; -1 in an empty micro-batch. On the device,
    sequences are numbered from 0 within the row. `pack` always sets it."""
    images: list[PlacedImage] | None = None
    """The images of the row, with places in the row; None if no row of the batch has any."""

    def layout(self) -> RowLayout:
        """Returns a new layout of the row. It caches masks, so make one per forward and release it afterwards."""
        return RowLayout(self.lengths.tolist(), self.parents.tolist())

    def to(self: "MicroBatch[np.ndarray]", device: torch.device) -> "MicroBatch[Tensor]":
        """Copies the row to a device, as tensors."""

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
            images=self.images,
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
"""The int32 columns of a micro-batch that are sent to a rank, in this order, and whether they have one value per token,
segment or target."""


@dataclass
class MiniBatch:
    """The data of one optimizer step: the same number of micro-batches for each rank.

    Micro-batch m of rank r is row `r * microbatches + m`. Row i has the values `bounds[i]` to `bounds[i + 1]` of each
    column.
    """

    columns: MicroBatch[np.ndarray]
    """All rows, concatenated."""
    token_bounds: np.ndarray
    segment_bounds: np.ndarray
    target_bounds: np.ndarray
    ranks: int
    microbatches: int
    """Number of micro-batches per rank."""
    targets: int = 0
    """Number of targets with a loss, over all ranks."""
    sequences: int = 0
    skipped: int = 0
    """Number of sequences that are in no row, because their groups have no gradient."""
    images: list[list[PlacedImage]] | None = None
    """The images of each row, with places in the row; None if the data has none."""
    cost: np.ndarray = field(default_factory=lambda: np.empty(0))
    """float64 `[ranks]`: the planned cost of each rank's rows in units of one token (`PackingPlan.cost`); empty if the
    rows were spread over other ranks."""

    @property
    def tokens_of_ranks(self) -> np.ndarray:
        """int64 `[ranks]`: the tokens of each rank's rows."""
        return np.diff(self.token_bounds[:: self.microbatches])

    @cached_property
    def by_rank(self) -> list[list[MicroBatch[np.ndarray]]]:
        """Returns `[ranks][micro-batches]`, as views of the columns."""
        numbers = range(self.microbatches)
        return [[self.row(rank * self.microbatches + number) for number in numbers] for rank in range(self.ranks)]

    def row(self, number: int) -> MicroBatch[np.ndarray]:
        """Returns one micro-batch, as views of the columns."""
        bounds = (self.token_bounds, self.segment_bounds, self.target_bounds)
        parts = [slice(*each[number : number + 2]) for each in bounds]
        row = _map_columns(self.columns, lambda values, kind, _: values[parts[kind]])
        row.images = None if self.images is None else self.images[number]
        return row

    def spread(self, ranks: int) -> "MiniBatch":
        """Returns the same rows for another number of ranks, in the order in which these ranks compute them. Every rank
        gets the same number; if there are not enough, the last ones are empty."""
        if ranks == self.ranks:
            return self
        rows = np.arange(self.ranks * self.microbatches).reshape(self.ranks, -1).T.ravel()
        each = -(-rows.size // ranks)
        order = np.full(ranks * each, -1)
        order[: rows.size] = rows
        order = order.reshape(each, ranks).T.ravel()
        filled = order >= 0
        bounds = self.token_bounds, self.segment_bounds, self.target_bounds
        sizes = [np.where(filled, np.diff(begins)[order], 0) for begins in bounds]
        taken = [concatenated_ranges(begins[order], size) for begins, size in zip(bounds, sizes, strict=True)]
        columns = _map_columns(self.columns, lambda values, kind, _: values[taken[kind]])
        tokens, segments, targets = map(cumulative_bounds, sizes)
        columns, bounds = _fill_empty_rows(columns, (tokens, segments, targets), np.flatnonzero(~filled))
        own = self.images
        images = None if own is None else [own[row] if row >= 0 else [] for row in order.tolist()]
        return MiniBatch(columns, *bounds, ranks, each, self.targets, self.sequences, self.skipped, images)

    def encode(self) -> "EncodedRanks":
        """Encodes the micro-batches of all ranks, without `index`."""
        columns = [*(getattr(self.columns, name) for name in _COLUMNS), *self.columns.fields.values()]
        kinds = [*_COLUMNS.values(), *(_TARGET for _ in self.columns.fields)]
        bounds = np.stack([self.token_bounds, self.segment_bounds, self.target_bounds])
        heads = np.diff(bounds).T.astype(np.int32, order="C").reshape(self.ranks, -1)
        edges = list(4 * bounds[kinds, :: self.microbatches])
        increments: dict[int, int] = {}
        for at, (values, kind) in enumerate(zip(columns, kinds, strict=True)):
            increment = int(at < len(_COLUMNS) and list(_COLUMNS)[at] == "sources")
            found = _runs(values.view(np.int32), increment, bounds[kind, :: self.microbatches])
            if found is not None:
                increments[at] = increment
                columns[at], counts = found
                edges[at] = 8 * cumulative_bounds(counts)
                heads = np.column_stack([heads, counts.astype(np.int32)])
        columns.insert(0, np.ascontiguousarray(heads))
        edges.insert(0, 4 * heads.shape[1] * np.arange(self.ranks + 1))
        if self.images is not None:
            images = [json.dumps(rows).encode() for rows in self._images_of_ranks(self.images)]
            columns.append(np.frombuffer(b"".join(images), np.uint8))
            edges.append(cumulative_bounds(np.asarray(list(map(len, images)))))
        views = [each.data.cast("B") for each in columns]
        return EncodedRanks((list(self.columns.fields), self.microbatches, increments), views, np.stack(edges))

    def _images_of_ranks(self, images: list[list[PlacedImage]]) -> Iterator[list[list[dict[str, Any]]]]:
        for begin in range(0, len(images), self.microbatches):
            yield [[image.to_json() for image in row] for row in images[begin : begin + self.microbatches]]


@dataclass(frozen=True, slots=True)
class EncodedRanks(Sequence[EncodedMicroBatches]):
    """The encoded micro-batches of all ranks: rank i has `columns[c][bounds[c, i] : bounds[c, i + 1]]` of each column
    c."""

    shared: tuple[list[str], int, dict[int, int]]
    """What is the same for all ranks, see `EncodedMicroBatches`."""
    columns: list[memoryview]
    bounds: np.ndarray
    """int64 `[columns, ranks + 1]`, in bytes."""

    def __len__(self) -> int:
        return int(self.bounds.shape[1]) - 1

    @overload
    def __getitem__(self, index: int) -> EncodedMicroBatches: ...
    @overload
    def __getitem__(self, index: slice) -> list[EncodedMicroBatches]: ...
    def __getitem__(self, index: int | slice) -> EncodedMicroBatches | list[EncodedMicroBatches]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        edges = self.bounds[:, number : number + 2].tolist()
        data = bytearray().join(column[slice(*each)] for column, each in zip(self.columns, edges, strict=True))
        return *self.shared, np.frombuffer(data, np.uint8)


def _runs(values: np.ndarray, increment: int, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The runs of a column, int32 `[runs, 2]`, and how many of them each rank has; None if they would not be much
    shorter than the column. In a run each value is that before it plus `increment`.

    Args:
        values: int32 `[values]`, of all ranks.
        bounds: where the values of each rank begin, and the last end. No run goes beyond one.
    """
    begins = np.empty(len(values), np.bool_)
    sample = values[:_RUNS_SAMPLE]
    if 4 * np.count_nonzero(np.diff(sample) != increment) > len(sample) or not len(values):
        return None
    np.not_equal(values[1:] - increment if increment else values[1:], values[:-1], out=begins[1:])
    begins[0] = True
    begins[bounds[:-1][bounds[:-1] < len(values)]] = True
    places = np.flatnonzero(begins)
    if 4 * len(places) > len(values):
        return None
    runs = np.empty((len(places), 2), np.int32)
    runs[:, 0] = values[places]
    runs[:, 1] = np.diff(places, append=len(values))
    return runs, np.diff(np.searchsorted(places, bounds))


_RUNS_SAMPLE = 4096
"""A column whose first values are not runs is sent as it is."""


def _expand(runs: np.ndarray, increment: int) -> np.ndarray:
    """The column, int32 `[values]`, whose runs these are."""
    values = np.repeat(runs[:, 0], runs[:, 1])
    if increment:
        ends = np.cumsum(runs[:, 1])
        values += np.arange(len(values), dtype=np.int32) - np.repeat(ends - runs[:, 1], runs[:, 1]).astype(np.int32)
    return values


def decode_micro_batches(encoded: EncodedMicroBatches) -> list[MicroBatch[np.ndarray]]:
    """Decodes the micro-batches of a rank that `MiniBatch.encode` encoded."""
    names, count, increments, data = encoded
    numbers = data[: 4 * (3 * count + len(increments))].view(np.int32)
    sizes, runs = numbers[: 3 * count].reshape(-1, 3), dict(zip(increments, numbers[3 * count :].tolist(), strict=True))
    bounds = np.zeros((len(sizes) + 1, 3), np.int64)
    np.cumsum(sizes, axis=0, out=bounds[1:])
    kinds = [*_COLUMNS.values(), *(_TARGET for _ in names)]
    at, columns = numbers.nbytes, []
    for place, kind in enumerate(kinds):
        size = 2 * runs[place] if place in runs else int(bounds[-1, kind])
        values = data[at : at + 4 * size].view(np.int32)
        at += 4 * size
        columns.append(_expand(values.reshape(-1, 2), increments[place]) if place in runs else values)
    images = json.loads(data[at:].tobytes()) if at < data.size else None

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
            images=None if images is None else [PlacedImage.from_json(image) for image in images[number]],
        )
        for number in range(len(sizes))
    ]


def build_mini_batch(plan: PackingPlan, forest: Forest, fields: dict[str, np.ndarray]) -> MiniBatch:
    """Builds the rows of all ranks according to the plan.

    Args:
        fields: per-target values of the forest, float32 `[targets]` each, by name.
    """
    order = plan.order()
    count = plan.ranks * plan.microbatches
    row = plan.row[order]
    placed = place_segments(plan, forest, order)

    term_counts = np.diff(plan.first_term)[order]
    term = plan.term[concatenated_ranges(plan.first_term[:-1][order], term_counts)]
    piece_of_term = np.repeat(np.arange(len(order)), term_counts)
    source = forest.term_segment[term]
    entry = np.searchsorted(placed.key, piece_of_term * (len(forest.tree) + 1) + source)
    targets = forest.target_count[source]
    offset = forest.target_offset[concatenated_ranges(forest.first_offset[source], targets)]
    row_begin = placed.token_bounds[row[piece_of_term]]
    begin = placed.start[entry] - row_begin
    parent = placed.parent[entry]
    before = placed.start[parent] + placed.length[parent] - 1 - row_begin  # never used for a root
    sources = np.where(offset == 0, np.repeat(before, targets), np.repeat(begin - 1, targets) + offset)
    index = concatenated_ranges(forest.target_bounds[term], targets)

    if plan.is_path:
        lengths, parents, row_of_part = plan.tokens[order], np.full(len(order), -1), row
    else:
        parts = cumulative_bounds(np.bincount(placed.row, minlength=count))
        lengths, row_of_part = placed.length, placed.row
        parents = np.where(placed.parent < 0, -1, placed.parent - parts[placed.row])
    columns = MicroBatch(
        tokens=forest.tokens[concatenated_ranges(forest.first_token[placed.segment], placed.length)],
        lengths=lengths.astype(np.int32),
        parents=parents.astype(np.int32),
        sources=sources.astype(np.int32),
        targets=forest.tokens[np.repeat(forest.first_token[source], targets) + offset],
        index=index,
        fields={name: values[index] for name, values in fields.items()},
        sequences=forest.sequences[index],
    )
    bounds = (
        placed.token_bounds,
        cumulative_bounds(np.bincount(row_of_part, minlength=count)),
        cumulative_bounds(np.bincount(row[piece_of_term], targets, count).astype(np.int64)),
    )
    columns, bounds = _fill_empty_rows(columns, bounds, np.flatnonzero(np.diff(placed.token_bounds) == 0))
    images = None
    if forest.images is not None:
        begins = placed.start[:-1] - placed.token_bounds[placed.row]
        images = _images_of_rows(forest.images, placed.segment, placed.row, begins, count)
    cost = np.bincount(plan.row // plan.microbatches, plan.cost, plan.ranks)
    return MiniBatch(columns, *bounds, plan.ranks, plan.microbatches, images=images, cost=cost)


def _images_of_rows(
    images: dict[int, list[PlacedImage]], segment: np.ndarray, row: np.ndarray, begin: np.ndarray, count: int
) -> list[list[PlacedImage]]:
    """The images of each of `count` rows, in the order of their places.

    Args:
        segment: the segments of all rows, in the order of their tokens; `row` and `begin`: the row of each, and where
            it begins there.
    """
    found: list[list[PlacedImage]] = [[] for _ in range(count)]
    for at in np.flatnonzero(np.isin(segment, list(images))).tolist():
        found[row[at]] += [image.moved(int(begin[at])) for image in images[int(segment[at])]]
    return found


def _fill_empty_rows(
    columns: MicroBatch[np.ndarray], bounds: Bounds, empty: np.ndarray
) -> tuple[MicroBatch[np.ndarray], Bounds]:
    """Gives empty rows one token of weight zero, so that their rank enters the same collectives as the others."""
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
    """Applies `change(column, kind, name)` to each column. The kind is _TOKEN, _SEGMENT or _TARGET."""
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
