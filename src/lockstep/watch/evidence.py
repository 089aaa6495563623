"""What is known of a job at one moment, from whatever source: live beacons, flight-recorder dumps, recorded incidents.

Arrays, because 16,000 ranks in several communicators are judged many times a minute. Times are seconds on one clock,
the one of who made the snapshot; NaN means "not known", and what is not known is never held against anybody.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

NO_CODE = -(2**31)
"""The exit code of a process that has not ended, or of which nobody knows it."""
UNKNOWN = -1
"""A sequence number of which there is no evidence; 0 means that nothing was entered yet, for certain."""


class Life(IntEnum):
    """How a process is, as its parent or its host says."""

    RUNNING = 0
    STOPPED = 1
    """By a signal or a debugger (`T`, `t` in /proc)."""
    DEAD = 2
    """Ended by a signal or with an exit code that is not 0."""
    LEFT = 3
    """Ended with exit code 0."""
    UNSEEN = 4
    """It should be there and was never heard of."""
    LOST = 5
    """Its host is not heard of any more."""


@dataclass(frozen=True, slots=True)
class Process:
    """Who a process is. Ranks are unique within a role."""

    name: str
    role: str
    rank: int
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """What is known of few processes only."""

    where: str = ""
    """The innermost line of the user's code: `score() at reward.py:31`."""
    error: str = ""
    """The exception that it raised, as printed."""
    cause: str = ""
    """A class of FAILURES.md that its end proves (`host_oom`, `storage_fault`), empty without proof."""
    ours: bool = False
    """It was ended or stopped by an action of ours: an effect, never a cause."""
    expected_s: float = float("nan")
    """How long the stage it is in has taken at most in this job."""


@dataclass(frozen=True, slots=True)
class Processes:
    """All processes, `[processes]` each."""

    who: Sequence[Process]
    life: NDArray[np.int8]
    exit_code: NDArray[np.int32]
    """Minus the number of the signal, as subprocess has it; `NO_CODE`."""
    ended_at: Floats
    moved_at: Floats
    """When a counter or the stage last changed."""
    active_at: Floats
    """When it last used the CPU, a disk, a network or a GPU worth speaking of."""
    same_stack_since: Floats
    """Since when every stack that was taken of it was the same."""
    stage: Sequence[str] = ()
    notes: Mapping[int, Note] = field(default_factory=dict)
    """By index."""


@dataclass(frozen=True, slots=True)
class Communicator:
    name: str
    description: str = ""
    backend: str = ""


@dataclass(frozen=True, slots=True)
class Communicators:
    """Memberships of processes in communicators, `[memberships]` each, those of a communicator behind one another in
    the order of their ranks in it."""

    about: Sequence[Communicator]
    starts: Integers
    """`[communicators + 1]`: where the memberships of each begin."""
    process: Integers
    """Which process it is."""
    entered: Integers
    """Sequence number of the last collective entered; `UNKNOWN` without evidence."""
    completed: Integers
    entered_at: Floats
    completed_at: Floats
    ranks: Integers | None = None
    """What the member says of the communicator's size, `UNKNOWN` if nothing; for members made with different lists."""
    blind: NDArray[np.bool_] | None = None
    """True where counts miss part of what the member does (point-to-point with gloo): absence proves nothing."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a collective was called with."""

    operation: str
    shapes: str = ""
    dtype: str = ""
    root: int | None = None
    site: str = ""
    """`file.py:31 in function`; not part of what must agree between ranks."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The newest collectives of members of which is known what they were called with, `[calls]` each."""

    membership: Integers
    seq: Integers
    signature: NDArray[np.uint64]
    """Of operation, shapes, dtype and root: equal where the members fit together."""
    about: Mapping[int, Call]
    """By signature: one of the calls."""
    sites: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """By (membership, sequence number), where known."""
    sizes_vary: frozenset[str] = frozenset({"all_to_all", "gather_object", "all_gather_object", "send", "recv"})
    """Operations whose shapes may differ between ranks."""


class Needs(IntEnum):
    """What ends a wait."""

    ALL = 0
    """Every one of those waited for."""
    ANY = 1
    """One of them: a queue fed by many, a receive from anybody."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A wait outside of collectives: a remote call, a queue, HTTP, a store key, a file, a lock, a receive."""

    process: int
    on: tuple[int, ...]
    """Processes; empty when the one waited for is none of the job's."""
    outside: str = ""
    """Who is waited for outside of the job: `judge.example:8000`."""
    needs: Needs = Needs.ALL
    kind: str = ""
    why: str = ""
    since: float = float("nan")
    moved_at: float = float("nan")
    """When the one waited for last made progress, as far as the waiter saw."""
    main: bool = True
    """False for a wait of a background thread, which keeps nobody else waiting."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A snapshot."""

    at: float
    processes: Processes
    communicators: Communicators
    calls: Calls
    edges: Sequence[Edge] = ()
    source: str = "beacons"
    """beacons, dumps or incident."""
    gaps: Sequence[str] = ()
    """What is missing, in words: `no dump of rank 3`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
