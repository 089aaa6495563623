"""How a wait says in words that it is a rendezvous, and what is read from these words. Standard library only."""

import re
from dataclasses import dataclass

KIND = "rendezvous"
JOINS = " joins "
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


def why(rank: int, meeting: str) -> str:
    """Why: members name the same meeting."""
    return f"rank {rank}{JOINS}{meeting}"


def read_meeting(kind: str, whom_: str, why_: str) -> tuple[str, Expected | None]:
    """The meeting that a wait is in, empty when it is in none, and who should come, where it says that."""
    if kind != KIND:
        return "", None
    found = _RANKS.fullmatch(whom_)
    return why_.partition(JOINS)[2], None if found is None else Expected(*map(int, found.groups()))
