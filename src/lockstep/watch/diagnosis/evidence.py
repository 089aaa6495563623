"""A snapshot of a job, built from live beacons, flight-recorder dumps or recorded incidents.

A snapshot consists of arrays, because jobs of 16,000 ranks in several communicators are diagnosed many times a minute.
Times are seconds on the clock of the process that made the snapshot; NaN means "unknown". Missing evidence never makes
a process a culprit. Fields with a default are optional."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.watch.diagnosis.device_evidence import ProcessDevice
from lockstep.watch.diagnosis.evidence_types import (
    UNKNOWN,
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
    """The time since which all sampled stacks of the process have been equal."""
    stage: Sequence[str] = ()
    notes: Mapping[int, ProcessNote] = field(default_factory=dict)
    """Notes by index of the process."""
    seen_at: FloatArray | None = None
    """When each process was last observed, which is earlier than the snapshot if a host's report is late. None if all
    were observed at the time of the snapshot."""
    moved_at: FloatArray | None = None
    """When each process or a child of it last transferred data or touched new memory as it worked, if that is later
    than its last progress; else NaN. None if it is known of none."""


@dataclass(frozen=True, slots=True)
class MembershipTable:
    """Memberships of processes in communicators; columns `[memberships]`, grouped by communicator in rank order.

    The messages from one process to another on a communicator are a communicator of these two, the sender first: its
    n-th collective is the n-th send and the n-th receive.
    """

    info: Sequence[CommunicatorInfo]
    starts: IntArray
    """`[communicators + 1]`: the first membership of each communicator."""
    process: IntArray
    """Index of the process."""
    entered: IntArray
    """Sequence number of the last collective entered; `UNKNOWN` without evidence."""
    completed: IntArray
    """Sequence number of the last collective completed; `UNKNOWN` without evidence."""
    entered_at: FloatArray
    completed_at: FloatArray
    member_list: IntArray | None = None
    """A number (a digest or the size) that identifies the member list with which the process created the communicator,
    or `UNKNOWN`. The diagnosis detects different lists by it."""
    uncertain: NDArray[np.bool_] | None = None
    """True where the counts are incomplete or include other calls, so that they do not prove
    that the process has not entered a collective."""
    blocked: NDArray[np.int8] | None = None
    """1 if a thread of the process waits in the collective that it entered last (or in its handle's `wait()`), 0 if
    none does (an asynchronous collective runs in the background), else `UNKNOWN`."""
    started: IntArray | None = None
    """Sequence number of the last collective that the device has started; `UNKNOWN` without evidence."""
    pending_at: FloatArray | None = None
    """When the oldest unfinished collective was issued; NaN without evidence."""
    on_device: NDArray[np.bool_] | None = None
    """True where collectives run on a device after their calls have returned (NCCL): *entered* then means that the host
    has issued the collective, and the device reaches it when it has finished what was issued before."""

    def peers_of(self, processes: Collection[int]) -> set[int]:
        """All other processes that communicators connect with the given ones, directly or indirectly."""
        group = np.repeat(np.arange(len(self.info)), np.diff(self.starts))
        found, before = set(processes), -1
        while len(found) > before:
            before = len(found)
            groups_found = group[np.isin(self.process, list(found))]
            found.update(self.process[np.isin(group, groups_found)].tolist())
        return found - set(processes)


@dataclass(frozen=True, slots=True)
class CallTable:
    """The newest collective calls of each member, if their arguments are known; columns `[calls]`."""

    membership: IntArray
    seq: IntArray
    signature: NDArray[np.uint64]
    """A digest of operation, shapes, dtype and root; matching calls have equal signatures. It should leave out shapes
    that may differ between ranks. All signatures of a communicator must come from one source (the recorded Python calls
    or the flight recorder)."""
    by_signature: Mapping[int, CollectiveCall]
    """One call of each signature."""
    sites: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Call sites by (membership, sequence number), as far as known."""
    sizes_vary: frozenset[str] = frozenset({"all_to_all", "gather_object", "all_gather_object", "send", "recv"})
    """Operations whose shapes may differ between ranks."""
    schedule: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """The signature that the step's schedule expects, by (communicator, sequence number); empty without a schedule."""


@dataclass(frozen=True, slots=True)
class WaitEdge:
    """A wait outside of collectives: a remote call, a queue, HTTP, a store key, a file, a lock, a receive."""

    process: int
    on: tuple[int, ...]
    """The processes that the process waits for; empty if the target is outside the job."""
    outside: str = ""
    """The target outside the job: `judge.example:8000`."""
    needs: WaitCondition = WaitCondition.ALL
    kind: str = ""
    why: str = ""
    """What the wait is for: `scores of step 7`."""
    since: float = float("nan")
    progressed_at: float = float("nan")
    """When the target last made progress, as seen by the waiting process."""
    until: float = float("nan")
    """When the wait will time out if there is no further progress; NaN if unknown."""
    main: bool = True
    """False for a wait of a background thread, which blocks no other process."""
    idle: bool = False
    """True if a service waits for its next request: it has answered all requests, so it blocks no other process, and a
    mutual wait with its client is no deadlock."""
    rendezvous: str = ""
    """The name of the rendezvous or store barrier that the process has joined; it waits only for processes that have
    not joined yet."""
    members: str = ""
    """The member list with which the process joins the rendezvous; all members must give the same list."""
    member_list: int = UNKNOWN
    """Identifies that list, as in `MembershipTable.member_list`."""
    unwatched: int = 0
    """The number of participants in the rendezvous on hosts that are not watched."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A snapshot of a job."""

    at: float
    processes: ProcessTable
    communicators: MembershipTable
    calls: CallTable
    edges: Sequence[WaitEdge] = ()
    source: str = "beacons"
    """`beacons`, `dumps` or `incident`."""
    gaps: Sequence[str] = ()
    """Missing evidence, as text: `no dump of rank 3`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    devices: Mapping[int, tuple[ProcessDevice, ...]] = field(default_factory=dict)
    """The GPUs that processes use, by index of the process, as far as they are sampled."""


def with_parts(info: Sequence[ProcessInfo], chosen: Collection[tuple[str, str]]) -> list[int]:
    """The indices of the chosen processes, given by host and name, and of their parts."""
    return [
        index
        for index, each in enumerate(info)
        if (each.host, each.name) in chosen or (each.parent and (each.host, each.parent) in chosen)
    ]


SERVICE_WAIT_KINDS = ("http", "read", "write", "send", "store", "connect")
"""Kinds of waits whose unknown targets are services outside the job. In other kinds, an unknown target is a thread of
the same process or no process at all."""


def drop_uninformative(evidence: Evidence) -> Evidence:
    """Drops waits without a meaningful target, such as a thread of the same process, a file or the clock. A process
    with only such waits counts as waiting for no other process."""
    return replace(evidence, edges=[edge for edge in evidence.edges if _is_informative(edge)])


def _is_informative(edge: WaitEdge) -> bool:
    return bool(edge.on) or edge.idle or bool(edge.rendezvous) or edge.kind in SERVICE_WAIT_KINDS
