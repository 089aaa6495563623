"""Which of the files, and which part of a file, belong to the last attempt of a job."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from lockstep.doctor.sightings import Reading

_RUN = re.compile(r"(?:^|[/_.-])(?:run|attempt|try|restart|launch|submission)[_-]?0*(\d+)(?=[/_.-])")
_OLD = re.compile(r"(?i)(?:^|[/_.-])(?:old|prev|previous|bak|backup|earlier)(?=[/_.-]|$)")
_SHAPE = 60
_ENDS = ("exit", "crash", "cancelled", "done")


def old_sources(readings: Sequence[Reading]) -> frozenset[int]:
    """Sources of earlier attempts: of names such as `run_001/` and `run_002/`, or of files of one kind that do not
    overlap in time, all but the last."""
    numbers = {each.source: int(found[1]) for each in readings if (found := _RUN.search(each.name))}
    if len(set(numbers.values())) > 1 and not _at_once(readings, numbers):
        last = max(numbers.values())
        return frozenset(source for source, number in numbers.items() if number < last)
    aside = frozenset(each.source for each in readings if _OLD.search(each.name))
    return _before(readings) | (aside if len(aside) < len(readings) else frozenset())


def _at_once(readings: Sequence[Reading], numbers: dict[int, int]) -> bool:
    """They overlap in time, so the numbers count something else."""
    spans: dict[int, list[float]] = defaultdict(list)
    for each in readings:
        if each.source in numbers and each.first is not None and each.last is not None:
            spans[numbers[each.source]] += [each.first, each.last]
    ordered = [(min(times), max(times)) for _, times in sorted(spans.items())]
    return any(later[0] < earlier[1] - 1.0 and earlier[0] < later[1] - 1.0 for earlier, later in pairwise(ordered))


def _before(readings: Sequence[Reading]) -> frozenset[int]:
    """Of files that differ only in a number and are nobody's own, those that had ended before another began."""
    kinds: dict[str, list[Reading]] = defaultdict(list)
    for each in readings:
        if not each.who and each.node is None and each.first is not None and each.last is not None:
            kinds[re.sub(r"\d+", "#", each.name)].append(each)
    found: set[int] = set()
    for same in kinds.values():
        latest = max(same, key=lambda each: each.first or 0.0)
        found |= {each.source for each in same
                  if each is not latest and each.last is not None and latest.first is not None
                  and each.last <= latest.first and _is_attempt(each) and _is_attempt(latest)}  # fmt: skip
    return frozenset(found)


def _is_attempt(reading: Reading) -> bool:
    facts = {each.rule.signature.fact for each in reading.sightings}
    return "attempt" in facts or bool(facts & set(_ENDS)) or bool(reading.tracebacks)


def last_start(reading: Reading) -> int:
    """The line on which the last attempt in one file begins: where a start is announced after an end, or where a banner
    that was there before comes again after one."""
    ends = sorted({each.line for each in reading.sightings if each.rule.signature.fact in _ENDS}
                  | {traceback.number for _, _, traceback in reading.tracebacks})  # fmt: skip
    begin = 0
    banners: dict[str, int] = {}
    for each in reading.sightings:
        fact = each.rule.signature.fact
        if fact == "attempt" and _ended(ends, begin, each.line):
            begin = each.line
        elif fact == "banner":
            shape = re.sub(r"[\d.:,-]+", "#", each.text)[:_SHAPE]
            if shape in banners and _ended(ends, max(begin, banners[shape]), each.line):
                begin = each.line
            banners[shape] = each.line
    return begin


def _ended(ends: Sequence[int], after: int, before: int) -> bool:
    at = bisect_right(ends, after)
    return at < len(ends) and ends[at] < before
