"""Readers of the memory that the next version goes to: an engine that hangs in its copy is in everybody's way."""

import os

import psutil

from lockstep.weights.lease import Lease, holders
from lockstep.weights.shared import SharedWeights

Lineage = tuple[int, ...]
"""Pid of a process and those of its parents: an engine may read by processes of its own."""


def readers(store: SharedWeights) -> list[Lineage]:
    """Who holds the buffer of a store that is not current, but for this process. Nobody begins to: engines read what is
    current, and couriers send what is marked. Does not wait."""
    newest = store.control.newest()
    path = store.folder / f"buffer-{0 if newest is None else 1 - newest.buffer}"
    lease = Lease.take(path, exclusive=True)
    if lease is not None:
        lease.release()
        return []
    return [lineage(pid) for pid in holders(path) if pid != os.getpid()]


def lineage(pid: int) -> Lineage:
    try:
        return pid, *(each.pid for each in psutil.Process(pid).parents())
    except psutil.Error:
        return (pid,)
