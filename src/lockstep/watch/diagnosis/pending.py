"""Which collectives are pending: a process waits in them, or has issued them and its device has not reached them.

Where a call returns when its data is there (gloo), a process waits in what its host has entered. A device runs what its
process issues in order: there a process waits only in its oldest unfinished collective over all communicators.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.watch.diagnosis.evidence import Evidence, FloatArray, IntArray, MembershipTable
from lockstep.watch.diagnosis.evidence_types import UNKNOWN, Liveness


@dataclass(frozen=True, slots=True)
class PendingCollectives:
    """For each membership, whether the process is inside a collective of the communicator, and in which;
    `[memberships]`."""

    communicator: IntArray
    waits: NDArray[np.bool_]
    seq: IntArray
    """The first collective that the process has not completed."""
    since: FloatArray
    """When the process last entered or completed a collective of the communicator; NaN if unknown."""
    reached: IntArray
    """The last collective that the process has entered, without those that it has issued and its device has not
    reached; `UNKNOWN` without evidence."""


def find_pending(evidence: Evidence) -> PendingCollectives:
    """The memberships inside a collective.

    If completion is unknown, the collective entered last counts as pending; on a device, which may have completed it
    long ago, only if not all members have entered it.
    """
    members = evidence.communicators
    sizes = np.diff(members.starts)
    communicator = np.repeat(np.arange(len(sizes)), sizes)
    completed = members.completed
    if (completed < 0).any():
        completed = np.where((completed < 0) & (members.entered >= 1), members.entered - 1, completed)
        if members.on_device is not None:
            first_missing = _first_missing(members)[communicator]
            in_vain = members.on_device & (members.completed < 0) & (members.entered >= 1)
            completed = np.where(in_vain & (members.entered < first_missing), members.entered, completed)
    unfinished = members.entered > completed
    unfinished &= evidence.processes.liveness[members.process] == Liveness.RUNNING
    waits = unfinished.copy()
    if members.blocked is not None:
        waits &= members.blocked != 0
    since = np.fmax(members.entered_at, members.completed_at)
    reached = members.entered
    if members.on_device is not None and members.on_device.any():
        queued = waits & members.on_device
        elsewhere = unfinished & members.on_device & ~_is_reached(evidence, communicator, queued, completed + 1)
        waits &= ~elsewhere
        reached = np.where(elsewhere, completed, members.entered)
        if members.pending_at is not None:
            since = np.where(members.on_device, np.fmax(members.pending_at, members.completed_at), since)
    return PendingCollectives(communicator, waits, completed + 1, since, reached)


def _first_missing(members: MembershipTable) -> IntArray:
    """`[communicators]`: the first collective that some member has not entered, or may not have entered."""
    lowest = np.zeros(len(members.info), dtype=np.int64)
    filled = np.diff(members.starts) > 0
    lowest[filled] = np.minimum.reduceat(members.entered, members.starts[:-1][filled])
    return lowest + 1


def _is_reached(
    evidence: Evidence, communicator: IntArray, queued: NDArray[np.bool_], seq: IntArray
) -> NDArray[np.bool_]:
    """`[memberships]`: whether the device of the process has reached its first unfinished collective `seq` of the
    communicator. `queued` are those with unfinished collectives on a device.

    It has if it is known to have started it. It has not if it is known to have started earlier ones only while another
    member's device has started this one. Otherwise it has reached those that it was given first.
    """
    members = evidence.communicators
    reached = np.ones(len(seq), dtype=np.bool_)
    if members.pending_at is not None:
        oldest = np.full(len(evidence.processes.info), np.inf)
        np.fmin.at(oldest, members.process[queued], members.pending_at[queued])
        reached = ~(members.pending_at > oldest[members.process])  # also if the time is unknown (NaN)
    if members.started is not None:
        newest_started = np.full(len(members.info), UNKNOWN, dtype=np.int64)
        np.maximum.at(newest_started, communicator, members.started)
        reached &= ~((members.started >= 0) & (members.started < seq) & (newest_started[communicator] >= seq))
        reached |= members.started >= seq
    return reached
