"""How a wait says in words that it is a rendezvous, and what is read from these words. Standard library only."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

KIND = "rendezvous"
JOINS = " joins "
OF_RANKS = " of ranks "
_RANKS = re.compile(r"ranks (\d+) to (\d+) of (\d+)")


@dataclass(frozen=True, slots=True)
class Expected:
    """Who should come to a meeting."""

    first: int
    last: int
    """Of the ranks that are on the waiter's host."""
    size: int
    """How many take part, on all hosts."""


def whom(expected: Expected) -> str:
    """Whom a wait in a meeting is for."""
    return f"ranks {expected.first} to {expected.last} of {expected.size}"


class Told(NamedTuple):
    """What a wait says of the meeting that it is in."""

    name: str = ""
    """Empty when it is in none."""
    members: str = ""
    """Whom the process takes for the members of what is made there, where it says that."""
    expected: Expected | None = None


def why(rank: int, meeting: str, members: Sequence[int] = ()) -> str:
    """Why: members name the same meeting, and whom they take for its members."""
    ranks = f"{OF_RANKS}{', '.join(map(str, members))}" if members else ""
    return f"rank {rank}{JOINS}{meeting}{ranks}"


def read_meeting(kind: str, whom_: str, why_: str) -> Told:
    """What the words of a wait say."""
    if kind != KIND:
        return Told()
    name, _, members = why_.partition(JOINS)[2].partition(OF_RANKS)
    found = _RANKS.fullmatch(whom_)
    return Told(name, members, None if found is None else Expected(*map(int, found.groups())))
