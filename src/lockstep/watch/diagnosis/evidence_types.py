"""The vocabulary of evidence: processes, calls, communicators. Imports no numpy."""

from dataclasses import dataclass
from enum import IntEnum

NO_EXIT_CODE = -(2**31)
"""The exit code of a process that has not ended, or whose code is unknown."""
UNKNOWN = -1
"""A sequence number without evidence. 0 means that certainly nothing was entered yet."""


class Liveness(IntEnum):
    """The state of a process according to its parent or its host."""

    RUNNING = 0
    STOPPED = 1
    """By a signal or a debugger (`T`, `t` in /proc)."""
    DEAD = 2
    """Ended by a signal or with an exit code that is not 0."""
    LEFT = 3
    """Ended with exit code 0."""
    UNSEEN = 4
    """Expected, but never reported by any host."""
    LOST = 5
    """Its host no longer reports."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """The identity of a process. Ranks are unique within a role."""

    name: str
    role: str
    rank: int
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class ProcessNote:
    """What is known of a few processes only."""

    where: str = ""
    """The innermost line of the user's code: `score() at reward.py:31`."""
    error: str = ""
    """The exception that it raised, as printed."""
    cause: str = ""
    """The failure class (FAILURES.md) that its exit proves (`host_oom`, `storage_fault`); empty without proof."""
    ours: bool = False
    """We ended or stopped it: an effect, never a cause."""
    expected_s: float = float("nan")
    """The longest duration so far, in this job, of the stage it is in."""


@dataclass(frozen=True, slots=True)
class CommunicatorInfo:
    name: str
    description: str = ""
    backend: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """The arguments of a collective that are recorded."""

    operation: str
    shapes: str = ""
    dtype: str = ""
    root: int | None = None
    site: str = ""
    """`file.py:31 in function`; it need not agree between ranks."""


class WaitCondition(IntEnum):
    """What ends a wait."""

    ALL = 0
    """Every process waited for."""
    ANY = 1
    """Any of them: a queue fed by many, a receive from any source."""
