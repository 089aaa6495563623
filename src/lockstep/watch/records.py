"""What a beacon says, as read."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Counter:
    """A progress counter; `updated_ns` is on the monotonic clock."""

    value: int
    total: int | None
    updated_ns: int


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """A wait that a thread is in. Times are nanoseconds of the host's monotonic clock."""

    kind: str
    whom: str
    why: str
    since_ns: int
    deadline_ns: int | None
    moved_ns: int
    """When the one waited for last made progress, as far as the waiter saw; `since_ns` when it saw none."""
    thread: int
    thread_name: str


@dataclass(frozen=True, slots=True)
class Event:
    number: int
    at_ns: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class BeaconState:
    """What a beacon said when it was read."""

    path: Path
    run: str
    name: str
    role: str
    rank: int
    pid: int
    start_ticks: int
    created_ns: int
    created_wall: float
    beat_ns: int
    """Last sign of life that a background thread gave, 0 when the process gives none."""
    stage: str
    stage_since_ns: int
    counters: dict[str, Counter] = field(default_factory=dict)
    waits: tuple[WaitRecord, ...] = ()
    events: tuple[Event, ...] = ()
    moves: int = 0
    """Grows with every change of a counter or of the stage."""
    torn: int = 0
    """Records that could not be read: the writer died or was stopped while it wrote them."""
