"""Finds the literal texts that every match of a regular expression contains, for the prefilter.

They come from the parse tree of `re`: of a sequence the most selective part counts, of an alternation all branches
together.
"""

import re
from functools import cache
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MIN_LITERAL_CHARS = 4
"""Shorter literals occur in too many lines."""
_MAX_LITERALS = 256
"""A pattern with more literals is a word list, not a signature."""
_MAX_COMBINED = 64
_MAX_ALTERNATIVES = 3
_EMPTY_TEXT = frozenset([""])
_NEWLINE = 10
"""The prefilter searches single lines, so a literal never contains a newline."""
_WORDS = """
    rank ranks error errors warning warn info debug model step steps loss epoch epochs train training time start started
    run running wait waiting load loading server rollout rollouts generation generate sample samples checkpoint complete
    completed finish finished done exit fail failed state weight weights save saved saving world policy cluster connect
    connected port number timeout timed pid nccl enginecore please require required parameter parameters inference
    building validation exception attempt actor worker workers node nodes host hosts device devices cuda memory tensor
    batch data dataset process processes group torch distributed python file line with from this that while request
    requests token tokens rate learning grad norm reward value values eval test init version config """
_COMMON_WORDS = frozenset(_WORDS.split())
"""Words of healthy logs: a pattern that needs only one of them makes most lines candidates."""


@cache
def required_literals(pattern: str) -> tuple[str, ...]:
    """Lower-case texts of which every match contains at least one.

    Raises:
        ValueError: There are none of at least `MIN_LITERAL_CHARS` characters.
    """
    found = _most_selective(list(parse_pattern(pattern)))
    if not found or min(map(len, found)) < MIN_LITERAL_CHARS:
        raise ValueError(f"holds no text of {MIN_LITERAL_CHARS} or more characters that each match contains")
    if len(found) > _MAX_LITERALS:
        raise ValueError(f"needs {len(found)} different texts, more than {_MAX_LITERALS}; split it")
    return tuple(sorted(found))


@cache
def parse_pattern(pattern: str) -> Any:
    """The parse tree; `.state.groupdict` has the named groups. Parsing is much faster than compiling, which is deferred
    until a line contains one of the literals.

    Raises:
        ValueError: It is not a regular expression.
    """
    try:
        return parser.parse(pattern)
    except (re.error, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from error


def _most_selective(items: list[Any]) -> frozenset[str]:
    """The most selective literals of a sequence; empty if there are none.

    Neighbouring items with known texts are concatenated: `(?:run|job) (?:is )?done` needs `run done`, `run is done`,
    `job done` or `job is done`, each of which is rarer than its parts.
    """
    offers: list[frozenset[str]] = []
    run = _EMPTY_TEXT
    for op, value in items:
        exact = _exact_texts(op, value)
        if exact and len(run) * len(exact) <= _MAX_COMBINED:
            run = frozenset(before + after for before in run for after in exact)
            continue
        offers += [run, _literals_of_item(op, value)]
        run = exact or _EMPTY_TEXT
    return max((each for each in (*offers, run) if all(each)), key=_selectivity, default=frozenset())


def _exact_texts(op: Any, value: Any) -> frozenset[str]:
    """All texts, in lower case, that an item matches, if they are few; else empty."""
    if op is ops.LITERAL:
        return frozenset([chr(value).lower()]) if value < 128 and value != _NEWLINE else frozenset()
    if (
        op is ops.IN
        and len(value) <= _MAX_ALTERNATIVES
        and all(each is ops.LITERAL and code < 128 and code != _NEWLINE for each, code in value)
    ):
        return frozenset(chr(code).lower() for _, code in value)
    if op is ops.AT and value in (ops.AT_BOUNDARY, ops.AT_BEGINNING, ops.AT_END):
        return _EMPTY_TEXT
    if op is ops.SUBPATTERN:
        return _exact_sequence(value[3])
    if op is ops.BRANCH:
        branches = [_exact_sequence(each) for each in value[1]]
        return frozenset().union(*branches) if all(branches) else frozenset()
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT) and value[:2] == (0, 1):
        inside = _exact_sequence(value[2])
        return inside | _EMPTY_TEXT if inside else frozenset()
    return frozenset()


def _exact_sequence(items: Any) -> frozenset[str]:
    found = _EMPTY_TEXT
    for op, value in items:
        exact = _exact_texts(op, value)
        if not exact or len(found) * len(exact) > _MAX_COMBINED:
            return frozenset()
        found = frozenset(before + after for before in found for after in exact)
    return found


def _selectivity(offer: frozenset[str]) -> tuple[bool, bool, int, int]:
    if not offer:
        return False, False, 0, 0
    shortest = min(map(len, offer))
    common = any(each.strip(" :=[](){}'\"-_.,") in _COMMON_WORDS for each in offer)
    return shortest >= MIN_LITERAL_CHARS, not common, min(12, shortest), -len(offer)


def _literals_of_item(op: Any, value: Any) -> frozenset[str]:
    if op is ops.SUBPATTERN:
        return _most_selective(list(value[3]))
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT) and value[0] >= 1:
        return _most_selective(list(value[2]))
    if op is ops.ATOMIC_GROUP:
        return _most_selective(list(value))
    if op is ops.BRANCH:
        branches = [_most_selective(list(each)) for each in value[1]]
        return frozenset().union(*branches) if all(branches) else frozenset()
    return frozenset()
