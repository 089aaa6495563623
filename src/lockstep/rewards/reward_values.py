"""Validates what reward functions return."""

import math
import reprlib
from typing import Any

from lockstep.base.text import count_noun

LARGEST_REWARD = 3.4028234663852886e38
"""The largest float32; rewards are stored in float32."""

_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = 200
_SHORT_REPR.maxlist = _SHORT_REPR.maxtuple = _SHORT_REPR.maxdict = 8


class BadReward(Exception):
    """A term returned no valid reward for the sample at `position`, or for the batch if that is None."""

    def __init__(
        self,
        problem: str,
        position: int | None = None,
        returned: object = ...,
        traceback: str | None = None,
        count: int = 1,
    ) -> None:
        super().__init__(problem)
        self.problem, self.position, self.traceback, self.count = problem, position, traceback, count
        self.returned = None if returned is ... else short_repr(returned)


def short_repr(value: object) -> str:
    """A short `repr` with the type, which never raises."""
    return f"{_SHORT_REPR.repr(value)} ({type(value).__name__})"


def check_reward(value: object, position: int, what: str = "a reward") -> float:
    """Returns the value as a number that is finite in float32. Accepts bool, int, float, and 0-d arrays and tensors.
    Raises BadReward."""
    number = _as_number(value)
    if number is None:
        raise BadReward(
            f"returned {_article(type(value).__name__)} where {what} (a number) is expected", position, value
        )
    if math.isnan(number):
        raise BadReward(f"returned NaN as {what}", position, value)
    if abs(number) > LARGEST_REWARD:
        raise BadReward(f"returned {number} as {what}, which is not finite in float32", position, value)
    return number


def check_rewards(result: object, count: int, none_allowed: bool, what: str = "a reward") -> list[float | None]:
    """Returns the result as one number per sample. Accepts a list, tuple, array or tensor `[samples]` or `[samples,
    1]`. Raises BadReward."""
    values = one_per_sample(result, count)
    numbers: list[float | None] = []
    for position, value in enumerate(values):
        single = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        if single is None and none_allowed:
            numbers.append(None)
        else:
            numbers.append(check_reward(single, position, what))
    return numbers


def one_per_sample(result: object, count: int) -> list[Any]:
    """Returns the result as a list with one item per sample. Raises BadReward."""
    values = _as_list(result)
    if values is None:
        kind = _article(type(result).__name__)
        raise BadReward(f"returned {kind} where a list of {count_noun(count, 'number')} is expected", None, result)
    if len(values) != count:
        raise BadReward(f"returned {count_noun(len(values), 'value')} for {count_noun(count, 'sample')}", None, result)
    return values


def check_extra(value: object) -> float | None:
    """Returns an extra value as a number, or None if it is not a finite number, which is no error."""
    number = _as_number(value)
    return number if number is not None and abs(number) <= LARGEST_REWARD else None


def check_extra_column(value: object, count: int) -> list[float | None] | None:
    """Returns extra values as one number per sample; a single value is repeated. None if there is no number."""
    single = check_extra(value)
    if single is not None:
        return [single] * count
    values = _as_list(value)
    if values is None or len(values) != count:
        return None
    column = [check_extra(each[0] if isinstance(each, list) and len(each) == 1 else each) for each in values]
    return column if any(each is not None for each in column) else None


def _as_number(value: Any) -> float | None:
    """Converts a Python, numpy or torch number. Does not import torch, which many scorers do not need."""
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        item = value.item()
        return float(item) if isinstance(item, bool | int | float) else None
    return None


def _as_list(value: Any) -> list[Any] | None:
    if isinstance(value, list | tuple):
        return list(value)
    if callable(getattr(value, "tolist", None)) and getattr(value, "shape", ()) != ():
        listed: list[Any] = value.tolist()
        return listed
    return None


def _article(noun: str) -> str:
    return "None" if noun == "NoneType" else f"an {noun}" if noun[0] in "aeio" else f"a {noun}"
