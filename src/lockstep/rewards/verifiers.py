"""Verifiable rewards, each a pure function of one completion (and its answer).

Patterns come from users and expressions from a model, so any of these functions may take forever. `math_equal` has a
time limit. A regular expression that backtracks without end can only be stopped by killing the process, which the
scorer pool does (`reward.timeout_s`).
"""

import math
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

MATH_LIMIT_S = 3.0
"""Time limit for parsing and comparing one pair of expressions. Pairs that are undecided by then score 0."""


class UnreadableAnswer(ValueError):
    """The ground truth cannot be parsed as an expression."""

    def __init__(self, answer: str, why: str) -> None:
        super().__init__(f"the answer {answer!r} {why}; give the row a mathematical answer or use kind: exact_match")
        self.answer, self.why = answer, why


class _OutOfTime(BaseException):
    """The time limit was exceeded. Not an Exception, because math-verify and sympy catch these."""


def exact_match(completion: str, answer: object, ignore_case: bool = False, extract: str | None = None) -> float:
    """1 if the stripped completion equals the stripped answer (its `str`), else 0.

    With `extract`, the last match of that pattern (its group 1 if it has one) is compared instead of the whole
    completion; no match scores 0.
    """
    extracted = completion if extract is None else last_match(extract, completion)
    if extracted is None:
        return 0.0
    given, expected = extracted.strip(), str(answer).strip()
    if ignore_case:
        given, expected = given.casefold(), expected.casefold()
    return float(given == expected)


def last_match(pattern: str, text: str) -> str | None:
    """The last match of the pattern in the text: group 1 if the pattern has groups (None if it did not match)."""
    last: str | None = None
    for match in re.finditer(pattern, text):
        last = match.group(1) if match.re.groups else match.group()
    return last


def regex_match(completion: str, pattern: str, mode: Literal["search", "fullmatch"] = "fullmatch") -> float:
    """1 if the pattern spans the whole completion (`fullmatch`) or is found in it (`search`), else 0."""
    match = re.fullmatch if mode == "fullmatch" else re.search
    return float(match(pattern, completion) is not None)


def overlong_penalty(length: int, soft: int, hard: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13) of a completion of `length` tokens, the end
    token included. With L_max = `hard` and L_cache = `hard - soft`:

        0                           length <= L_max - L_cache
        (L_max - L_cache - length) / L_cache      between
        -1                          length > L_max
    """
    if length <= soft:
        return 0.0
    if length > hard:
        return -1.0
    return (soft - length) / (hard - soft)


def math_equal(completion: str, answer: object, tolerance: float | None = None) -> float | None:
    """1 if the last expression of the completion equals the answer (math-verify), 0 if it does not or there is none,
    None if this could not be decided within MATH_LIMIT_S.

    If both sides are plain numbers and a `tolerance` is given, it alone decides:
    `|value - answer| <= tolerance * max(1, |answer|)`. Raises UnreadableAnswer if the answer is no expression.
    """
    # math-verify's own limits are whole seconds per parse and per pair, with an alarm signal that it does not restore.
    # They are off, and one limit applies to everything.
    from math_verify import parse, verify

    gold = _parse_answer(str(answer))
    try:
        with _time_limit(MATH_LIMIT_S):
            given = parse(completion, parsing_timeout=None)
            if tolerance is not None:
                pair = _plain_numbers(gold, given)
                if pair is not None:
                    return float(abs(pair[0] - pair[1]) <= tolerance * max(1.0, abs(pair[0])))
            return float(verify(gold, given, timeout_seconds=None))
    except _OutOfTime:
        return None


@lru_cache(maxsize=4096)
def _parse_answer(answer: str) -> list[Any]:
    """Parses the answer's expressions; cached, because a group has the same answer. math-verify finds LaTeX only
    between dollar signs and reads a bare `\\frac{1}{2}` as 2, so they are added to a bare answer."""
    _silence_timeout_warning()
    from math_verify import parse

    text = answer if "$" in answer or "\\boxed" in answer or "\\[" in answer else f"${answer}$"
    try:
        with _time_limit(MATH_LIMIT_S):
            expressions: list[Any] = parse(text, parsing_timeout=None)
    except _OutOfTime:
        raise UnreadableAnswer(answer, f"takes longer than {MATH_LIMIT_S:g} s to parse") from None
    if not any(not isinstance(each, str) for each in expressions):
        raise UnreadableAnswer(answer, "cannot be parsed by math-verify")
    return expressions


def _plain_numbers(gold: list[Any], given: list[Any]) -> tuple[float, float] | None:
    numbers = [_finite_number(side[0]) if side else None for side in (gold, given)]
    if numbers[0] is None or numbers[1] is None:
        return None
    return numbers[0], numbers[1]


def _finite_number(expression: Any) -> float | None:
    """A finite real number, or None for anything else."""
    if not getattr(expression, "is_number", False):
        return None
    try:
        number = float(expression)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises _OutOfTime inside the block after `seconds`, and again every second in case something swallowed it.

    Signals reach only the main thread; in other threads the caller's limit must suffice.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise _OutOfTime

    handler = signal.signal(signal.SIGALRM, interrupt)
    before = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        finally:  # even if the alarm goes off just before it is switched off
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, *before)


def _silence_timeout_warning() -> None:
    """Silences math-verify's warning about missing time limits: `_time_limit` sets one."""
    import math_verify.grader
    import math_verify.parser

    math_verify.parser.TIMEOUT_WARNING_SHOWN = math_verify.grader.TIMEOUT_WARNING_SHOWN = True
