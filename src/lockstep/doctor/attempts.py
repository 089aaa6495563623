"""Which of the files, and which part of a file, belong to the last attempt of a job."""

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from lockstep.doctor.sightings import Reading

_RUN = re.compile(r"(?:^|[/_.-])(?:run|attempt|try|restart|launch|submission)[_-]?0*(\d+)(?=[/_.-])")
_ENDS = ("exit", "crash", "cancelled", "done")


def old_sources(readings: Sequence[Reading]) -> frozenset[int]:
    """Sources of earlier attempts: of names such as `run_001/` and `run_002/`, or of files of one kind that do not
    overlap in time, all but the last."""
    numbers = {each.source: int(found[1]) for each in readings if (found := _RUN.search(each.name))}
    if len(set(numbers.values())) > 1 and not _at_once(readings, numbers):
        last = max(numbers.values())
        return frozenset(source for source, number in numbers.items() if number < last)
    return _before(readings)


def _at_once(readings: Sequence[Reading], numbers: dict[int, int]) -> bool:
    """The numbers do not follow on each other in time, so they number something else."""
    spans: dict[int, list[float]] = defaultdict(list)
    for each in readings:
        if each.source in numbers and each.first is not None and each.last is not None:
            spans[numbers[each.source]] += [each.first, each.last]
    ordered = [(min(times), max(times)) for _, times in sorted(spans.items())]
    return any(later[0] < earlier[1] - 1.0 for earlier, later in pairwise(ordered))


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
    """The line on which the last attempt in one file begins: marks of a start after a failure or an end."""
    ends = [each.line for each in reading.sightings if each.rule.signature.fact in _ENDS]
    begin = 0
    for each in reading.sightings:
        if each.rule.signature.fact == "attempt" and any(begin <= line < each.line for line in ends):
            begin = each.line
    return begin
