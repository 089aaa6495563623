"""When a job ran: what another log dates before or after that cannot be its cause."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lockstep.doctor.kinds import of_line
from lockstep.doctor.sightings import Reading, Sighting

ZONES = 14 * 3600.0
"""Seconds that clocks of one job may be apart: a host's kernel speaks local time, a container mostly UTC."""
_BEFORE = 300.0
_AFTER = 3600.0
"""A job that hangs says nothing any more."""
_EDGE = 40
"""Lines at the beginning and at the end of a log among which one has a time, so that its first and last time count."""
_SHORT = 3
"""A log of fewer lines says nothing of when the job ran."""
_HALF_YEAR = 183 * 86_400.0


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds since 1970; infinite where no log tells."""

    first: float = float("-inf")
    last: float = float("inf")

    def outside(self, at: float) -> float:
        """Seconds before the first or after the last; 0 within, with some time to spare."""
        if at < self.first - _BEFORE:
            return self.first - at
        return at - self.last if at > self.last + _AFTER else 0.0


def of_job(readings: Sequence[Reading], old: Collection[int], starts: Mapping[int, int]) -> Span:
    """From the first to the last line of the last attempt, where all its logs have times at both ends."""
    logs = [each for each in readings if each.kind == "log" and each.source not in old and each.lines >= _SHORT]
    dated = [each for each in readings if each.kind == "log" and each.source not in old and each.first is not None]
    if not dated or any(each not in dated for each in logs):
        return Span()
    firsts = [_first(each, starts.get(each.source, 0)) for each in dated]
    lasts = [_last(each) for each in dated]
    return Span(min(firsts), max(lasts))


def _first(reading: Reading, start: int) -> float:
    assert reading.first is not None
    if start:
        times = [tick.when for tick in reading.ticks if tick.line >= start and tick.when is not None]
        times += [each.when for each in reading.sightings if each.line >= start and each.when is not None]
        return min(times, default=reading.first)
    early = reading.dated_lines[0] <= _EDGE and not any(
        tick.line < reading.dated_lines[0] for tick in reading.ticks[:_EDGE]
    )
    return reading.first if early else float("-inf")


def _last(reading: Reading) -> float:
    """Of a log whose counters go on without times, or that ends with older lines, nobody knows when it ended."""
    assert reading.first is not None and reading.last is not None
    said = reading.dated_lines[1]
    late = (
        reading.lines - said <= _EDGE
        and reading.last >= reading.first
        and not any(tick.line > said for tick in reading.ticks[-_EDGE:])
    )
    return reading.last if late else float("inf")


def strayed(seen: Sighting, reading: Reading, job: Span) -> float:
    """Seconds that a line of the kernel, or of another record that is not the job's own, is dated outside of the job;
    0 where that is not known."""
    if seen.when is None or (reading.kind == "log" and of_line("log", seen.text) == "log"):
        return 0.0
    gap = job.outside(seen.when)
    return 0.0 if not reading.dated and gap > _HALF_YEAR else gap
