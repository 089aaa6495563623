"""No line, however it is composed, takes the doctor long: every regular expression with which logs, their diagnosis and
the verdicts work is tried on lines made to have many ways to match."""

import importlib
import pkgutil
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import lockstep.doctor.judge
import lockstep.doctor.logs
import lockstep.watch.diagnosis
from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.doctor.knowledge.knowledge_base import load_knowledge
from lockstep.doctor.logs.line_origin import parse_prefixes
from lockstep.doctor.logs.log_lines import MAX_LINE_CHARS, is_quoted, kind_of_line
from lockstep.doctor.logs.timestamps import TimestampParser

LIMIT_S = 0.5
"""CPU seconds for a line of 16 KiB: far more than needed, and less than what grows with the square of its length."""
FILLERS = (
    " ", "\t", "0", "a", "_", ".", "-", "/", "[", "]", "(", "a.", "0.", "0 ", "a ", "= ", ": ", "[0]", "'\"", "> ",
)  # fmt: skip
WORDS = (
    "step", "sample", "group", "rank", "[rank0]:", "Traceback (most", "epoch", "{'epoch': ", "Error: ",
    "File \"x\", line 1", "possible causes for ", "[12:00:00", "2024-01-01 00:00:00", "node ", "host ", "PID ",
    "[PG ID 0 Rank ", "1/2 [00:01<", "ray::x (pid=1", "completion", "Process 1: ", "\x1b[", "rank=",
)  # fmt: skip
"""Beginnings of what the patterns look for."""


def _modules() -> Iterator[Any]:
    for package in (lockstep.doctor.logs, lockstep.doctor.judge, lockstep.watch.diagnosis):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


def _patterns_in(value: Any) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _patterns_in(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _patterns_in(each)


PATTERNS = {
    pattern: f"{module.__name__.removeprefix('lockstep.')}:{name}"
    for module in _modules()
    for name, value in vars(module).items()
    for pattern in _patterns_in(value)
}


SOURCES = "\n".join(Path(module.__file__).read_text() for module in _modules())


def _is_searched(pattern: re.Pattern[Any]) -> bool:
    """Whether the code also searches for a pattern, or only matches it with the beginning of a text."""
    name = PATTERNS[pattern].partition(":")[2]
    only_matched = re.search(rf"\b{name}\.(?:full)?match\(", SOURCES)
    return not only_matched or bool(re.search(rf"\b{name}\.(?:search|sub|split|find\w+)\(", SOURCES))


@cache
def _long_lines() -> tuple[str, ...]:
    return tuple(_make_long_lines())


def _make_long_lines() -> Iterator[str]:
    for number, filler in enumerate(FILLERS):
        yield _filled(filler)
        for word in WORDS[number % 2 :: 2]:
            yield word + _filled(filler, MAX_LINE_CHARS - len(word))
            yield _filled(word + filler)
    for word in WORDS:
        yield _filled(word)


def _filled(text: str, most: int = MAX_LINE_CHARS) -> str:
    return (text * (most // len(text) + 1))[:most]


class TookTooLong(Exception):
    pass


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises TookTooLong in the body, also amid a regular expression, once it has used so many seconds of CPU time."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _slow_lines(examine: Callable[[str], Any], one_of: int = 1) -> list[str]:
    """The shortened lines for which `examine` takes too long; at most one, because every one costs the limit.

    Args:
        one_of: every how many lines it is tried on.
    """
    for line in _long_lines()[::one_of]:
        try:
            with cpu_limit(LIMIT_S):
                examine(line)
        except TookTooLong:
            return [f"{line[:30]!r}...{line[-10:]!r}"]
    return []


@pytest.mark.parametrize("pattern", PATTERNS, ids=[f"{name}-{n}" for n, name in enumerate(PATTERNS.values())])
def test_no_pattern_takes_long_for_a_long_line(pattern: re.Pattern[Any]) -> None:
    """One of five kinds of lines; the long suites try all."""
    assert not _slow_lines(_examination(pattern), one_of=5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_pattern_takes_long_for_any_of_the_lines() -> None:
    found = {name: _slow_lines(_examination(pattern)) for pattern, name in PATTERNS.items()}
    assert not [name for name, lines in found.items() if lines], found


def _examination(pattern: re.Pattern[Any]) -> Callable[[str], Any]:
    examine = pattern.search if _is_searched(pattern) else pattern.match
    return (lambda line: examine(line.encode())) if isinstance(pattern.pattern, bytes) else examine


def test_no_line_takes_long_to_be_sorted_and_dated() -> None:
    def examine(line: str) -> None:
        kind_of_line("log", line)
        is_quoted(f"{line} CUDA out of memory", len(line), parse_prefixes(line, TimestampParser()).at)

    assert not _slow_lines(examine)


RULES = load_knowledge().rules


@pytest.mark.parametrize("part", range(4))
def test_no_line_takes_an_explanation_long(part: int, tmp_path: Path) -> None:
    """Each line also contains the example of a rule, because most of the work begins only once a rule matches."""
    examples = [rule.signature.examples[0].splitlines()[0][:200] for rule in RULES if rule.signature.examples]
    fillers = (" ", "0", ".", "[", "step ", "sample ", "a=", "[0] ")
    with (tmp_path / "job.log").open("w") as log:
        for number, example in list(enumerate(examples))[part::4]:
            filler = fillers[number // 4 % len(fillers)]
            long = _filled(filler, MAX_LINE_CHARS - len(example) - 1)
            log.write(f"{long} {example}\n" if number % 3 else f"{example} {long}\n")
            log.write(f"step {_filled(filler, 2000)}sample {example}\n")

    began = time.process_time()
    explain([str(tmp_path / "job.log")])

    assert (time.process_time() - began) / (2 * len(examples) / 4) < LIMIT_S / 4
