"""Learns which rank or host a file names at the beginning of its lines, in a form that no known launcher has."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

_NUMBER = re.compile(r"\s*(?P<open>[\[({<#]?)(?P<value>\d{1,5})(?P<close>(?:[\])}>|]:?)?)(?=\s)")
_NAME = re.compile(
    r"(?P<value>(?=[\w.-]{0,60}\d)(?=[\w.]{1,60}-)[A-Za-z][\w.-]{2,62})(?P<close>) +(?P<next>[a-z][a-z0-9-]*)?"
)
_LINES = 400
_LEVELS = 2
"""A pod may come before a rank."""
_LEAST = 2
"""Fewer lines of a rank, or fewer ranks, show no form."""


Forms = tuple[re.Pattern[str], ...]
"""Patterns for prefixes, each with a group `label`, the number of a rank, or `name`, of a host."""


def learn_prefixes(lines: Iterable[str], message_at: Callable[[str, Forms], int]) -> Forms:
    """Returns the forms of the prefixes of a file that name a rank or a host.

    Numbers in brackets or before a separator, from 0 or 1 on without gaps, or names that differ only in a number, are
    such a prefix if they alternate: counters and lists rise. Names must begin most lines.

    Args:
        lines: The first lines of the file.
        message_at: Where the message of a line begins, given what was learned so far.
    """
    head = list(islice(filter(str.strip, lines), _LINES))
    known: Forms = ()
    for _ in range(_LEVELS):
        starts = [(each, message_at(each, known)) for each in head]
        known += tuple(map(re.compile, [*_number_forms(starts), *_name_forms(starts)]))
    return known


def _number_forms(starts: Sequence[tuple[str, int]]) -> list[str]:
    values: dict[tuple[str, str], list[str]] = defaultdict(list)
    for line, at in starts:
        match = _NUMBER.match(line, at)
        if match and (match["open"] or match["close"]):
            values[match["open"], match["close"]].append(match["value"])
    ranks = [form for form, numbers in values.items() if _alternate(numbers) and _counts_up(map(int, numbers))]
    return [rf"\s*{re.escape(opened)}(?P<label>\d{{1,5}}){re.escape(closed)}(?=\s) ?" for opened, closed in ranks]


def _name_forms(starts: Sequence[tuple[str, int]]) -> list[str]:
    found = [match for line, at in starts if (match := _NAME.match(line, at))]
    shapes = Counter(re.sub(r"\d+", "#", each["value"]) for each in found)
    shape, many = shapes.most_common(1)[0] if shapes else ("", 0)
    same = [each for each in found if re.sub(r"\d+", "#", each["value"]) == shape]
    if 2 * many <= len(starts) or not _alternate([each["value"] for each in same]):
        return []
    following = {each["next"] for each in same}
    container = f"{re.escape(following.pop() or '')} ?" if len(following) == 1 else ""
    return [rf"(?P<name>{re.escape(shape).replace(re.escape('#'), '[0-9]+')}) +{container}"]


def _alternate(values: Sequence[str]) -> bool:
    """Whether several values come again after others, as often as there are values."""
    seen: set[str] = set()
    returns, last = 0, ""
    for each in values:
        returns += each != last and each in seen
        seen.add(each)
        last = each
    return len(seen) >= _LEAST and returns >= len(seen) and min(Counter(values).values()) >= _LEAST


def _counts_up(values: Iterable[int]) -> bool:
    found = set(values)
    return min(found) <= 1 and max(found) - min(found) == len(found) - 1
