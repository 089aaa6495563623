"""What probes answer to the orders of the head, each as a type: one function per answer, which raises ValueError for
anything else. (Of `look` see `others`, of a card `protocol`.)"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import Field

from lockstep.doctor.check.peers import Dialled
from lockstep.doctor.check.protocol import Card, Message
from lockstep.doctor.check.typed import WORDS, Number, reader


@dataclass(frozen=True, slots=True)
class Reached:
    """Whom a host reaches."""

    ms: list[Number]
    """The round trip to each host of the table; 0 where it is not reached."""
    failed: list[Dialled]


@dataclass(frozen=True, slots=True)
class Rated:
    """How much goes to one peer."""

    mb_per_s: Number | None = None
    why: str = ""
    """Where that is not known."""


@dataclass(frozen=True, slots=True)
class Started:
    """Ranks of the self-test."""

    port: Annotated[int, Field(ge=-1, lt=1 << 16)] = 0
    """Of the store, where the host serves it; -1 where it could not."""


@dataclass(frozen=True, slots=True)
class Line:
    """Something that a rank of the self-test says: where it is, why it failed, or a measurement."""

    rank: int = -1
    at: str | None = None
    failed: str | None = None
    communicator: str = ""
    operation: str = ""
    ok: bool = False
    ms: Number = 0.0
    mb_per_s: Number = 0.0
    pair: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """What the ranks of a host said."""

    lines: list[Line] = field(default_factory=list)
    ended: int | None = None
    errors: str = ""

    @property
    def last(self) -> str:
        """The last line of what was printed besides."""
        return next(reversed(self.errors.strip().splitlines()), "")[:WORDS]


_card, _reached, _rated, _started, _said = (
    reader(Card), reader(Reached), reader(Rated), reader(Started), reader(Said),
)  # fmt: skip


def card(name: str, answer: Message) -> Card:
    """Of `card`."""
    return replace(_card(answer), name=name)


def reached(hosts: Sequence[str]) -> Callable[[str, Message], Reached]:
    """Of `reach`, for a table of these hosts."""
    known = set(hosts)

    def read(name: str, answer: Message) -> Reached:
        found = _reached(answer)
        if len(found.ms) != len(hosts):
            raise ValueError(f"ms: {len(found.ms)} round trips for {len(hosts)} hosts")
        if strange := next((one.peer for one in found.failed if one.peer not in known), None):
            raise ValueError(f"failed: there is no host {strange[:80]}")
        return replace(found, failed=[replace(one, why=one.why[:WORDS]) for one in found.failed])

    return read


def rated(name: str, answer: Message) -> Rated:
    """Of `rate`."""
    return _rated(answer)


def started(name: str, answer: Message) -> Started:
    """Of `ranks`, when they start."""
    return _started(answer)


def said(ranks: Mapping[str, Collection[int]], world: int) -> Callable[[str, Message], Said]:
    """Of `ranks`, for their results.

    Args:
        ranks: by host, those that are there, of so many altogether.
    """

    def read(name: str, answer: Message) -> Said:
        found = _said(answer)
        lines = [line for line in found.lines if line.rank >= 0]
        for line in lines:
            if line.rank not in ranks[name] or any(not 0 <= rank < world for rank in line.pair or ()):
                raise ValueError(f"lines: rank {line.rank} (with {line.pair}) is none of this host's")
        return replace(found, lines=lines)

    return read
