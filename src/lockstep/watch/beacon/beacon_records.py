"""The contents of a beacon, as read: counters, waits, events, calls, communicators."""

from dataclasses import dataclass, field
from pathlib import Path

from lockstep.base.wait_state import WaitRecord


@dataclass(frozen=True, slots=True)
class ProgressCounter:
    """A progress counter; `updated_ns` is on the monotonic clock."""

    value: int
    total: int | None
    updated_ns: int


@dataclass(frozen=True, slots=True)
class BeaconEvent:
    number: int
    at_ns: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call on a communicator that was issued from Python. Times are nanoseconds of the host's monotonic clock."""

    number: int
    """Counts all calls of this member on this communicator from 1, point-to-point calls included."""
    seq: int
    """The collective's sequence number on the communicator (collectives of C++ callers are counted too); of a
    point-to-point call that of the last collective before it."""
    issued: int
    """How many collectives this member has issued from Python on the communicator, this one included: members are
    compared by this number."""
    signature: int
    """64-bit digest of operation, shapes, dtype and root: equal on members that match."""
    operation: str
    """Empty when the text is no longer known; the signature remains."""
    shapes: str
    dtype: str
    root: int | None
    site: str
    """`/path/file.py:31 in function`: the innermost frame outside torch and lockstep; empty when not known."""
    stage: str
    """The stage in which the call was issued."""
    module: str
    """The module whose parameters FSDP2 gathers or reduces, for instance `layers.3`; empty for other calls."""
    entered_ns: int
    left_ns: int
    """When the call returned to Python (an asynchronous call returns once it is issued); 0 before that."""
    p2p: bool = False
    asynchronous: bool = False
    failed: bool = False
    """Whether the call ended with an exception of the backend."""
    refused: bool = False
    """Whether the call was refused: it did not match the call of a peer, and never reached the backend."""
    peer: int | None = None
    """The peer's rank in the communicator, for a point-to-point call; None for a receive from any source."""

    @property
    def inside(self) -> bool:
        return self.left_ns == 0

    @property
    def where(self) -> str:
        """The call site with the file's name instead of its path."""
        return self.site.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class CommunicatorRecord:
    """A communicator as one of its members reports it.

    Two sources are merged: the calls issued from Python, exact and at once, and c10d's own counts, which see the
    collectives of C++ callers too and are some 50 ms old. -1 is "not known"; 0 that nothing was entered, for certain.
    """

    slot: int
    name: str
    """c10d's name; counted per process, so equal names of two jobs are different communicators: see `identity`."""
    description: str
    backend: str
    size: int
    rank: int
    """The rank of this process in the communicator."""
    identity: int
    """Equal for all members of one communicator, also when they were given different member lists."""
    members: int
    """Digest of the members' global ranks."""
    created_ns: int
    loop_thread: int
    """Native id of gloo's thread for this communicator, 0 if not known; see `watch.recorder.abort`."""
    closed: bool
    """Whether the communicator was destroyed."""
    blind: bool
    """Whether point-to-point calls were made on it. Counts may then miss calls: a missing call proves nothing."""
    counted: bool
    """Whether c10d's counts are read for it: `entered` then includes collectives that C++ code calls."""
    entered: int
    entered_ns: int
    completed: int
    completed_ns: int
    issued: int
    """Collectives issued from Python."""
    newest: CallRecord | None
    """The newest call issued from Python."""
    inside: CallRecord | None
    """The call that this member is in now, or that it has issued asynchronously and c10d has not completed."""

    @property
    def label(self) -> str:
        """The communicator's description where it has one, else its name."""
        return self.description if self.description not in ("", "undefined") else self.name


@dataclass(frozen=True, slots=True)
class BeaconState:
    """The contents of a beacon at the time of reading."""

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
    counters: dict[str, ProgressCounter] = field(default_factory=dict)
    waits: tuple[WaitRecord, ...] = ()
    events: tuple[BeaconEvent, ...] = ()
    communicators: tuple[CommunicatorRecord, ...] = ()
    moves: int = 0
    """Grows with every change of a counter or of the stage, and with every call on a communicator."""
    torn: int = 0
    """Records that could not be read: the writer died or was stopped while it wrote them."""
