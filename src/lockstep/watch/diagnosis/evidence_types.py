"""The vocabulary of evidence: processes, calls, communicators. Imports no numpy."""

from dataclasses import dataclass
from enum import IntEnum

NO_EXIT_CODE = -(2**31)
"""The exit code of a process that has not ended, or of which nobody knows it."""
UNKNOWN = -1
"""A sequence number of which there is no evidence; 0 means that nothing was entered yet, for certain."""


class Liveness(IntEnum):
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
class ProcessInfo:
    """Who a process is. Ranks are unique within a role."""

    name: str
    role: str
    rank: int
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class ProcessNote:
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
class CommunicatorInfo:
    name: str
    description: str = ""
    backend: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """What a collective was called with."""

    operation: str
    shapes: str = ""
    dtype: str = ""
    root: int | None = None
    site: str = ""
    """`file.py:31 in function`; not part of what must agree between ranks."""


class WaitCondition(IntEnum):
    """What ends a wait."""

    ALL = 0
    """Every one of those waited for."""
    ANY = 1
    """One of them: a queue fed by many, a receive from anybody."""
