"""Finds literal texts of which every match of a regular expression contains at least one, for the prefilter.

The texts come from the parse tree of `re`: those of the most selective part of a sequence, and those of all branches
of an alternation.
"""

import re
from functools import cache
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

MIN_LITERAL_CHARS = 4
"""Shorter literals occur in too many lines."""
_MAX_LITERALS = 256
"""A pattern that needs more literals is rejected: it is a word list, not a signature."""
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
"""Words that are common in healthy logs. A pattern that needs only one of them would make most lines candidates."""


@cache
def required_literals(pattern: str) -> tuple[str, ...]:
    """Returns texts in lower case, of which every match of the pattern contains at least one.

    Raises:
        ValueError: There are no such texts of at least `MIN_LITERAL_CHARS` characters, or too many.
    """
    found = _most_selective(list(parse_pattern(pattern)))
    if not found or min(map(len, found)) < MIN_LITERAL_CHARS:
        raise ValueError(f"contains no text of {MIN_LITERAL_CHARS} or more characters that is part of every match")
    if len(found) > _MAX_LITERALS:
        raise ValueError(f"needs {len(found)} different texts, more than {_MAX_LITERALS}; split it")
    return tuple(sorted(found))


@cache
def parse_pattern(pattern: str) -> Any:
    """Returns the parse tree of a pattern; its `.state.groupdict` has the named groups.

    Parsing is much faster than compiling, which is deferred until a line contains one of the literals.

    Raises:
        ValueError: The pattern is not a regular expression.
    """
    try:
        return parser.parse(pattern)
    except (re.error, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from error


def _most_selective(items: list[Any]) -> frozenset[str]:
    """Returns the most selective literals of a sequence; empty if there are none.

    Neighbouring items with known texts are concatenated: `(?:run|job) (?:is )?done` needs `run done`, `run is done`,
    `job done` or `job is done`, each of which is rarer than its parts.
    """
    choices: list[frozenset[str]] = []
    run = _EMPTY_TEXT
    for op, value in items:
        exact = _exact_texts(op, value)
        if exact and len(run) * len(exact) <= _MAX_COMBINED:
            run = frozenset(before + after for before in run for after in exact)
            continue
        choices += [run, _literals_of_item(op, value)]
        run = exact or _EMPTY_TEXT
    return max((each for each in (*choices, run) if all(each)), key=_selectivity, default=frozenset())


def _exact_texts(op: Any, value: Any) -> frozenset[str]:
    """Returns all texts that an item matches, in lower case; empty if there are too many."""
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
    """Returns all texts that a sequence of items matches, in lower case; empty if there are too many."""
    found = _EMPTY_TEXT
    for op, value in items:
        exact = _exact_texts(op, value)
        if not exact or len(found) * len(exact) > _MAX_COMBINED:
            return frozenset()
        found = frozenset(before + after for before in found for after in exact)
    return found


def _selectivity(literals: frozenset[str]) -> tuple[bool, bool, int, int]:
    """Sort key: literals with a higher key make fewer lines candidates."""
    if not literals:
        return False, False, 0, 0
    shortest = min(map(len, literals))
    common = any(each.strip(" :=[](){}'\"-_.,") in _COMMON_WORDS for each in literals)
    return shortest >= MIN_LITERAL_CHARS, not common, min(12, shortest), -len(literals)


def _literals_of_item(op: Any, value: Any) -> frozenset[str]:
    """Returns the most selective literals of an item; empty if there are none."""
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
