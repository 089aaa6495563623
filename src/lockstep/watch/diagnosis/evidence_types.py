"""Types of the evidence that need no numpy: processes, calls, communicators and targets of waits."""

from dataclasses import dataclass
from enum import IntEnum

NO_EXIT_CODE = -(2**31)
"""The exit code of a process that has not ended, or whose code is unknown."""
UNKNOWN = -1
"""An unknown sequence number. 0 means that the process has certainly entered no collective yet."""


class Liveness(IntEnum):
    """The state of a process according to its parent or its host."""

    RUNNING = 0
    STOPPED = 1
    """Stopped by a signal or a debugger (state `T` or `t` in /proc)."""
    DEAD = 2
    """The process ended by a signal or with an exit code other than 0."""
    EXITED = 3
    """The process ended with exit code 0."""
    UNSEEN = 4
    """The process is expected, but no host has reported it yet."""
    LOST = 5
    """The host of the process no longer reports."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """The identity of a process. Ranks are unique within a role."""

    name: str
    role: str
    rank: int
    host: str = ""
    pid: int = 0
    parent: str = ""
    """The name of the process on the same host that this one is a part of (an engine's worker in a rank). Verdicts name
    that process."""


@dataclass(frozen=True, slots=True)
class ProcessNote:
    """Facts about a process that are known for few processes only."""

    where: str = ""
    """The innermost line of the user's code: `score() at reward.py:31`."""
    error: str = ""
    """The exception that ended the process, as printed."""
    cause: str = ""
    """The failure class (FAILURES.md) that the exit of the process proves (`host_oom`, `storage_fault`); empty without
    proof."""
    ours: bool = False
    """True if Lockstep ended or stopped the process, so its end is never the cause of a failure."""
    expected_s: float = float("nan")
    """The longest duration so far, in this job, of the stage that the process is in."""
    unrecorded: bool = False
    """True if the process has communicators that are not recorded, in which it may wait."""
    device_moves: bool = False
    """True if the device has ended an operation that was issued after the one that the process waits in, so that it has
    not stopped."""
    waits_for_device: bool = False
    """True if the main thread is in a synchronisation with a device, so that its use of the CPU proves nothing as long
    as its stack does not change."""


@dataclass(frozen=True, slots=True)
class CommunicatorInfo:
    name: str
    description: str = ""
    backend: str = ""
    rendezvous: str = ""
    """The name of the rendezvous in which its members create it, as in `WaitEdge.rendezvous`; empty if unknown."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """The arguments of a collective that are recorded."""

    operation: str
    shapes: str = ""
    dtype: str = ""
    root: int | None = None
    site: str = ""
    """`file.py:31 in function`; it need not agree between ranks."""


FROM_CPP = 0x432B2B
"""The signature of all calls from C++, which are counted, but not recorded: DDP's reductions of gradients."""
CALL_FROM_CPP = CollectiveCall("a collective from C++ (such as DDP's)")

TRANSFER = "send/recv"
"""The operation of a communicator that stands for the sends of one rank to another; the n-th send meets the n-th
receive."""

_NEED_ALL = ("all_", "_all_", "allreduce", "allgather", "alltoall", "reduce_scatter", "_reduce_scatter", "barrier")


def needs_all_members(operation: str) -> bool:
    """Whether no member can complete the operation before all have entered it; in a broadcast or a reduction some
    can."""
    return operation.lower().startswith(_NEED_ALL)


class WaitCondition(IntEnum):
    """Which of the processes that a process waits for must act to end the wait."""

    ALL = 0
    """All of them must act."""
    ANY = 1
    """One of them is enough: a queue with several producers, a receive from any source."""


@dataclass(frozen=True, slots=True)
class WaitAlias:
    """The meaning of a name in waits that is neither a process nor a role: all or any of the processes of `role`."""

    role: str
    needs: WaitCondition = WaitCondition.ALL
