"""Learns which rank, host or process begins the lines of a file, in a form that no known launcher has."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice

from lockstep.doctor.logs import line_origin, process_names
from lockstep.doctor.logs.line_origin import Forms, LineOrigin

_NUMBER = re.compile(r" ?(?P<open>[\[({<#]?)(?P<value>\d{1,5})(?P<close>(?:/(?P<of>\d{1,5}))?(?:[\])}>|]:?)?)(?=\s)")
_NAME = re.compile(r" ?(?P<value>(?=[\w.-]{0,60}\d)(?=[\w.]{1,60}-)[A-Za-z][\w.-]{2,62}) +(?P<next>[a-z][a-z0-9-]*)?")
_WORD = r"[\w./@#+-]{1,48}"
_COLUMN = re.compile(
    rf"\s*(?:(?P<value>{_WORD})\s*(?P<close>\|\|?|[>\u00bb\u2502:]{{1,2}})(?=\s|$)"
    rf"|(?P<open>[\[(<{{])(?P<inner>[\w./@#+=:, -]{{1,48}})(?P<end>[\])>}}](?:<std(?:out|err)>)?:?)"
    r"(?=\s|$))"
)
"""A word before a separator, or in brackets, at the beginning of a line."""
_PROCESS = process_names.numbered(f"{process_names.WORDS}|worker", " ._:=#-")
_NUMBERED = re.compile(_PROCESS + "$", re.IGNORECASE)
_OF_JOB = re.compile(r"(?P<job>.*)[@,](?P<label>\d{1,5})$")
"""What a launcher calls the processes of a job that it only numbers, alone or after the name of the job."""
_LEVEL = re.compile(r"(?i)\b(?:trace|debug|info|notice|success|warn(?:ing)?|error|critical|fatal)\b")
_PLACE_IN_CODE = re.compile(r"\.(?:py|cc|cpp|go|rs|c|h)\b|::|^__\w+__|:\d+$|^\d+$|^(?:19|20)\d\d-|Error$|Exception$")
_MOST = 0.6
"""The share of the lines of a file that begin with a column."""
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
        found = [*_number_forms(numbered), *_name_forms(named)] or _columns(starts)
        known += tuple(map(re.compile, found))
    return known


def _columns(starts: Sequence[tuple[str, LineOrigin, int]]) -> list[str]:
    """Returns the form of a column with which most lines begin: a few words that come again, or one.

    The words are the names of processes unless a level precedes them, which is followed by the logger's name.
    """
    forms: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for line, _, at in starts:
        match = _COLUMN.match(line, at)
        if match and re.search(r"[A-Za-z]", match[0]):
            end = re.sub(r"std(?:out|err)", "STREAM", match["end"] or match["close"])
            forms[match["open"] or "", end].append((match["value"] or match["inner"], line[:at]))
    (opened, closed), found = max(forms.items(), key=lambda each: len(each[1]), default=(("", ""), []))
    values = Counter(value for value, _ in found)
    if len(found) < max(_MOST * len(starts), _LEAST * 2) or not _are_few(values, found):
        return []
    before = any(_LEVEL.search(text) or line_origin.origin_of_line(text, ())[0].rank is not None for _, text in found)
    shapes = {re.sub(r"\d+", "#", re.escape(each)).replace("#", "[0-9]+") for each in values}
    if closed in ("|", "||"):
        shapes = {_WORD}
    numbers = {label["label"] for each in values if (label := _NUMBERED.search(each))}
    named = (
        not before
        and len(values) > 1
        and not any(_PLACE_IN_CODE.search(each) or _LEVEL.search(each) for each in values)
    )
    word = "|".join(sorted(shapes))
    of_job = [match for each in values if (match := _OF_JOB.match(each))]
    if named and len(of_job) == len(values) and len({each["job"] for each in of_job}) == 1:
        word = rf"{re.escape(of_job[0]['job'])}[@,](?P<label>\d{{1,5}})"
    elif named and len(numbers) >= _LEAST:
        word = f"{_PROCESS}|(?:{word})"
    elif named:
        word = rf"(?P<party>{word})"
    ending = re.escape(closed).replace("STREAM", "std(?:out|err)")
    return [rf"\s*{re.escape(opened)}(?:{word})\s*{ending}(?=\s|$) ?"]


def _are_few(values: Counter[str], found: Sequence[tuple[str, str]]) -> bool:
    """Whether the words of a column are few, and come again after others if there are several."""
    return len(values) == 1 or (
        len(values) * 3 <= len(found) and _alternate([value for value, *_ in found if values[value] >= _LEAST])
    )


def _number_forms(starts: Sequence[tuple[str, int]]) -> list[str]:
    values: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for line, at in starts:
        match = _NUMBER.match(line, at)
        if match and (match["open"] or match["close"]):
            values[match["open"], match["close"], match["of"] or ""].append(int(match["value"]))
    ranks = [form[:2] for form, numbers in values.items() if _alternate(numbers) and _are_ranks(set(numbers), form[2])]
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


def _are_ranks(numbers: set[int], of: str) -> bool:
    """Whether numbers have no gaps and begin with 0 or 1; if their total is known, with 0."""
    if of:
        return numbers == set(range(int(of)))
    return min(numbers) <= 1 and max(numbers) - min(numbers) == len(numbers) - 1
