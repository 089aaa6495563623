"""Estimates and removes clock offsets between hosts, from events that happen on all of them at the same time.

The ranks of a job count their steps together and time out in the same collective, and each rank dates these events
by its own clock. A difference that is constant over several steps, or a whole number of half hours, is a clock offset
and is removed. A difference that varies is a delay of the rank and is kept.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median, median_low

from lockstep.doctor.logs.parsed_log import ParsedLog
from lockstep.doctor.logs.timestamps import UNDATED_YEAR, move_to_year

MIN_OFFSET_S = 2.0
"""Smaller clock differences are not corrected, because they may come from the time between event and log line."""
MAX_JITTER_S = 1.0
"""Largest variation of a clock offset between steps."""
MIN_COMMON_EVENTS = 3
"""With at least this many common events, an offset may have any value."""
ZONE_S, _NEAR_ZONE_S = 1800.0, 5.0
"""Spacing of time zones, and how close an offset must be to a multiple of it if there are fewer common events."""
_MAX_EVENTS = 2_000

EventTimes = Mapping[Hashable, float]
"""When each event happened, on one clock."""


def clock_offsets(clocks: Mapping[Hashable, EventTimes]) -> dict[Hashable, float]:
    """Returns the seconds by which each clock is ahead of the majority.

    Omits clocks that agree with the majority or have too few events in common with it.
    """
    if not clocks:
        return {}
    reference = max(clocks, key=lambda each: len(clocks[each]))
    ahead: dict[Hashable, float] = {reference: 0.0}
    for name, own in clocks.items():
        if name != reference:
            found = _clock_difference(own, clocks[reference])
            if found is not None:
                ahead[name] = found
    usual = median_low(ahead.values())
    return {name: seconds - usual for name, seconds in ahead.items() if abs(seconds - usual) >= MIN_OFFSET_S}


def _clock_difference(own: EventTimes, other: EventTimes) -> float | None:
    """Returns the seconds by which one clock is ahead of another; None if they cannot be determined."""
    differences = sorted(own[event] - other[event] for event in own.keys() & other.keys())
    if not differences:
        return None
    middle = median(differences)
    if len(differences) >= MIN_COMMON_EVENTS:
        tenth = len(differences) // 10
        kept = differences[tenth : len(differences) - tenth]
        return middle if kept[-1] - kept[0] <= MAX_JITTER_S else None
    zones = round(middle / ZONE_S)
    near = all(abs(each - zones * ZONE_S) <= _NEAR_ZONE_S for each in differences)
    return middle if zones and near else None


def align_clocks(logs: Sequence[ParsedLog]) -> dict[Hashable, float]:
    """Moves the files of different ranks or hosts onto one clock; returns the seconds subtracted from each clock.

    A file without rank, host or node is not changed: it may be another attempt, which counts the same steps later.
    """
    files: dict[Hashable, list[ParsedLog]] = defaultdict(list)
    for each in logs:
        owner = each.origin.rank, each.origin.host, each.node
        if any(part not in (None, "") for part in owner):
            files[owner].append(each)
    found = clock_offsets({owner: events for owner, own in files.items() if (events := _shared_events(own))})
    for clock, seconds in found.items():
        for each in files[clock]:
            shift_times(each, partial(_subtract, seconds))
    return found


def _subtract(seconds: float, at: float) -> float:
    return at - seconds


def _shared_events(logs: Sequence[ParsedLog]) -> EventTimes:
    """Returns the steps and collective timeouts, each with its first timestamp."""
    found: dict[Hashable, float] = {}
    for counter in (counter for each in logs for counter in each.counters):
        if counter.when is not None and len(found) < _MAX_EVENTS:
            found.setdefault((counter.epoch, counter.step, counter.of), counter.when)
    for match in (match for each in logs for match in each.matches):
        fields = match.fields
        if match.rule.signature.fact == "collective_timeout" and match.when is not None and fields.get("seq"):
            found.setdefault((fields.get("op"), fields["seq"], fields.get("numel")), match.when)
    return found


def assign_years(logs: Sequence[ParsedLog]) -> None:
    """Gives files whose timestamps have no year the year of the other files."""
    years = [time.gmtime(each.first).tm_year for each in logs if each.has_year and each.first is not None]
    if not years or years[0] == UNDATED_YEAR:
        return
    for each in logs:
        if not each.has_year and each.first is not None:
            shift_times(each, lambda at: move_to_year(at, years[0]))


def shift_times(log: ParsedLog, move: Callable[[float], float]) -> None:
    """Shifts all times of a file."""

    def moved(at: float | None) -> float | None:
        return None if at is None else move(at)

    log.first, log.last = moved(log.first), moved(log.last)
    log.matches = [replace(match, when=moved(match.when)) for match in log.matches]
    log.counters = [replace(counter, when=moved(counter.when)) for counter in log.counters]
    log.tracebacks = [(origin, moved(when), traceback) for origin, when, traceback in log.tracebacks]
    log.tail_lines = {rank: [replace(tail, when=moved(tail.when)) for tail in lines]
                    for rank, lines in log.tail_lines.items()}  # fmt: skip
