"""Which texts a regular expression cannot match without: what the prefilter looks for.

The parse tree of `re` says it: of a sequence the best part counts, of an alternation all branches together.
"""

import re
from functools import cache
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

SHORTEST = 4
"""Characters: shorter literals stand in too many lines."""
_MOST = 64
"""Literals of one pattern; more is a list of words, not a signature."""


def literals(pattern: str) -> tuple[str, ...]:
    """Lower-case texts of which every match contains at least one.

    Raises:
        ValueError: There are none of at least `SHORTEST` characters.
    """
    found = _best(list(parsed(pattern)))
    if not found or min(map(len, found)) < SHORTEST:
        raise ValueError(f"holds no text of {SHORTEST} or more characters that each match contains")
    if len(found) > _MOST:
        raise ValueError(f"needs {len(found)} different texts, more than {_MOST}; split it")
    return tuple(sorted(found))


@cache
def parsed(pattern: str) -> Any:
    """The parse tree; `.state.groupdict` has its named groups. Much quicker than to compile it, which waits until a
    line has one of its literals.

    Raises:
        ValueError: It is no regular expression.
    """
    try:
        return parser.parse(pattern)
    except (re.error, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from error


def _best(items: list[Any]) -> frozenset[str]:
    """Of the texts that a sequence offers those that are the most selective; empty where there are none."""
    offers: list[frozenset[str]] = []
    run = ""
    for op, value in items:
        letter = _letter(op, value)
        if letter:
            run += letter
            continue
        if run:
            offers.append(frozenset([run]))
            run = ""
        offers.append(_of(op, value))
    if run:
        offers.append(frozenset([run]))
    return max(offers, key=_worth, default=frozenset())


def _letter(op: Any, value: Any) -> str:
    """The one character, in lower case, that an item matches; "" where it matches several."""
    if op is ops.LITERAL:
        return chr(value).lower() if value < 128 else ""
    if op is ops.IN and all(each is ops.LITERAL and code < 128 for each, code in value):
        letters = {chr(code).lower() for _, code in value}
        return letters.pop() if len(letters) == 1 else ""
    return ""


def _worth(offer: frozenset[str]) -> tuple[int, int]:
    if not offer:
        return 0, 0
    return min(10, min(map(len, offer))), -len(offer)


def _of(op: Any, value: Any) -> frozenset[str]:
    if op is ops.SUBPATTERN:
        return _best(list(value[3]))
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT) and value[0] >= 1:
        return _best(list(value[2]))
    if op is ops.ATOMIC_GROUP:
        return _best(list(value))
    if op is ops.BRANCH:
        branches = [_best(list(each)) for each in value[1]]
        return frozenset().union(*branches) if all(branches) else frozenset()
    return frozenset()
