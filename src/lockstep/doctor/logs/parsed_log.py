"""What is extracted from one log file: rule matches, progress ticks, tracebacks, stacks, last lines."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.doctor.knowledge.knowledge_base import FailureRule
from lockstep.doctor.logs.line_origin import UNKNOWN_ORIGIN, LineOrigin
from lockstep.doctor.logs.stack_traces import LoggedStack, Traceback


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """A rule matched.

    Attributes:
        who: The speaker, with what the file's name adds.
        when: Seconds since 1970 on the clock of the file; None where nothing near has a time.
        file: Name of the source.
        source: Number of the source, in the order in which they were given.
        line: Number of the line.
        fields: Named groups.
    """

    rule: FailureRule
    origin: LineOrigin
    when: float | None
    file: str
    source: int
    line: int
    text: str
    fields: Mapping[str, str]
    traceback: Traceback | None = None

    @property
    def place(self) -> tuple[int, int]:
        return self.source, self.line


@dataclass(frozen=True, slots=True)
class ProgressTick:
    """A counter of progress on a line."""

    origin: LineOrigin
    line: int
    when: float | None
    epoch: int
    step: int
    of: int
    bar: bool = False


@dataclass(frozen=True, slots=True)
class TailLine:
    """A line near the end of a file."""

    line: int
    when: float | None
    text: str


@dataclass
class ParsedLog:
    """Of one source all that was seen."""

    name: str
    source: int
    origin: LineOrigin = UNKNOWN_ORIGIN
    node: int | None = None
    lines: int = 0
    kind: str = "log"
    """See `log_lines`."""
    first: float | None = None
    last: float | None = None
    dated_lines: tuple[int, int] = (0, 0)
    """The first and the last line with a time of its own, as far as they were looked at."""
    matches: list[RuleMatch] = field(default_factory=list)
    ticks: list[ProgressTick] = field(default_factory=list)
    tracebacks: list[tuple[LineOrigin, float | None, Traceback]] = field(default_factory=list)
    origins: dict[LineOrigin, int] = field(default_factory=dict)
    """Who speaks, and the last line in which."""
    tail_lines: dict[int | None, list[TailLine]] = field(default_factory=dict)
    """By rank, its last lines."""
    stacks: list[LoggedStack] = field(default_factory=list)
    has_year: bool = False
    """Some line names the year."""
    counts: Counter[str] = field(default_factory=Counter)
    """By rule, how often."""
