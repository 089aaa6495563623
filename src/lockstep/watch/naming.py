"""Names in sentences for people."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def some(items: Sequence[T], most: int, name: Callable[[T], str] = str) -> str:
    """The first few of many: `a, b and 3 more`. Empty where there are none."""
    few = ", ".join(name(each) for each in items[:most])
    return few + (f" and {len(items) - most} more" if len(items) > most else "")
