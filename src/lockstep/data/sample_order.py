"""The order of the rows of a dataset over a run, which is a pure function of (seed, position)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

_SPLITMIX_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SPLITMIX_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's finalizer (Steele, Lea, Flood 2014), a bijection of uint64."""
    values = (values ^ (values >> np.uint64(30))) * _SPLITMIX_FACTORS[0]
    values = (values ^ (values >> np.uint64(27))) * _SPLITMIX_FACTORS[1]
    return np.asarray(values ^ (values >> np.uint64(31)), np.uint64)


def permutation(size: int, *key: int) -> np.ndarray:
    """Returns the numbers below `size` in a random order that depends only on the key: int64 `[size]`.

    numpy's generators are not used, because their output may change between versions (NEP 19), and a resumed run must
    continue in the same order.
    """
    return np.argsort(_random_values(0, size, key), kind="stable")


def random_fractions(start: int, count: int, *key: int) -> np.ndarray:
    """Returns the values from `start` on of a random sequence that depends only on the key: float64 `[count]`, at least
    0 and less than 1."""
    return (_random_values(start, count, key) >> np.uint64(11)) * 2.0**-53


def _random_values(start: int, count: int, key: Sequence[int]) -> np.ndarray:
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _splitmix64(state + _SPLITMIX_INCREMENT + np.uint64(part % 2**64))
    numbers = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return _splitmix64(state + _SPLITMIX_INCREMENT * numbers)


class EpochOrder:
    """The order of the rows over all epochs.

    Args:
        rows: numbers of the rows that are used, int `[rows]`.
        shuffle: whether every epoch has a new random order; otherwise the order is that of `rows`.
    """

    def __init__(self, rows: np.ndarray, seed: int, shuffle: bool) -> None:
        if rows.size == 0:
            raise ValueError("an order needs at least one row")
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        # Two epochs, because a step may use rows of both.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> np.ndarray:
        return self.rows[permutation(self.rows.size, self.seed, epoch)] if self.shuffle else self.rows

    def take(self, start: int, count: int) -> list[tuple[int, int]]:
        """Returns (epoch, row) of `count` positions from `start` on. Crosses epochs.

        Raises:
            ValueError: the position or the count is negative.
        """
        if start < 0 or count < 0:
            raise ValueError(f"cannot take {count} rows at position {start}")
        found = []
        for position in range(start, start + count):
            epoch, place = divmod(position, self.rows.size)
            found.append((epoch, int(self._epoch(epoch)[place])))
        return found


def make_uid(epoch: int, row: int) -> str:
    return f"{epoch}:{row}"


def parse_uid(text: str) -> tuple[int, int]:
    """Returns (epoch, row) of a uid. Raises ValueError if it is not a uid."""
    epoch, _, row = text.partition(":")
    if not (epoch.isdecimal() and row.isdecimal()):
        raise ValueError(f"{text!r} is not a uid, expected EPOCH:ROW")
    return int(epoch), int(row)


class SampleOrder(Protocol):
    """The order of the rows over a whole run."""

    def take(self, start: int, count: int) -> list[tuple[int, int]]:
        """Returns (epoch, row) of `count` positions from `start` on, each pair once in a run."""
