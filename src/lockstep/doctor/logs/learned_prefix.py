"""Learns which rank or host a file names at the beginning of its lines, in a form that no known launcher has."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice

from lockstep.doctor.logs import line_origin
from lockstep.doctor.logs.line_origin import Forms

_NUMBER = re.compile(r" ?(?P<open>[\[({<#]?)(?P<value>\d{1,5})(?P<close>(?:[\])}>|]:?)?)(?=\s)")
_NAME = re.compile(r" ?(?P<value>(?=[\w.-]{0,60}\d)(?=[\w.]{1,60}-)[A-Za-z][\w.-]{2,62}) +(?P<next>[a-z][a-z0-9-]*)?")
_LINES = 400
_LEVELS = 2
"""A pod may come before a rank."""
_LEAST = 2
"""Fewer lines of a rank, or fewer ranks, show no form."""


def learn_prefixes(lines: Iterable[str]) -> Forms:
    """Returns the forms of the prefixes of a file that name a rank or a host.

    Numbers in brackets or before a separator, from 0 or 1 on without gaps, or names that differ only in a number, are
    such a prefix if they alternate: counters and lists rise. Names must begin most of the lines that show no host.
    """
    head = list(islice(filter(str.strip, lines), _LINES))
    known: Forms = ()
    for _ in range(_LEVELS):
        starts = [(line, *line_origin.origin_of_line(line, known)) for line in head]
        numbered = [(line, at) for line, origin, at in starts if origin.rank is None]
        named = [(line, at) for line, origin, at in starts if not origin.host]
        known += tuple(map(re.compile, [*_number_forms(numbered), *_name_forms(named)]))
    return known


def _number_forms(starts: Sequence[tuple[str, int]]) -> list[str]:
    values: dict[tuple[str, str], list[int]] = defaultdict(list)
    for line, at in starts:
        match = _NUMBER.match(line, at)
        if match and (match["open"] or match["close"]):
            values[match["open"], match["close"]].append(int(match["value"]))
    ranks = [form for form, numbers in values.items() if _alternate(numbers) and _count_up(set(numbers))]
    return [rf" ?{re.escape(opened)}(?P<label>\d{{1,5}}){re.escape(closed)}(?=\s) ?" for opened, closed in ranks]


def _name_forms(starts: Sequence[tuple[str, int]]) -> list[str]:
    names: dict[str, list[re.Match[str]]] = defaultdict(list)
    for line, at in starts:
        match = _NAME.match(line, at)
        if match:
            names[re.sub(r"\d+", "#", match["value"])].append(match)
    form, found = max(names.items(), key=lambda each: len(each[1]), default=("", []))
    if 2 * len(found) <= len(starts) or not _alternate([each["value"] for each in found]):
        return []
    following = {each["next"] or "" for each in found}
    container = f"{following.pop()} ?" if len(following) == 1 else ""
    return [rf" ?(?P<name>{re.escape(form).replace(re.escape('#'), '[0-9]+')}) +{container}"]


def _alternate(values: Sequence[object]) -> bool:
    """Whether several values come again after others, as often as there are values."""
    seen: set[object] = set()
    returns, last = 0, None
    for each in values:
        returns += each != last and each in seen
        seen.add(each)
        last = each
    return len(seen) >= _LEAST and returns >= len(seen) and min(Counter(values).values()) >= _LEAST


def _count_up(numbers: set[int]) -> bool:
    return min(numbers) <= 1 and max(numbers) - min(numbers) == len(numbers) - 1
