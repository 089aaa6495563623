"""Finds the last attempt of a job: which files and lines belong to that attempt, and when it ran."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.doctor.logs.log_lines import kind_of_line
from lockstep.doctor.logs.parsed_log import ParsedLog, RuleMatch

_ATTEMPT_NUMBER = re.compile(r"(?:^|[/_.-])(?:run|attempt|try|restart|launch|submission)[_-]?0*(\d+)(?=[/_.-])")
_OLD_NAME = re.compile(r"(?i)(?:^|[/_.-])(?:old|prev|previous|bak|backup|earlier)(?=[/_.-]|$)")
_BANNER_CHARS = 60
_END_FACTS = ("exit", "crash", "cancelled", "done")


def earlier_attempts(logs: Sequence[ParsedLog]) -> frozenset[int]:
    """Returns the numbers of the sources that belong to earlier attempts.

    Of numbered folders such as `run_001/` and `run_002/` only the last one belongs to the last attempt; likewise of
    files whose names differ only in a number and that do not overlap in time.
    """
    numbers = {each.source: int(found[1]) for each in logs if (found := _ATTEMPT_NUMBER.search(each.name))}
    if len(set(numbers.values())) > 1 and not _overlap_in_time(logs, numbers):
        last = max(numbers.values())
        return frozenset(source for source, number in numbers.items() if number < last)
    renamed = frozenset(each.source for each in logs if _OLD_NAME.search(each.name))
    return _ended_before_others(logs) | (renamed if len(renamed) < len(logs) else frozenset())


def _overlap_in_time(logs: Sequence[ParsedLog], numbers: dict[int, int]) -> bool:
    """Whether the numbered files overlap in time, so that the numbers do not count attempts."""
    spans: dict[int, list[float]] = defaultdict(list)
    for each in logs:
        if each.source in numbers and each.first is not None and each.last is not None:
            spans[numbers[each.source]] += [each.first, each.last]
    ordered = [(min(times), max(times)) for _, times in sorted(spans.items())]
    return any(later[0] < earlier[1] - 1.0 and earlier[0] < later[1] - 1.0 for earlier, later in pairwise(ordered))


def _ended_before_others(logs: Sequence[ParsedLog]) -> frozenset[int]:
    """Returns the sources that ended before another file of the same kind began.

    Files are of the same kind if their names differ only in a number. Files of a rank, host or role are ignored.
    """
    kinds: dict[str, list[ParsedLog]] = defaultdict(list)
    for each in logs:
        if not each.origin and each.node is None and each.first is not None and each.last is not None:
            kinds[re.sub(r"\d+", "#", each.name)].append(each)
    found: set[int] = set()
    for same in kinds.values():
        latest = max(same, key=lambda each: each.first or 0.0)
        found |= {each.source for each in same
                  if each is not latest and each.last is not None and latest.first is not None
                  and each.last <= latest.first and _is_attempt(each) and _is_attempt(latest)}  # fmt: skip
    return frozenset(found)


def _is_attempt(log: ParsedLog) -> bool:
    """Whether the log shows the start or the end of a job."""
    facts = {each.rule.signature.fact for each in log.matches}
    return "attempt" in facts or bool(facts & set(_END_FACTS)) or bool(log.tracebacks)


def last_attempt_start(log: ParsedLog) -> int:
    """Returns the line on which the last attempt in a file begins; 0 if the file has only one attempt.

    An attempt begins with a start message, or with a banner that was printed before, if an earlier attempt has ended.
    """
    ends = sorted({each.line for each in log.matches if each.rule.signature.fact in _END_FACTS}
                  | {traceback.number for _, _, traceback in log.tracebacks})  # fmt: skip
    begin = 0
    banners: dict[str, int] = {}
    for each in log.matches:
        fact = each.rule.signature.fact
        if fact == "attempt" and _ended_between(ends, begin, each.line):
            begin = each.line
        elif fact == "banner":
            shape = re.sub(r"[\d.:,-]+", "#", each.text)[:_BANNER_CHARS]
            if shape in banners and _ended_between(ends, max(begin, banners[shape]), each.line):
                begin = each.line
            banners[shape] = each.line
    return begin


def _ended_between(ends: Sequence[int], after: int, before: int) -> bool:
    """Whether an attempt ended between two lines."""
    at = bisect_right(ends, after)
    return at < len(ends) and ends[at] < before


MAX_CLOCK_OFFSET_S = 14 * 3600.0
"""Largest clock difference within one job: a host's kernel logs local time, a container mostly UTC."""
_MARGIN_BEFORE_S = 300.0
_MARGIN_AFTER_S = 3600.0
"""Large, because a job that hangs prints nothing more."""
_EDGE_LINES = 40
"""A log's first and last timestamps count if they are within this many lines of its ends."""
_MIN_LINES = 2
"""Logs with fewer lines do not show when the job ran."""
_HALF_YEAR_S = 183 * 86_400.0


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A time span in seconds since 1970. A start or an end that no log shows is infinite."""

    first: float = float("-inf")
    last: float = float("inf")

    def outside(self, at: float) -> float:
        """Returns the seconds by which a time lies before the start or after the end; 0 inside or within a margin."""
        if at < self.first - _MARGIN_BEFORE_S:
            return self.first - at
        return at - self.last if at > self.last + _MARGIN_AFTER_S else 0.0


def job_time_span(logs: Sequence[ParsedLog], old: Collection[int], starts: Mapping[int, int]) -> TimeSpan:
    """Returns the time from the first to the last line of the last attempt.

    The span is infinite at both ends unless all logs of the attempt have timestamps.
    """
    logs = [each for each in logs if each.kind == "log" and each.source not in old and each.lines >= _MIN_LINES]
    if not logs or any(each.first is None for each in logs):
        return TimeSpan()
    firsts = [_span_start(each, starts.get(each.source, 0)) for each in logs]
    lasts = [_span_end(each) for each in logs]
    return TimeSpan(min(firsts), max(lasts))


def _span_start(log: ParsedLog, start: int) -> float:
    """Returns when the last attempt began, which starts on line `start`; infinite if lines without a timestamp come
    before the first timestamp."""
    assert log.first is not None
    if start:
        times = [counter.when for counter in log.counters if counter.line >= start and counter.when is not None]
        times += [each.when for each in log.matches if each.line >= start and each.when is not None]
        return min(times, default=log.first)
    early = log.dated_lines[0] <= _EDGE_LINES and not any(
        counter.line < log.dated_lines[0] for counter in log.counters[:_EDGE_LINES]
    )
    return log.first if early else float("-inf")


def _span_end(log: ParsedLog) -> float:
    """Returns when a log ended; infinite if counters without timestamps follow the last timestamp, or if the last
    timestamp is older than the first."""
    assert log.first is not None and log.last is not None
    last_dated = log.dated_lines[1]
    late = (
        log.lines - last_dated <= _EDGE_LINES
        and log.last >= log.first
        and not any(counter.line > last_dated for counter in log.counters[-_EDGE_LINES:])
    )
    return log.last if late else float("inf")


def seconds_outside_job(match: RuleMatch, log: ParsedLog, job: TimeSpan) -> float:
    """Returns the seconds by which a line of a kernel log or other host log lies outside the job's time span; 0 if
    unknown."""
    if match.when is None or (log.kind == "log" and kind_of_line("log", match.text) == "log"):
        return 0.0
    gap = job.outside(match.when)
    return 0.0 if not log.has_year and gap > _HALF_YEAR_S else gap
