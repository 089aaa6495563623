"""Shows in the beacon that a rank waits in a rendezvous, and parses such waits."""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.base.wait_state import track_wait
from lockstep.watch.beacon.beacon_records import digest64
from lockstep.watch.beacon.writer import Beacon

RENDEZVOUS = "rendezvous"
JOINS = " joins "
OF_RANKS = " of ranks "
_RANKS = re.compile(r"ranks (\d+) to (\d+) of (\d+)")


@dataclass(frozen=True, slots=True)
class ExpectedRanks:
    """The ranks that a rendezvous expects."""

    first: int
    last: int
    """`first` and `last` are the first and the last rank on the host of the waiting rank."""
    size: int
    """The number of participants on all hosts."""


def rendezvous_target(expected: ExpectedRanks) -> str:
    """Formats the target of a wait in a rendezvous."""
    return f"ranks {expected.first} to {expected.last} of {expected.size}"


class RendezvousInfo(NamedTuple):
    """What a wait shows description its rendezvous."""

    name: str = ""
    """The name of the rendezvous; empty if the wait is not in a rendezvous."""
    members: str = ""
    """The list of members with which the process creates the communicator; empty if it shows none."""
    expected: ExpectedRanks | None = None


def rendezvous_reason(rank: int, rendezvous: str, members: Sequence[int] = ()) -> str:
    """Formats the reason of a wait in a rendezvous: its name, which is equal on all members, and the member list."""
    ranks = f"{OF_RANKS}{', '.join(map(str, members))}" if members else ""
    return f"rank {rank}{JOINS}{rendezvous}{ranks}"


def parse_rendezvous(kind: str, waits_for: str, why: str) -> RendezvousInfo:
    """Parses the kind, target and reason of a wait."""
    if kind != RENDEZVOUS:
        return RendezvousInfo()
    name, _, members = why.partition(JOINS)[2].partition(OF_RANKS)
    found = _RANKS.fullmatch(waits_for)
    return RendezvousInfo(name, members, None if found is None else ExpectedRanks(*map(int, found.groups())))


MAX_SHOWN_MEMBERS = 8
MAX_TARGET_CHARS = 96
"""With more members or longer names, the wait is not shown, because the beacon has no room for it."""


def group_init_wait(
    own: Beacon, world: Any, ranks: Sequence[int], name: str, description: str | None
) -> contextlib.AbstractContextManager[object]:
    """While a communicator is created, shows that this process waits for the other members, and its list of members,
    because processes with different lists wait for each other forever.

    Does nothing for the default communicator (`world` is None, or no ranks are given).
    """
    if world is None or not 2 <= len(ranks) <= MAX_SHOWN_MEMBERS or world.rank() not in ranks:
        return contextlib.nullcontext()
    rank = world.rank()
    role, found, suffix = own.path.stem.partition(f"-{rank}")
    waits_for = ", ".join(f"{role}-{each}{suffix}" for each in sorted(ranks) if each != rank)
    if not found or len(waits_for) > MAX_TARGET_CHARS:
        return contextlib.nullcontext()
    return track_wait(RENDEZVOUS, waits_for, rendezvous_reason(rank, rendezvous_name(name, description), sorted(ranks)))


def rendezvous_name(name: str, description: str | None) -> str:
    """The name of the rendezvous in which a communicator is created, given c10d's name and description of it."""
    known = description if description not in (None, "", "undefined") else "communicator"
    return f"{str(known)[:24]} ({name[:16]})"


def member_list_digest(members: Sequence[int]) -> int:
    """A 64-bit digest of the member list with which a communicator is created."""
    return digest64(str(sorted(members)))
