"""Several datasets as one: their order, and their samples."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.config.data import DatasetConfig, MixtureSource, TrainingDataConfig
from lockstep.config.run_config import DataKind
from lockstep.data.datasets import load_rows
from lockstep.data.images.image_usage import ImageUsage
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.sample_order import EpochOrder, make_uid, random_fractions
from lockstep.data.sample_sources import DatasetSource, Sample, SampleSource
from lockstep.data.source_factory import SourceOptions, open_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

BLOCK = 1024
"""Positions whose order is computed at once."""
_SEED_STRIDE = 0x9E3779B97F4A7C15
"""Between the seeds of the datasets of a mixture, so that datasets of equal length have different orders."""


class WeightedOrder:
    """An order in which each dataset gives a fixed share of the samples, and goes through its own epochs.

    Sample k of a dataset with share w (all shares add up to 1) is at the time (k + u) / w, and the order is that of the
    times. With `shuffle`, u is random in [0, 1), otherwise 1/2. Among the first n positions, a dataset therefore has
    n * w samples up to one more than the number of datasets, and any position is found without those before it.

    Args:
        orders: the order of each dataset, with row numbers that no other has.
        weights: the shares, in any unit.
    """

    def __init__(self, orders: Sequence[EpochOrder], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        self.orders, self.seed, self.shuffle = list(orders), seed, shuffle
        self._shares = np.array(weights, np.float64) / np.sum(np.array(weights, np.float64))
        self._block = lru_cache(maxsize=2)(self._make_block)

    def take(self, start: int, count: int) -> list[tuple[int, int]]:
        """Returns (epoch, row) of `count` positions from `start` on; the epoch is the dataset's.

        Raises:
            ValueError: the position or the count is negative.
        """
        if start < 0 or count < 0:
            raise ValueError(f"cannot take {count} rows at position {start}")
        found: list[tuple[int, int]] = []
        while len(found) < count:
            position = start + len(found)
            first, sources, draws = self._block(self._block_of(position))
            part = slice(position - first, position - first + count - len(found))
            for source, draw in zip(sources[part], draws[part], strict=True):
                found += self.orders[source].take(int(draw), 1)
        return found

    def _block_of(self, position: int) -> int:
        """The block of times that has a position. A block has about `BLOCK` positions."""
        block = position // BLOCK
        while self._drawn_before(block).sum() > position:
            block -= 1
        while self._drawn_before(block + 1).sum() <= position:
            block += 1
        return block

    def _drawn_before(self, block: int) -> np.ndarray:
        """How many samples of each dataset come before a block: int64 `[datasets]`."""
        expected = self._shares * (block * BLOCK)
        whole = np.floor(expected).astype(np.int64)
        offsets = [self._offsets(source, draw, 1)[0] for source, draw in enumerate(whole.tolist())]
        return whole + (np.array(offsets) < expected - whole)

    def _make_block(self, block: int) -> tuple[int, list[int], list[int]]:
        """The first position of a block, and the dataset of each position and the number of its sample."""
        first, last = self._drawn_before(block), self._drawn_before(block + 1)
        sources = np.repeat(np.arange(first.size), last - first)
        draws = np.concatenate([np.arange(one, other) for one, other in zip(first, last, strict=True)])
        spans = enumerate(zip(first.tolist(), last.tolist(), strict=True))
        offsets = np.concatenate([self._offsets(source, start, stop - start) for source, (start, stop) in spans])
        order = np.argsort((draws + offsets) / self._shares[sources], kind="stable")
        return int(first.sum()), sources[order].tolist(), draws[order].tolist()

    def _offsets(self, source: int, start: int, count: int) -> np.ndarray:
        return random_fractions(start, count, self.seed, source) if self.shuffle else np.full(count, 0.5)


class MixedSource(SampleSource[Sample]):
    """The samples of several datasets. Rows are numbered through all of them, so that uids are unique.

    Args:
        sources: the opened datasets, each with its own seed.
        labels: their names in metrics.
        weights: their shares; None to use each row once per epoch.
    """

    def __init__(
        self,
        sources: Sequence[DatasetSource[Sample]],
        labels: Sequence[str],
        weights: Sequence[float] | None,
        seed: int,
        shuffle: bool,
    ) -> None:
        self._sources: tuple[DatasetSource[Sample], ...] = tuple(sources)
        self._labels, self._weights = list(labels), weights
        self._seed, self._shuffle = seed, shuffle
        self._ends = np.cumsum([source.size for source in sources])
        self.dropped = sum(source.dropped for source in sources)
        self._order = self._make_order()

    def _make_order(self) -> EpochOrder | WeightedOrder:
        starts = [int(end) - source.size for end, source in zip(self._ends, self._sources, strict=True)]
        rows = [source.order.rows + start for source, start in zip(self._sources, starts, strict=True)]
        if self._weights is None:
            return EpochOrder(np.concatenate(rows), self._seed, self._shuffle)
        orders = [
            EpochOrder(own, source.order.seed, self._shuffle) for own, source in zip(rows, self._sources, strict=True)
        ]
        return WeightedOrder(orders, self._weights, self._seed, self._shuffle)

    def __len__(self) -> int:
        return sum(len(source) for source in self._sources)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for source in self._sources for name in source.columns))

    @property
    def parts(self) -> tuple[DatasetSource[Sample], ...]:
        return self._sources

    @property
    def image_usage(self) -> ImageUsage:
        return sum((source.image_usage for source in self._sources), ImageUsage())

    def usable_sample(self, row: int, epoch: int = 0) -> Sample | None:
        source, inner = self._find(row)
        found = self._sources[source].usable_sample(inner, epoch)
        return None if found is None else replace(found, uid=make_uid(epoch, row), row=row)

    def record_images(self) -> None:
        for source in self._sources:
            source.record_images()

    def prefetch(self, rows: Sequence[int]) -> None:
        for source, inner in map(self._find, rows):
            self._sources[source].prefetch([inner])

    def counts(self, samples: Sequence[Sample]) -> dict[str, float]:
        found = Counter(self._find(sample.row)[0] for sample in samples)
        return {f"data/{label}": float(found[source]) for source, label in enumerate(self._labels)}

    def sample(self, row: int, epoch: int = 0) -> Sample:
        source, inner = self._find(row)
        return replace(self._sources[source].sample(inner, epoch), uid=make_uid(epoch, row), row=row)

    def hold_out(self, fraction: float) -> list[Sample]:
        """As for one dataset, of each dataset. Any number of the first samples has about the same share of each."""
        found = []
        for source, end in zip(self._sources, self._ends, strict=True):
            held_out = source.hold_out(fraction)
            for place, sample in enumerate(held_out):
                row = int(end) - source.size + sample.row
                found.append(((place + 0.5) / len(held_out), replace(sample, uid=make_uid(0, row), row=row)))
        self._order = self._make_order()
        return [sample for _, sample in sorted(found, key=lambda each: each[0])]

    def _find(self, row: int) -> tuple[int, int]:
        """The dataset of a row, and its number there."""
        source = int(np.searchsorted(self._ends, row, side="right"))
        return source, row - int(self._ends[source]) + self._sources[source].size


def open_training_source(
    kind: DataKind,
    cfg: TrainingDataConfig,
    tokenizer: "Tokenizer",
    seed: int,
    limit: LengthLimit,
    options: SourceOptions,
) -> SampleSource[Any]:
    """Opens the dataset or the mixture of datasets that a run trains on; see `DatasetSource`."""
    if not cfg.mixture:
        return open_source(kind, load_rows(cfg), cfg, tokenizer, seed, limit, options)

    def open_part(index: int, part: DatasetConfig) -> DatasetSource[Any]:
        own = replace(limit, field=f"{limit.field}.mixture.{index}")
        return open_source(kind, load_rows(part), part, tokenizer, seed + (index + 1) * _SEED_STRIDE, own, options)

    sources = [open_part(index, part) for index, part in enumerate(cfg.mixture)]
    labels = [part.shown_label for part in cfg.mixture]
    return MixedSource(sources, labels, mixture_weights(cfg.mixture), seed, cfg.shuffle)


def mixture_weights(mixture: Sequence[MixtureSource]) -> list[float] | None:
    """The weights of a mixture; None if it has none."""
    weights = [part.weight for part in mixture if part.weight is not None]
    return weights or None
