"""Finds the operation that each rank waits in, from the operations that it has issued and not finished.

On an asynchronous device a rank issues operations ahead, and waits only in its head: the oldest unfinished operation
over all of its communicators. An operation behind the head has been issued, but the rank takes no part in it yet.
`diagnosis.pending` applies this rule to times, all that beacons have. A dump has the exact order, so the evidence of
dumps holds positions that the rule has been applied to, and no communicator in it counts as one on a device.

A send from a to b and the receive of b from a are a collective of two members, numbered per direction and communicator:
the i-th send meets the i-th receive. Sequence numbers of sends and receives cannot match them, because each rank counts
them over all of its peers. If all sends and receives since the start are known, they are numbered from the start, else
from the oldest unfinished one. A small send ends without its receive, so then the sender may be further than its
unfinished sends show; a receive never ends before its send.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Transfer = tuple[int, int]
"""(sending rank, receiving rank)."""
Channel = tuple[int, int, int]
"""(communicator, sending rank, receiving rank)."""


@dataclass(frozen=True, slots=True)
class PendingOperation:
    """An operation that a rank has issued and not finished."""

    order: int
    """Its position among all operations of the rank; -1 if it is older than all others, by an unknown amount."""
    communicator: int
    sequence: int = 0
    """The number of a collective; unused for sends and receives."""
    transfers: tuple[Transfer, ...] = ()
    """The sends and receives of a batch, or a single one; empty for a collective."""
    since: float = float("nan")
    started: bool = False
    """True if the device is known to have started it."""


@dataclass(frozen=True)
class RankOperations:
    """The unfinished operations of a rank."""

    pending: Sequence[PendingOperation] = ()
    issued: Mapping[Channel, int] | None = None
    """The number of sends and receives since the start; None if unknown."""
    running: PendingOperation | None = None
    """An operation that the device certainly runs, even if it is not known to be the oldest."""

    @cached_property
    def heads(self) -> list[PendingOperation]:
        """The oldest operations: one, or several if it is unknown which is the oldest; empty if all have ended."""
        if self.running is not None:
            return [self.running]
        oldest = min((each.order for each in self.pending), default=0)
        return [each for each in self.pending if each.order == oldest]


@dataclass(frozen=True, slots=True)
class Position:
    """How far a rank is on a communicator or channel: the last operation that it takes part in, and the last one that
    it has completed. The rank waits if they differ."""

    entered: int
    completed: int
    since: float = float("nan")
    started: bool = False
    counted: bool = True
    """False if it is unknown how many operations of a channel have ended."""


@dataclass(slots=True)
class _Side:
    """One rank's unfinished transfers of a channel."""

    pending: int = 0
    at_head: int = 0
    since: float = float("nan")
    started: bool = False


def collective_position(heads: Sequence[PendingOperation], communicator: int, entered: int, completed: int) -> Position:
    """The position of a rank on a communicator. It takes part in a collective only if that is its head, though it may
    have issued (`entered`) later ones."""
    for head in heads:
        if head.communicator == communicator and not head.transfers:
            return Position(completed + 1, completed, head.since, head.started)
    return Position(min(entered, completed), completed)


def match_transfers(ranks: Mapping[int, RankOperations]) -> dict[Channel, dict[int, Position]]:
    """The positions of both ranks of each channel with an unfinished send or receive, without those of ranks that are
    not given."""
    sides = {rank: _sides_of(operations) for rank, operations in ranks.items()}
    channels = sorted({channel for of_rank in sides.values() for channel in of_rank})
    found: dict[Channel, dict[int, Position]] = {}
    for channel in channels:
        members = [rank for rank in channel[1:] if rank in ranks]
        counts = [None if (issued := ranks[rank].issued) is None else issued.get(channel, 0) for rank in members]
        counted = len(members) == 2 and None not in counts
        found[channel] = {}
        for rank, count in zip(members, counts, strict=True):
            side = sides[rank].get(channel, _Side())
            done = count - side.pending if counted and count is not None else 0
            entered = done + side.at_head
            completed = entered - 1 if side.at_head else done
            found[channel][rank] = Position(entered, completed, side.since, side.started, counted)
    return found


def _sides_of(operations: RankOperations) -> dict[Channel, _Side]:
    found: dict[Channel, _Side] = {}
    for operation in operations.pending:
        is_head = operation.order == operations.heads[0].order
        for source, target in operation.transfers:
            side = found.setdefault((operation.communicator, source, target), _Side())
            side.pending += 1
            if is_head:
                side.at_head += 1
                side.since, side.started = operation.since, operation.started
    return found
