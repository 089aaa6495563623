"""The data extracted from one log file: rule matches, progress counters, tracebacks, stacks, last lines."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from lockstep.doctor.knowledge.knowledge_base import FailureRule
from lockstep.doctor.logs.line_origin import UNKNOWN_ORIGIN, LineOrigin
from lockstep.doctor.logs.stack_traces import LoggedStack, Traceback


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """A match of a rule.

    Attributes:
        origin: The origin of the line, completed from the name of the file.
        when: Seconds since 1970 on the file's clock; None if no nearby line has a timestamp.
        file: Name of the source.
        source: Number of the source, counted in the order in which the sources were given.
        line: Number of the line.
        fields: Named groups of the pattern.
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
class StepCounter:
    """A progress counter on a line."""

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
    """The data extracted from one source."""

    name: str
    source: int
    origin: LineOrigin = UNKNOWN_ORIGIN
    node: int | None = None
    lines: int = 0
    kind: str = "log"
    """See `log_lines.kind_of_file`."""
    first: float | None = None
    last: float | None = None
    dated_lines: tuple[int, int] = (0, 0)
    """The first and the last examined line that have a timestamp."""
    matches: list[RuleMatch] = field(default_factory=list)
    counters: list[StepCounter] = field(default_factory=list)
    tracebacks: list[tuple[LineOrigin, float | None, Traceback]] = field(default_factory=list)
    origins: dict[LineOrigin, int] = field(default_factory=dict)
    """The origins in the file, each with its last line."""
    tail_lines: dict[int | None, list[TailLine]] = field(default_factory=dict)
    """The last lines of each rank."""
    stacks: list[LoggedStack] = field(default_factory=list)
    has_year: bool = False
    """Whether some line names the year."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of matches per rule."""
