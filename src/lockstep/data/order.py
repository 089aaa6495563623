"""In which order rows are used: a pure function of (seed, epoch), equal on every machine and version."""

from functools import lru_cache

import numpy as np

_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mixed(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): uint64 to uint64, one to one."""
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return np.asarray(values ^ (values >> np.uint64(31)), np.uint64)


def permutation(size: int, *key: int) -> np.ndarray:
    """int64 `[size]`: the numbers below `size` in an order that depends on the key alone.

    Not numpy's own, whose stream may change between versions (NEP 19): a resumed run must find its place.
    """
    state = np.zeros(1, np.uint64)
    for part in key:
        state = _mixed(state + _GOLDEN + np.uint64(part % 2**64))
    return np.argsort(_mixed(state + _GOLDEN * np.arange(1, size + 1, dtype=np.uint64)), kind="stable")


class Order:
    """Which row comes at a position, epoch after epoch.

    Args:
        rows: int `[rows]`, the rows that are used.
        shuffle: a new order in every epoch; as they stand when False.
    """

    def __init__(self, rows: np.ndarray, seed: int, shuffle: bool) -> None:
        if rows.size == 0:
            raise ValueError("an order needs at least one row")
        self.rows, self.seed, self.shuffle = rows, seed, shuffle
        # Two: a step may reach from one epoch into the next.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def _make_epoch(self, epoch: int) -> np.ndarray:
        return self.rows[permutation(self.rows.size, self.seed, epoch)] if self.shuffle else self.rows

    def take(self, start: int, count: int) -> list[tuple[int, int]]:
        """(epoch, row) of `count` positions from `start` on; crosses epochs.

        Raises:
            ValueError: a negative position or count.
        """
        if start < 0 or count < 0:
            raise ValueError(f"cannot take {count} rows at position {start}")
        found = []
        for position in range(start, start + count):
            epoch, place = divmod(position, self.rows.size)
            found.append((epoch, int(self._epoch(epoch)[place])))
        return found


def uid(epoch: int, row: int) -> str:
    return f"{epoch}:{row}"


def parse_uid(text: str) -> tuple[int, int]:
    """(epoch, row) of a uid; ValueError where it is none."""
    epoch, _, row = text.partition(":")
    if not (epoch.isdecimal() and row.isdecimal()):
        raise ValueError(f"{text!r} is not a uid, expected EPOCH:ROW")
    return int(epoch), int(row)
