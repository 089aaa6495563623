"""A line of time per rank, from the parsed logs of a job: first and last line, steps, errors, waits, and the end."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from lockstep.base.text import count_noun, format_duration
from lockstep.doctor.logs.line_origin import LineOrigin
from lockstep.doctor.logs.parsed_log import ParsedLog, RuleMatch

MAX_ROWS_SHOWN = 40
"""With more rows, those without errors that end alike are folded."""
_MAX_MARKS = 60
"""Marks of one kind per row; of more, evenly spaced ones are drawn."""
_ERROR_ROLES = ("cause", "sign", "victim")
_ENDS = {"done": "reports its end", "exit": "exits", "crash": "crashes", "cancelled": "is stopped"}
_TICKS = 4
_WIDTH = 1000
"""Width of a row in its own units."""


@dataclass(frozen=True, slots=True)
class TimelineMark:
    """A mark on a row. Positions are in seconds since 1970 until the rows are laid out, then from 0 to 1000."""

    at: float
    until: float
    kind: str
    """step, warning, error, wait, or end."""
    text: str = ""


@dataclass
class TimelineRow:
    """A rank, host or file with what it did when."""

    label: str
    rank: int | None
    first: float | None = None
    last: float | None = None
    marks: list[TimelineMark] = field(default_factory=list)
    steps: int = 0
    error_lines: set[int] = field(default_factory=set)
    warning_lines: set[int] = field(default_factory=set)
    end: str = ""
    """How it ended, in words."""
    culprit: bool = False
    step_path: str = ""
    """The steps as one SVG path."""

    @property
    def errors(self) -> int:
        return len(self.error_lines)

    def see(self, when: float | None) -> None:
        """Extends the row to a time."""
        if when is not None:
            self.first = when if self.first is None else min(self.first, when)
            self.last = when if self.last is None else max(self.last, when)

    @property
    def summary(self) -> str:
        """What a screen reader says instead of the line."""
        if self.first is None or self.last is None:
            return "no timestamps"
        counts = (("step", self.steps), ("warning", len(self.warning_lines)), ("error", self.errors))
        parts = [count_noun(number, name) for name, number in counts if number]
        return ", ".join([format_duration(self.last - self.first), *parts, *([self.end] if self.end else [])])


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are folded together: no errors, and the same end."""

    label: str
    rows: tuple[TimelineRow, ...]


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """The rows of a job on one axis.

    Attributes:
        rows: Culprits first, then those with errors, by rank.
        groups: The rest, if there are many.
        ticks: The labels of the axis, evenly spaced from the first line to the last.
        undated: The number of rows without timestamps, which are not drawn.
    """

    rows: tuple[TimelineRow, ...]
    groups: tuple[RowGroup, ...]
    ticks: tuple[str, ...]
    undated: int


def build_rank_timeline(logs: Iterable[ParsedLog], culprits: Collection[int] = ()) -> RankTimeline:
    """Builds the timeline of a job. The clocks of the logs are aligned already, as far as that is possible."""
    rows = _rows(logs)
    for row in rows:
        row.culprit = row.rank is not None and row.rank in culprits
    dated = [row for row in rows if row.first is not None]
    begin = min((row.first for row in dated if row.first is not None), default=0.0)
    span = max((row.last for row in dated if row.last is not None), default=0.0) - begin
    for row in dated:
        _lay_out(row, begin, span or 1.0)
    dated.sort(key=lambda row: (not row.culprit, not row.errors, row.rank is None, row.rank or 0, row.label))
    shown, groups = _fold(dated)
    ticks = tuple(f"+{format_duration(span * share / _TICKS)}" for share in range(_TICKS + 1)) if dated else ()
    return RankTimeline(shown, groups, ticks, len(rows) - len(dated))


def _rows(logs: Iterable[ParsedLog]) -> list[TimelineRow]:
    found: dict[object, TimelineRow] = {}

    def row_of(origin: LineOrigin, log: ParsedLog) -> TimelineRow:
        known = origin.with_defaults(log.origin)
        if known.rank is not None:
            key: object = known.rank
            label = f"rank {known.rank}"
        else:
            key = label = known.role or known.host or log.name
        return found.setdefault(key, TimelineRow(label, known.rank))

    for log in logs:
        if log.kind != "log":
            continue
        own = row_of(log.origin, log)
        if log.origin.rank is not None or not any(origin.rank is not None for origin in log.origins):
            own.see(log.first)
            own.see(log.last)
        for counter in log.counters:
            row = row_of(counter.origin, log)
            row.steps += 1
            row.see(counter.when)
            if counter.when is not None:
                row.marks.append(TimelineMark(counter.when, counter.when, "step", f"step {counter.step}"))
        for match in log.matches:
            _add_match(row_of(match.origin, log), match)
        for origin, when, traceback in log.tracebacks:
            row = row_of(origin, log)
            row.error_lines.add(traceback.number)
            row.end = row.end or f"raises {traceback.type}"
            row.see(when)
            if when is not None:
                row.marks.append(TimelineMark(when, when, "error", f"{traceback.type}: {traceback.message}"[:200]))
        for rank, tails in log.tail_lines.items():
            row = row_of(LineOrigin(rank), log) if rank is not None else own
            for tail in tails:
                row.see(tail.when)
    return [row for row in found.values() if row.first is not None or row.errors or row.steps]


def _add_match(row: TimelineRow, match: RuleMatch) -> None:
    """Adds a line that a rule matched: a wait that timed out, an end, an error or a warning."""
    signature, when = match.rule.signature, match.when
    row.see(when)
    text = f"{match.text[:200]}  [{match.file}:{match.line}]"
    if signature.fact in _ENDS:
        row.end = _ENDS[signature.fact]
    if signature.fact == "collective_timeout":
        row.end = row.end or "gives up waiting"
        lasted = float(match.fields.get("ran_ms") or match.fields.get("timeout_ms") or 0) / 1000
        if when is not None and lasted:
            row.see(when - lasted)
            row.marks.append(TimelineMark(when - lasted, when, "wait", f"waits for {format_duration(lasted)}: {text}"))
    is_error = signature.role in _ERROR_ROLES and signature.fatal is not False
    is_warning = signature.role in _ERROR_ROLES and signature.fatal is False
    if is_error:
        row.error_lines.add(match.line)
    elif is_warning:
        row.warning_lines.add(match.line)
    if when is not None and (is_error or is_warning):
        row.marks.append(TimelineMark(when, when, "error" if is_error else "warning", text))
    elif when is not None and signature.fact == "done":
        row.marks.append(TimelineMark(when, when, "end", text))


def _lay_out(row: TimelineRow, begin: float, span: float) -> None:
    """Turns the times of a row into positions, and thins its marks."""

    def place(at: float) -> float:
        return round(_WIDTH * (at - begin) / span, 1)

    by_kind: dict[str, list[TimelineMark]] = defaultdict(list)
    for mark in sorted(row.marks, key=lambda mark: mark.at):
        by_kind[mark.kind].append(TimelineMark(place(mark.at), place(mark.until), mark.kind, mark.text))
    row.marks = [mark for kind in ("wait", "warning", "error", "end") for mark in _thinned(by_kind[kind])]
    row.step_path = "".join(f"M{mark.at:g} 5v8" for mark in _thinned(by_kind["step"]))
    assert row.first is not None and row.last is not None
    row.marks.insert(0, TimelineMark(place(row.first), place(row.last), "life"))


def _thinned(marks: Sequence[TimelineMark]) -> list[TimelineMark]:
    if len(marks) <= _MAX_MARKS:
        return list(marks)
    stride = (len(marks) - 1) / (_MAX_MARKS - 1)
    return [marks[round(index * stride)] for index in range(_MAX_MARKS)]


def _fold(rows: Sequence[TimelineRow]) -> tuple[tuple[TimelineRow, ...], tuple[RowGroup, ...]]:
    """Folds rows that end alike, if there are many rows; culprits and a few of each kind of end stay visible."""
    if len(rows) <= MAX_ROWS_SHOWN:
        return tuple(rows), ()
    shown = [row for row in rows if row.culprit][:MAX_ROWS_SHOWN]
    kinds: dict[str, list[TimelineRow]] = defaultdict(list)
    for row in rows:
        if row not in shown:
            kinds[row.end or ("has errors" if row.errors else "prints no error and no end")].append(row)
    room = max(1, (MAX_ROWS_SHOWN - len(shown)) // (2 * len(kinds) or 1))
    groups = []
    for end, same in sorted(kinds.items(), key=lambda each: len(each[1])):
        shown += same[:room]
        if same[room:]:
            groups.append(RowGroup(f"{len(same) - room} more of which each {end}", tuple(same[room:])))
    return tuple(shown), tuple(groups)
