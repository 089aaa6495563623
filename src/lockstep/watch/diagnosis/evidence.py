"""What is known of a job at one moment, from any source: live beacons, flight-recorder dumps, recorded incidents.

Arrays, because 16,000 ranks in several communicators are judged many times a minute. Times are seconds on one
clock, that of the process that made the snapshot. NaN means "not known", and what is not known is never held
against a process. A source fills in what it knows; every field with a default may be left out.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.watch.diagnosis.evidence_types import (
    NO_EXIT_CODE,
    UNKNOWN,
    CollectiveCall,
    CommunicatorInfo,
    Liveness,
    ProcessInfo,
    ProcessNote,
    WaitCondition,
)

__all__ = [
    "NO_EXIT_CODE",
    "UNKNOWN",
    "CallTable",
    "CollectiveCall",
    "CommunicatorInfo",
    "Evidence",
    "FloatArray",
    "IntArray",
    "Liveness",
    "MembershipTable",
    "ProcessInfo",
    "ProcessNote",
    "ProcessTable",
    "WaitCondition",
    "WaitEdge",
]  # fmt: skip

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """All processes, `[processes]` each."""

    who: Sequence[ProcessInfo]
    life: NDArray[np.int8]
    exit_code: NDArray[np.int32]
    """Minus the number of the signal, as subprocess has it; `NO_EXIT_CODE`."""
    ended_at: FloatArray
    """When it ended; of one that is stopped, since when it is."""
    moved_at: FloatArray
    """When a counter or the stage last changed."""
    active_at: FloatArray
    """When it last used the CPU, a disk, a network or a GPU worth speaking of."""
    same_stack_since: FloatArray
    """Since when every stack that was taken of it was the same."""
    stage: Sequence[str] = ()
    notes: Mapping[int, ProcessNote] = field(default_factory=dict)
    """By index."""
    seen_at: FloatArray | None = None
    """When what is said here was so; older than the snapshot where a host's news are late. None: at the snapshot."""


@dataclass(frozen=True, slots=True)
class MembershipTable:
    """Memberships of processes in communicators, `[memberships]` each, those of a communicator behind one another in
    the order of their ranks in it."""

    about: Sequence[CommunicatorInfo]
    starts: IntArray
    """`[communicators + 1]`: where the memberships of each begin."""
    process: IntArray
    """Which process it is."""
    entered: IntArray
    """Sequence number of the last collective entered; `UNKNOWN` without evidence."""
    completed: IntArray
    entered_at: FloatArray
    completed_at: FloatArray
    ranks: IntArray | None = None
    """A number that stands for the list of members that the member made the communicator with (its size, or better a
    digest of the list), `UNKNOWN` if nothing is known; for members made with different lists."""
    blind: NDArray[np.bool_] | None = None
    """True where counts miss part of what the member does, or count other things too (point-to-point with gloo):
    absence proves nothing."""
    blocked: NDArray[np.int8] | None = None
    """1 where a thread that matters waits inside of the collective entered last (or in its handle's `wait()`), 0 where
    it is known to be elsewhere (an asynchronous one goes on behind it), `UNKNOWN` where nobody knows."""

    def peers_of(self, processes: Collection[int]) -> set[int]:
        """Everybody else whom communicators connect with these processes, however indirectly."""
        group = np.repeat(np.arange(len(self.about)), np.diff(self.starts))
        found, before = set(processes), -1
        while len(found) > before:
            before = len(found)
            theirs = group[np.isin(self.process, list(found))]
            found.update(self.process[np.isin(group, theirs)].tolist())
        return found - set(processes)


@dataclass(frozen=True, slots=True)
class CallTable:
    """The newest collectives of members of which is known what they were called with, `[calls]` each."""

    membership: IntArray
    seq: IntArray
    signature: NDArray[np.uint64]
    """Of operation, shapes, dtype and root: equal where the members fit together. Best made without the shapes for
    operations whose shapes may differ. Signatures of different makers (Python's calls, the flight recorder) must not
    be mixed within a communicator."""
    about: Mapping[int, CollectiveCall]
    """By signature: one of the calls."""
    sites: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """By (membership, sequence number), where known."""
    sizes_vary: frozenset[str] = frozenset({"all_to_all", "gather_object", "all_gather_object", "send", "recv"})
    """Operations whose shapes may differ between ranks."""
    schedule: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By (communicator, sequence number): the signature that the step's schedule says, where there is one."""


@dataclass(frozen=True, slots=True)
class WaitEdge:
    """A wait outside of collectives: a remote call, a queue, HTTP, a store key, a file, a lock, a receive."""

    process: int
    on: tuple[int, ...]
    """Processes; empty when the one waited for is none of the job's."""
    outside: str = ""
    """Who is waited for outside of the job: `judge.example:8000`."""
    needs: WaitCondition = WaitCondition.ALL
    kind: str = ""
    why: str = ""
    since: float = float("nan")
    moved_at: float = float("nan")
    """When the one waited for last made progress, as far as the waiter saw."""
    until: float = float("nan")
    """When the waiter gives up by itself, as things stand; NaN where it has no bound, or nobody knows it."""
    main: bool = True
    """False for a wait of a background thread, which keeps nobody else waiting."""
    idle: bool = False
    """A wait for the next order of whom it serves: it has answered all that it was asked, so who waits for it is not
    waited for in turn, and it is no deadlock that the two wait for each other."""
    meeting: str = ""
    """Waits with equal, not empty names wait for each other's arrival (a rendezvous, a store barrier): who is in it has
    arrived and is waited for no longer."""
    members: str = ""
    """Whom the process takes for the members of what is made in the meeting; equal on all."""
    elsewhere: int = 0
    """How many take part in the meeting of whom nothing is known: no watched host has them, or should have them."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A snapshot."""

    at: float
    processes: ProcessTable
    communicators: MembershipTable
    calls: CallTable
    edges: Sequence[WaitEdge] = ()
    source: str = "beacons"
    """beacons, dumps or incident."""
    gaps: Sequence[str] = ()
    """What is missing, in words: `no dump of rank 3`."""
    extra: Mapping[str, Any] = field(default_factory=dict)


SERVICE_WAIT_KINDS = ("http", "read", "write", "send", "store", "connect")
"""Kinds of waits whose unknown names are services; of the others they are a process's own threads, or nobody."""


def drop_uninformative(evidence: Evidence) -> Evidence:
    """Without the edges to nobody in particular: a thread's own helper, a file, the clock. Who waits so is itself what
    others wait for."""
    return replace(evidence, edges=[edge for edge in evidence.edges if _is_informative(edge)])


def _is_informative(edge: WaitEdge) -> bool:
    return bool(edge.on) or edge.idle or bool(edge.meeting) or edge.kind in SERVICE_WAIT_KINDS
