"""The metrics of a run in memory: columns that grow with it, and curves reduced to as many points as a page draws."""

import json
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

_UNITS = (("tokens_per_s", "tokens/s"), ("_per_s", "1/s"), ("_s", "s"), ("_bytes", "bytes"), ("_gib", "GiB"))


@dataclass(slots=True)
class _Column:
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))


class MetricHistory:
    """The values of each metric by step, without rows of steps that lack it. Steps only grow: rows that are read again
    are removed first with `forget_from`."""

    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}

    @property
    def size(self) -> int:
        """Bytes of all columns. Any thread may ask, also while another one adds values."""
        return sum(16 * len(column.steps) for column in list(self._columns.values()))

    @property
    def names(self) -> list[str]:
        return [name for name, column in self._columns.items() if column.steps]

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds values of a step. A step that a column has already, or that is earlier than its last, is left out."""
        columns = self._columns
        for name, value in values.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = _Column()
            steps = column.steps
            if not steps or step > steps[-1]:
                with suppress(TypeError, OverflowError):  # no number, in a ledger that somebody else wrote
                    column.values.append(value)
                    steps.append(step)

    def forget_from(self, step: int) -> None:
        """Removes the values of this step and of later ones."""
        for column in self._columns.values():
            first = len(column.steps)
            while first and column.steps[first - 1] >= step:
                first -= 1
            del column.steps[first:], column.values[first:]
        self._columns = {name: column for name, column in self._columns.items() if column.steps}

    def since(self, step: int) -> dict[int, dict[str, float]]:
        """The values of all later steps than this one, by step."""
        found: dict[int, dict[str, float]] = {}
        for name, column in self._columns.items():
            for place in range(bisect_right(column.steps, step), len(column.steps)):
                found.setdefault(column.steps[place], {})[name] = column.values[place]
        return dict(sorted(found.items()))

    def arrays(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The steps (int64 `[n]`) and the values (float64 `[n]`) of a metric, empty if no step has it."""
        column = self._columns.get(name) or _Column()
        return np.array(column.steps, np.int64), np.array(column.values, np.float64)

    def curve(self, name: str, first: int | None, last: int | None, points: int) -> dict[str, list[Any]] | None:
        """A metric's curve as JSON, reduced to `points` points; None if no step has it.

        Args:
            first, last: the steps at the ends, both included; None for the ends of the run.
        """
        steps, values = self.arrays(name)
        if not len(steps):
            return None
        begin = 0 if first is None else int(np.searchsorted(steps, first, "left"))
        end = len(steps) if last is None else int(np.searchsorted(steps, last, "right"))
        return reduced_curve(steps[begin:end], values[begin:end], points)


def reduced_curve(steps: np.ndarray, values: np.ndarray, points: int) -> dict[str, list[Any]]:
    """Divides a curve into at most `points` buckets of neighbouring steps: for each its middle step, and the mean, the
    least and the greatest value, so that no spike is lost.

    A bucket with an infinity shows it as its end; one with a value that is no number shows that as its mean.

    Args:
        steps: int64 `[n]`, ascending.
        values: float64 `[n]`.
    """
    count = len(steps)
    if count <= points:
        shown = json_numbers(values)
        return {"steps": steps.tolist(), "values": shown, "low": shown, "high": shown}
    starts = np.arange(points, dtype=np.int64) * count // points
    sizes = np.diff(np.append(starts, count))
    nan = np.isnan(values)
    known = np.maximum.reduceat((~nan).astype(np.int64), starts) > 0
    low = np.where(known, np.minimum.reduceat(np.where(nan, np.inf, values), starts), np.nan)
    high = np.where(known, np.maximum.reduceat(np.where(nan, -np.inf, values), starts), np.nan)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.add.reduceat(values, starts) / sizes
    return {
        "steps": steps[starts + sizes // 2].tolist(),
        "values": json_numbers(mean),
        "low": json_numbers(low),
        "high": json_numbers(high),
    }


def json_numbers(values: np.ndarray) -> list[Any]:
    """The values with seven digits, and those that JSON lacks as `nan`, `inf` and `-inf`."""
    finite = np.isfinite(values)
    found: list[Any] = [float(f"{value:.7g}") for value in values.tolist()]
    for index in np.flatnonzero(~finite).tolist():
        found[index] = json_number(found[index])
    return found


def json_number(value: float) -> float | str:
    """The value, or its name if JSON lacks it."""
    if value != value:
        return "nan"
    return value if abs(value) != float("inf") else "inf" if value > 0 else "-inf"


def json_bytes(content: Any) -> bytes:
    """The content as one line of JSON, whatever a run has in its texts."""
    try:
        return msgspec.json.encode(content)
    except (UnicodeEncodeError, TypeError):  # halves of surrogate pairs, keys of other types
        return json.dumps(content, default=str).encode()


def metric_facts(name: str) -> dict[str, str]:
    """The name of a metric with the group that a page lists it in, and its unit if the name says so."""
    group = name.partition("/")[0] if "/" in name else "other"
    unit = next((unit for ending, unit in _UNITS if name.endswith(ending)), None)
    return {"name": name, "group": group} | ({"unit": unit} if unit else {})
