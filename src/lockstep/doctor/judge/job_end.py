"""How a job ended: whether its logs report success, and whether they end with trouble."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from lockstep.doctor.logs import line_origin
from lockstep.doctor.logs.parsed_log import ParsedLog, RuleMatch, TailLine
from lockstep.doctor.logs.stack_traces import TRACEBACK_START, Traceback, is_primary, names_trouble
from lockstep.doctor.logs.timestamps import TimestampParser

if TYPE_CHECKING:
    from lockstep.doctor.judge.job_history import JobHistory

_TAIL_LINES = 4
"""Number of last lines of a file that are searched for trouble."""
_EXCEPTION_LINE = re.compile(r"\s*(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): ")
_SURE_STRENGTH = 0.7
"""A cause with a rule of at least this strength outweighs an earlier report of success."""
_CLOSING = re.compile(
    r"(?i)^(?!.*(?:NCCL|shutdown|\b0 of [1-9]|\b(?:not|never|only) |n't |\.(?:cc|cpp):\d)).*"
    r"\b(?:completed?|done|finished|written|wrote|saved|verified|exported|uploaded|passed|succe\w+"
    r"|all \w+ (?:ok|(?!fail|abort|crash|kill|terminat|reject|refus|cancel|stopp|evict|preempt|interrupt)\w+ed)"
    r"|reached step \d+|(?P<all>[1-9]\d*) of (?P=all)|exit(?:ed|ing)?(?: with)? (?:code|status|SystemExit:?)[ :=]*0)\b"
    r"(?!.{0,200}(?:waiting|with errors|(?<! 0 )failed))"
)
"""How the last line of a program reports that its work is complete."""
_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b")
"""The levels of a line that is no progress although it counts something."""
_CLOSING_LINES = 2
_WAITS = re.compile(
    r"(?i)\bwaiting (?:for|on)\b|\b(?:connecting (?:to|with)|joining|registering (?:to|with)) .{0,80}\.\.\.\s*$"
)
_MIN_ROWS = 4
"""Fewer rows with a NaN prove nothing if others follow: trainers skip one or two such steps."""


def ended_well(history: "JobHistory") -> bool:
    """Whether the job reports success, nothing failed later, and earlier failures did not stop it."""
    reports = [each for each in history.facts("done")
               if not (history.continued_after(each) or _is_partial(history, each))]  # fmt: skip
    done = [(each.source, each.line) for each in reports]
    closing = history.closing_lines if not done and closes(history) else {}
    done = done or sorted(each for each in closing.items() if not _stops_short(history, *each))
    if not done or _stays_without_number(history):
        return False
    first, last = done[0], dict(sorted(done, key=lambda each: each[1]))
    # A process handles no exception like these, although a logger may print it.
    fatal = {each.place for each in history.matches if each.rule.signature.fatal is True and _is_fatal(history, each)}
    bad = [
        (each.source, each.origin.rank, each.line)
        for each in history.failures + history.exceptions
        if _ended_process(history, each)
        and not (_cleans_up(each, last) or _was_handled(each.traceback, each.source, first))
        and not (each.traceback and completed_after(history, each.origin.rank, each.source, each.line))
    ]
    bad += [(at.source, None, each.number) for _, _, each, at in history.tracebacks
            if is_primary(each)
            and ((at.source, each.number) in fatal or not _was_handled(each, at.source, first))]  # fmt: skip
    if any(each[0] != first[0] or not _has_step_between(history, *each, first[1]) for each in bad):
        return False
    later = (each for each in history.matches if each.line > last.get(each.source, each.line))
    return not any(_is_fatal(history, each) for each in later) and not any(
        _raises_after(history, *each) for each in last.items()
    )


def _stays_without_number(history: "JobHistory") -> bool:
    """Whether the loss of some rank became NaN and stayed so: in several rows until its last step, or in the last
    row of its file."""
    rows = history.facts("no_number")
    count = Counter((each.source, each.origin.rank) for each in rows)
    last = {source: max((counter.line for counter in history.counters_of(source)), default=0) for source, _ in count}
    return any((count[each.source, each.origin.rank] >= _MIN_ROWS or each.line >= last[each.source] > 0)
               and not history.continued_after(each) for each in rows)  # fmt: skip


def _is_partial(history: "JobHistory", done: RuleMatch) -> bool:
    """Whether only an evaluation or test ended: the last counter before the line had not reached its total."""
    return "part" in done.fields and _stops_short(history, done.source, done.line)


def _stops_short(history: "JobHistory", source: int, line: int) -> bool:
    """Whether the last counter before a line had not reached its total."""
    before = [counter for counter in history.counters_of(source) if counter.line < line]
    return bool(before) and before[-1].step + 1 < before[-1].of


def _has_step_between(history: "JobHistory", source: int, rank: int | None, line: int, until: int) -> bool:
    """Whether a step was made between two lines."""
    return any(line < counter.line <= until and (rank is None or counter.origin.rank in (None, rank))
               for counter in history.counters_of(source))  # fmt: skip


def _is_fatal(history: "JobHistory", match: RuleMatch) -> bool:
    """Whether a match proves by itself that the job failed."""
    signature = match.rule.signature
    sure = signature.role == "cause" and signature.strength >= _SURE_STRENGTH and signature.fatal is not False
    return sure and not signature.needs and not history.continued_after(match)


def _raises_after(history: "JobHistory", source: int, line: int) -> bool:
    """Whether the lines after `line` at the end of a file name an exception without a traceback."""
    texts = [
        each.text for of_rank in history.by_source[source].tail_lines.values() for each in of_rank if each.line > line
    ]
    return not any(TRACEBACK_START in each for each in texts) and any(
        _EXCEPTION_LINE.match(each, line_origin.parse_prefixes(each, TimestampParser()).at) for each in texts
    )


def _ended_process(history: "JobHistory", match: RuleMatch) -> bool:
    """Whether a failure ended its process."""
    return match.rule.signature.fact != "peer_lost" and exit_code(match) != 0 and not history.continued_after(match)


def ends_with_trouble(history: "JobHistory") -> bool:
    """Whether the last lines of some file, after its last counter or report of completion, report an error, or
    the last one says that the program waits."""
    closing = history.closing_lines
    for log, lines in _last_lines(history):
        after = max((counter.line for counter in log.counters), default=0)
        after = max(after, closing.get(log.source, 0))
        last = [each.text for each in lines if each.line > after or (each.line == after and _ERROR.search(each.text))]
        if _WAITS.search(lines[-1].text) or any(map(names_trouble, last)):
            return True
    return False


def was_overcome(history: "JobHistory", match: RuleMatch) -> bool:
    """Whether what a match reports did not end the job: no process failed, and its file continues and ends without
    trouble."""
    if "running" not in history.traits or history.ends_with_trouble:
        return False
    last = next((lines for log, lines in _last_lines(history) if log.source == match.source), [])
    return bool(last) and match.line < last[0].line


def closes(history: "JobHistory") -> bool:
    """Whether the end of some file reports that work is complete, and no file ends with trouble."""
    return bool(history.closing_lines) and not history.ends_with_trouble


def _last_lines(history: "JobHistory") -> Iterator[tuple[ParsedLog, list[TailLine]]]:
    for log in history.logs:
        lines = sorted((each for of_rank in log.tail_lines.values() for each in of_rank), key=lambda each: each.line)
        if lines and log.source not in history.old_sources:
            yield log, lines[-_TAIL_LINES:]


def closing_lines(history: "JobHistory") -> Mapping[int, int]:
    """Returns the line of each file, by source, that reports the completion of the work at its end."""
    found = {}
    for log, lines in _last_lines(history):
        closing = _closing_line(lines) if log.kind == "log" else 0
        if closing:
            found[log.source] = closing
    return found


def completed_after(history: "JobHistory", rank: int | None, source: int, line: int) -> bool:
    """Whether the rank that raised an exception on a line later reports the completion of its work, which one that an
    exception ends does not. Of an exception without a rank, whether all ranks of its file do, and one of them later."""
    by_rank = history.closing_lines_of_ranks.get(source, {})
    closing = [by_rank[rank]] if rank is not None and rank in by_rank else list(by_rank.values())
    return bool(closing) and min(closing) > 0 and max(closing) > line


def closing_lines_of_ranks(history: "JobHistory") -> Mapping[int, Mapping[int, int]]:
    """Returns for each file, by source, the line on which each of its ranks reports the completion of its work at its
    end; 0 if it does not."""
    return {log.source: {rank: _closing_line(lines) for rank, lines in log.tail_lines.items() if rank is not None}
            for log in history.logs}  # fmt: skip


def _closing_line(last: Sequence[TailLine]) -> int:
    """Returns the last of these lines that reports completion, if it is one of the very last; else 0."""
    return max((each.line for each in last[-_CLOSING_LINES:] if _CLOSING.search(each.text)), default=0)


def _was_handled(found: Traceback | None, source: int, done: tuple[int, int]) -> bool:
    """Whether an exception was handled: only its last line was printed, or a logger printed it, and the job then
    reported success.

    Args:
        source: The file of the exception.
        done: File and line of the report.
    """
    handled = found is not None and (found.is_last_line_only or found.logged)
    return found is not None and handled and source == done[0] and found.number < done[1]


def _cleans_up(match: RuleMatch, done: Mapping[int, int]) -> bool:
    """Whether a launcher stopped one of its processes before the job reported success."""
    return (
        match.rule.signature.fact == "cancelled" and "signal" in match.fields and match.line < done.get(match.source, 0)
    )


def exit_code(match: RuleMatch) -> int | None:
    """Returns the exit code that a match reports; None if it reports none."""
    code = match.fields.get("code")
    return int(code) if code is not None else None
