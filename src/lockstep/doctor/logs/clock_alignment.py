"""Estimates and removes clock offsets between hosts, from events that happen on all of them at the same time.

Ranks of one job count their steps together and time out in the same collective, and each rank dates the event by
its own clock. A difference that is constant over several steps, or a whole number of half hours, is a clock offset
and is removed; one that varies is a delay of the rank and is kept.
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
"""Seconds by which clocks differ that are worth a correction: writing a line takes its time too."""
MAX_JITTER_S = 1.0
"""Seconds by which a difference may vary from one step to the next."""
MIN_COMMON_EVENTS = 3
"""Events that two clocks have in common."""
ZONE_S, _NEAR_ZONE_S = 1800.0, 5.0
"""Seconds between time zones, and how near to it a difference must be for which there is one event."""
_MAX_EVENTS = 2_000

EventTimes = Mapping[Hashable, float]
"""When what happened, on one clock."""


def clock_offsets(clocks: Mapping[Hashable, EventTimes]) -> dict[Hashable, float]:
    """Seconds that clocks are ahead of what most of them say; those that agree or have too little in common are left
    out."""
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
    """By how much one clock is ahead of another one; None where nobody can tell."""
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
    """Puts files of different ranks or hosts onto one clock; by rank, host and node, the seconds that were taken off.

    A file of nobody in particular is left as it is: it may be another attempt, which counts the same steps later.
    """
    files: dict[Hashable, list[ParsedLog]] = defaultdict(list)
    for each in logs:
        speaker = each.origin.rank, each.origin.host, each.node
        if any(part not in (None, "") for part in speaker):
            files[speaker].append(each)
    found = clock_offsets({speaker: events for speaker, own in files.items() if (events := _shared_events(own))})
    for whose, seconds in found.items():
        for each in files[whose]:
            shift_times(each, partial(_subtract, seconds))
    return found


def _subtract(seconds: float, at: float) -> float:
    return at - seconds


def _shared_events(logs: Sequence[ParsedLog]) -> EventTimes:
    """Steps and time-outs, each where it was dated first."""
    found: dict[Hashable, float] = {}
    for tick in (tick for each in logs for tick in each.ticks):
        if tick.when is not None and len(found) < _MAX_EVENTS:
            found.setdefault((tick.epoch, tick.step, tick.of), tick.when)
    for seen in (seen for each in logs for seen in each.matches):
        said = seen.fields
        if seen.rule.signature.fact == "collective_timeout" and seen.when is not None and said.get("seq"):
            found.setdefault((said.get("op"), said["seq"], said.get("numel")), seen.when)
    return found


def assign_years(logs: Sequence[ParsedLog]) -> None:
    """Gives the files that name no year the year of those that do."""
    years = [time.gmtime(each.first).tm_year for each in logs if each.has_year and each.first is not None]
    if not years or years[0] == UNDATED_YEAR:
        return
    for each in logs:
        if not each.has_year and each.first is not None:
            shift_times(each, lambda at: move_to_year(at, years[0]))


def shift_times(reading: ParsedLog, move: Callable[[float], float]) -> None:
    """Moves all times of a file."""

    def moved(at: float | None) -> float | None:
        return None if at is None else move(at)

    reading.first, reading.last = moved(reading.first), moved(reading.last)
    reading.matches = [replace(seen, when=moved(seen.when)) for seen in reading.matches]
    reading.ticks = [replace(tick, when=moved(tick.when)) for tick in reading.ticks]
    reading.tracebacks = [(origin, moved(when), traceback) for origin, when, traceback in reading.tracebacks]
    reading.tail_lines = {rank: [replace(said, when=moved(said.when)) for said in lines]
                    for rank, lines in reading.tail_lines.items()}  # fmt: skip
