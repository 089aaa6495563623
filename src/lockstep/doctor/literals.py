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
_MOST = 256
"""Literals of one pattern; more is a list of words, not a signature."""
_TOGETHER = 64
_FEW = 3
_NOTHING = frozenset([""])
_NEWLINE = 10
"""The prefilter looks at single lines: a text never goes over the end of one."""
_WORDS = """
    rank ranks error errors warning warn info debug model step steps loss epoch epochs train training time start started
    run running wait waiting load loading server rollout rollouts generation generate sample samples checkpoint complete
    completed finish finished done exit fail failed state weight weights save saved saving world policy cluster connect
    connected port number timeout timed pid nccl enginecore please require required parameter parameters inference
    building validation exception attempt actor worker workers node nodes host hosts device devices cuda memory tensor
    batch data dataset process processes group torch distributed python file line with from this that while request
    requests token tokens rate learning grad norm reward value values eval test init version config """
_COMMON = frozenset(_WORDS.split())
"""Words of healthy logs: a pattern that needs one of them and nothing rarer makes most lines candidates."""


@cache
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
    """Of the texts that a sequence offers those that are the most selective; empty where there are none.

    Neighbours of which all texts are known are put together: `(?:run|job) (?:is )?done` needs `run done`,
    `run is done`, `job done` or `job is done`, each of which is rarer than its parts.
    """
    offers: list[frozenset[str]] = []
    run = _NOTHING
    for op, value in items:
        exact = _exact(op, value)
        if exact and len(run) * len(exact) <= _TOGETHER:
            run = frozenset(before + after for before in run for after in exact)
            continue
        offers += [run, _of(op, value)]
        run = exact or _NOTHING
    return max((each for each in (*offers, run) if all(each)), key=_worth, default=frozenset())


def _exact(op: Any, value: Any) -> frozenset[str]:
    """All texts, in lower case, that an item matches, where these are few; else empty."""
    if op is ops.LITERAL:
        return frozenset([chr(value).lower()]) if value < 128 and value != _NEWLINE else frozenset()
    if (
        op is ops.IN
        and len(value) <= _FEW
        and all(each is ops.LITERAL and code < 128 and code != _NEWLINE for each, code in value)
    ):
        return frozenset(chr(code).lower() for _, code in value)
    if op is ops.AT and value in (ops.AT_BOUNDARY, ops.AT_BEGINNING, ops.AT_END):
        return _NOTHING
    if op is ops.SUBPATTERN:
        return _all_of(value[3])
    if op is ops.BRANCH:
        branches = [_all_of(each) for each in value[1]]
        return frozenset().union(*branches) if all(branches) else frozenset()
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT) and value[:2] == (0, 1):
        inside = _all_of(value[2])
        return inside | _NOTHING if inside else frozenset()
    return frozenset()


def _all_of(items: Any) -> frozenset[str]:
    found = _NOTHING
    for op, value in items:
        exact = _exact(op, value)
        if not exact or len(found) * len(exact) > _TOGETHER:
            return frozenset()
        found = frozenset(before + after for before in found for after in exact)
    return found


def _worth(offer: frozenset[str]) -> tuple[bool, bool, int, int]:
    if not offer:
        return False, False, 0, 0
    shortest = min(map(len, offer))
    common = any(each.strip(" :=[](){}'\"-_.,") in _COMMON for each in offer)
    return shortest >= SHORTEST, not common, min(12, shortest), -len(offer)


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
