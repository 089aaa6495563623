"""Showing that a process waits for the other members while a communicator is made."""

import contextlib
from collections.abc import Sequence
from typing import Any

from lockstep.watch import beacon, meeting
from lockstep.watch.waiting import waiting

MEMBERS = 8
NAMES = 96
"""More members, and names of more characters, have no room in a beacon: who makes such a one is not shown."""


def convened(
    own: beacon.Beacon, world: Any, ranks: Sequence[int], name: str, about: str | None
) -> contextlib.AbstractContextManager[object]:
    """A wait for the other members, with the list of those that this process believes in: with different lists they
    wait for each other for good. Nothing of the default communicator (`world` is None, or no ranks are given): its
    members meet where the program says so."""
    if world is None or not 2 <= len(ranks) <= MEMBERS or world.rank() not in ranks:
        return contextlib.nullcontext()
    rank = world.rank()
    role, found, life = own.path.stem.partition(f"-{rank}")
    whom = ", ".join(f"{role}-{each}{life}" for each in sorted(ranks) if each != rank)
    if not found or len(whom) > NAMES:
        return contextlib.nullcontext()
    what = f"{(about or 'communicator')[:24]} ({name[:16]})"
    return waiting(meeting.KIND, whom, meeting.why(rank, what, sorted(ranks)))
