"""Shows in the beacon that a rank waits in a rendezvous, and parses such waits. Standard library only."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.base.bounded_wait import track_wait
from lockstep.watch.beacon import writer

RENDEZVOUS = "rendezvous"
JOINS = " joins "
OF_RANKS = " of ranks "
_RANKS = re.compile(r"ranks (\d+) to (\d+) of (\d+)")


@dataclass(frozen=True, slots=True)
class ExpectedRanks:
    """Who should come to a meeting."""

    first: int
    last: int
    """Of the ranks that are on the waiter's host."""
    size: int
    """How many take part, on all hosts."""


def rendezvous_target(expected: ExpectedRanks) -> str:
    """Whom a wait in a meeting is for."""
    return f"ranks {expected.first} to {expected.last} of {expected.size}"


class RendezvousInfo(NamedTuple):
    """What a wait says of the meeting that it is in."""

    name: str = ""
    """Empty when it is in none."""
    members: str = ""
    """Whom the process takes for the members of what is made there, where it says that."""
    expected: ExpectedRanks | None = None


def rendezvous_reason(rank: int, meeting: str, members: Sequence[int] = ()) -> str:
    """Why: members name the same meeting, and whom they take for its members."""
    ranks = f"{OF_RANKS}{', '.join(map(str, members))}" if members else ""
    return f"rank {rank}{JOINS}{meeting}{ranks}"


def parse_rendezvous(kind: str, whom_: str, why_: str) -> RendezvousInfo:
    """What the words of a wait say."""
    if kind != RENDEZVOUS:
        return RendezvousInfo()
    name, _, members = why_.partition(JOINS)[2].partition(OF_RANKS)
    found = _RANKS.fullmatch(whom_)
    return RendezvousInfo(name, members, None if found is None else ExpectedRanks(*map(int, found.groups())))


MAX_SHOWN_MEMBERS = 8
MAX_TARGET_CHARS = 96
"""More members, and names of more characters, have no room in a beacon: who makes such a one is not shown."""


def group_init_wait(
    own: writer.Beacon, world: Any, ranks: Sequence[int], name: str, about: str | None
) -> contextlib.AbstractContextManager[object]:
    """A wait for the other members, with the list of those that this process believes in: with different lists they
    wait for each other for good. Nothing of the default communicator (`world` is None, or no ranks are given): its
    members meet where the program says so."""
    if world is None or not 2 <= len(ranks) <= MAX_SHOWN_MEMBERS or world.rank() not in ranks:
        return contextlib.nullcontext()
    rank = world.rank()
    role, found, life = own.path.stem.partition(f"-{rank}")
    waits_for = ", ".join(f"{role}-{each}{life}" for each in sorted(ranks) if each != rank)
    if not found or len(waits_for) > MAX_TARGET_CHARS:
        return contextlib.nullcontext()
    what = f"{(about or 'communicator')[:24]} ({name[:16]})"
    return track_wait(RENDEZVOUS, waits_for, rendezvous_reason(rank, what, sorted(ranks)))
