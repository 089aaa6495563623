"""A snapshot of a job, built from live beacons, flight-recorder dumps or recorded incidents.

It consists of arrays, because jobs of 16,000 ranks in several communicators are diagnosed many times a minute. Times
are seconds on the clock of the process that made the snapshot. NaN means "unknown"; missing evidence never makes a
process a culprit. Sources may omit every field that has a default.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.watch.diagnosis.evidence_types import (
    CollectiveCall,
    CommunicatorInfo,
    ProcessInfo,
    ProcessNote,
    WaitCondition,
)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ProcessTable:
    """A table of all processes; columns `[processes]`."""

    info: Sequence[ProcessInfo]
    liveness: NDArray[np.int8]
    exit_code: NDArray[np.int32]
    """Negative signal number, as in subprocess, or `NO_EXIT_CODE`."""
    ended_at: FloatArray
    """When the process ended or was stopped."""
    progressed_at: FloatArray
    """When a counter or the stage last changed."""
    active_at: FloatArray
    """When the process last made notable use of the CPU, a disk, a network or a GPU."""
    same_stack_since: FloatArray
    """Since when all sampled stacks of the process have been equal."""
    stage: Sequence[str] = ()
    notes: Mapping[int, ProcessNote] = field(default_factory=dict)
    """Notes by index of the process."""
    seen_at: FloatArray | None = None
    """When each process was last observed, which is before the snapshot if a host's report is late. None: all were
    observed at the time of the snapshot."""


@dataclass(frozen=True, slots=True)
class MembershipTable:
    """Memberships of processes in communicators; columns `[memberships]`, grouped by communicator in rank order."""

    info: Sequence[CommunicatorInfo]
    starts: IntArray
    """`[communicators + 1]`: the first membership of each."""
    process: IntArray
    """Index of the process."""
    entered: IntArray
    """Sequence number of the last collective entered; `UNKNOWN` without evidence."""
    completed: IntArray
    entered_at: FloatArray
    completed_at: FloatArray
    member_list: IntArray | None = None
    """Identifies the member list that the process created the communicator with (a digest, or its size), or `UNKNOWN`;
    detects different lists."""
    uncertain: NDArray[np.bool_] | None = None
    """True where counts are incomplete or include other calls (point-to-point with gloo): absence proves nothing."""
    blocked: NDArray[np.int8] | None = None
    """1 if a relevant thread waits inside the collective entered last (or in its handle's `wait()`), 0 if it does not
    (an asynchronous one runs in the background), else `UNKNOWN`."""

    def peers_of(self, processes: Collection[int]) -> set[int]:
        """All other processes that communicators connect with these, directly or indirectly."""
        group = np.repeat(np.arange(len(self.info)), np.diff(self.starts))
        found, before = set(processes), -1
        while len(found) > before:
            before = len(found)
            theirs = group[np.isin(self.process, list(found))]
            found.update(self.process[np.isin(group, theirs)].tolist())
        return found - set(processes)


@dataclass(frozen=True, slots=True)
class CallTable:
    """The newest collectives of members whose arguments are known; columns `[calls]`."""

    membership: IntArray
    seq: IntArray
    signature: NDArray[np.uint64]
    """A digest of operation, shapes, dtype and root: equal where the members' calls match. It should leave out shapes
    that may differ. Signatures of different sources (Python's calls, the flight recorder) must not be mixed within a
    communicator."""
    by_signature: Mapping[int, CollectiveCall]
    """By signature, one of the calls."""
    sites: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """By (membership, sequence number), where known."""
    sizes_vary: frozenset[str] = frozenset({"all_to_all", "gather_object", "all_gather_object", "send", "recv"})
    """Operations whose shapes may differ between ranks."""
    schedule: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """By (communicator, sequence number), the signature that the step's schedule expects, if there is one."""


@dataclass(frozen=True, slots=True)
class WaitEdge:
    """A wait outside of collectives: a remote call, a queue, HTTP, a store key, a file, a lock, a receive."""

    process: int
    on: tuple[int, ...]
    """Processes; empty if it waits for something outside the job."""
    outside: str = ""
    """The target outside the job: `judge.example:8000`."""
    needs: WaitCondition = WaitCondition.ALL
    kind: str = ""
    why: str = ""
    since: float = float("nan")
    progressed_at: float = float("nan")
    """When the target last made progress, as seen by the waiting process."""
    until: float = float("nan")
    """When the wait times out as things stand; NaN without a known bound."""
    main: bool = True
    """False for a wait of a background thread, which holds up no other process."""
    idle: bool = False
    """A wait for the next request of the process it serves: it has answered all requests, so it holds up no other
    process, and mutual waits with that process are no deadlock."""
    rendezvous: str = ""
    """Waits with equal, non-empty names wait for each other's arrival (a rendezvous, a store barrier): a process in it
    has arrived, and the others no longer wait for it."""
    members: str = ""
    """The member list that the process joins the rendezvous with; it must be equal on all members."""
    unwatched: int = 0
    """The number of participants in the rendezvous on hosts that are not watched."""


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
    """Missing evidence, as text: `no dump of rank 3`."""
    extra: Mapping[str, Any] = field(default_factory=dict)


SERVICE_WAIT_KINDS = ("http", "read", "write", "send", "store", "connect")
"""Kinds of waits whose unknown targets are services. In other kinds they are the process's own threads, or nothing."""


def drop_uninformative(evidence: Evidence) -> Evidence:
    """Drops edges without a meaningful target: a thread's own helper, a file, the clock. A process that waits so is
    treated as waiting for no other process."""
    return replace(evidence, edges=[edge for edge in evidence.edges if _is_informative(edge)])


def _is_informative(edge: WaitEdge) -> bool:
    return bool(edge.on) or edge.idle or bool(edge.rendezvous) or edge.kind in SERVICE_WAIT_KINDS
