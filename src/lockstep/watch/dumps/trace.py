"""What is kept of a dump: numbers in columns. Imports the standard library only."""

from array import array
from dataclasses import dataclass, field

MOST_RANKS = 1 << 17
"""No job has more; a dump that says so is not believed."""
BLOCK = 128
"""Collectives with equal `sequence // BLOCK` are compared at once."""


class NotADump(ValueError):
    """The file holds something else, or is damaged; the text says what."""


@dataclass(slots=True)
class Group:
    """What one rank said of one communicator. Times are Unix seconds, sequence numbers -1 where not known."""

    name: str
    description: str = ""
    backend: str = ""
    members: str = ""
    """Its ranks as the dump lists them, `[0, 1]`; empty if it does not say."""
    entered: int = -1
    completed: int = -1
    entered_at: float = float("nan")
    completed_at: float = float("nan")
    ended: int = -1
    """The last collective that has ended on this rank, while earlier ones may go on."""
    certain: int = -1
    """The last collective that this rank finished for certain and that nobody can finish without everybody."""
    first: int = -1
    """The oldest collective that is still in the ring."""
    waits: list[tuple[str, float]] = field(default_factory=list)
    """Sends and receives that have not ended: (`recv 1<-0`, since)."""
    blind: bool = False
    """The counters moved without an entry: point-to-point with gloo."""
    number: int = -1
    """Under which `pg_status` has it."""
    operations: int = -1
    """How many operations it has begun, point-to-point ones included."""
    gave_up: bool = False
    """The watchdog gave the newest one up."""
    digested: int = -1
    """The first of the blocks of `BLOCK` collectives that `digests` stand for, by number; -1 if there are none."""
    digests: "array[int]" = field(default_factory=lambda: array("Q"))
    """Of the calls of whole blocks that are older than the columns below: equal where all calls are."""
    sequence: "array[int]" = field(default_factory=lambda: array("q"))
    signature: "array[int]" = field(default_factory=lambda: array("Q"))
    created: "array[int]" = field(default_factory=lambda: array("q"))
    """Nanoseconds."""
    site: "array[int]" = field(default_factory=lambda: array("i"))
    """An index into `Trace.sites`."""


@dataclass(slots=True)
class Trace:
    """What one rank's dump says."""

    version: str = ""
    library: str = ""
    groups: list[Group] = field(default_factory=list)
    entries: int = 0
    whole: bool = False
    """Every collective since the process began is in it."""
    began: float = float("nan")
    """When the first one was entered, if that is still in the ring."""
    newest: float = float("nan")
    world: int = 0
    """The job has at least so many ranks."""
    sites: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
