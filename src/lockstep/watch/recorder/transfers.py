"""Tracks the messages (point-to-point operations) of this process on one communicator until they have completed.

c10d counts messages per process and in ways that differ between backends, so the recorder counts them itself, for each
peer and direction. A message on a host-blocking backend has completed when its call, or the `wait()` of its handle, has
returned. On other backends the handle says so; it is kept until then, at most until the recorder's next poll after the
completion, because a handle keeps its tensors alive. c10d's flight recorder says which messages the device has started.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from time import monotonic_ns
from typing import Any, NamedTuple

from lockstep.watch.beacon.call_ring import CommunicatorSlot
from lockstep.watch.beacon.message_lanes import Lane


class Message(NamedTuple):
    """One send or receive of a call. `peer` is a rank in the communicator; None: a receive from any source."""

    sends: bool
    peer: int | None


class Transfer:
    """The messages of one call, which begin together."""

    __slots__ = ("handles", "issued_ns", "lanes")

    def __init__(self, lanes: list[Lane], issued_ns: int) -> None:
        self.lanes, self.issued_ns = lanes, issued_ns
        self.handles: tuple[Any, ...] = ()

    def inside(self, change: int) -> None:
        """Records that a thread enters (1) or leaves (-1) the call or a `wait()` of it."""
        for lane in self.lanes:
            lane.inside(change)

    def is_completed(self) -> bool:
        with suppress(RuntimeError):  # the handle of a failed operation raises its error
            return all(handle.is_completed() for handle in self.handles)
        return True

    def complete(self) -> None:
        for lane in self.lanes:
            lane.complete()


transfers_by_handle: dict[int, tuple["TransferTracker", Transfer]] = {}
"""The unfinished transfers of all communicators by the id of each handle, which the transfer keeps alive."""
waited_handles: dict[int, Any] = {}
"""The handle that a recorded call has waited for last, by thread; only while it is recorded."""


def transfer_of(handle: Any) -> "tuple[TransferTracker, Transfer] | None":
    """The unfinished transfer that a handle belongs to."""
    return transfers_by_handle.get(id(handle))


class TransferTracker:
    """The messages of one membership. Thread-safe.

    Args:
        ranks: the ranks in the job of the communicator's members.
        own: the rank in the job of this process.
        blocks_host: whether a call without a handle returns only when its message has completed.
    """

    def __init__(self, slot: CommunicatorSlot, ranks: Sequence[int], own: int, blocks_host: bool) -> None:
        self._slot, self._ranks, self._own, self._blocks_host = slot, ranks, own, blocks_host
        self._unfinished: list[Transfer] = []
        self._lanes: dict[Message, Lane] = {}
        self._lock = threading.Lock()
        self.used = False
        """Whether there has been a message."""

    def issue(self, messages: Iterable[Message], site: int) -> Transfer:
        """Records that a call with these messages begins. `site` is the number of the text with its call site."""
        self.used = True
        self.poll()
        now, lanes = monotonic_ns(), []
        with self._lock:
            for message in messages:
                lane = None if message.peer is None else self._lane(message.sends, message.peer)
                if lane is None:
                    self._slot.mark_blind()
                else:
                    self._lanes[message] = lane
                    lane.issue(now, site)
                    lanes.append(lane)
        transfer = Transfer(lanes, now)
        transfer.inside(1)
        return transfer

    def _lane(self, sends: bool, peer: int) -> Lane | None:
        global_peer = self._ranks[peer] if peer < len(self._ranks) else peer
        return self._slot.rings.lanes.lane(self._slot.index, sends, peer, global_peer, self._own)

    def returned(self, transfer: Transfer, handles: Sequence[Any]) -> None:
        """Records that a call has returned. `handles` are those that it has returned, or has waited for itself; none
        of them if it failed."""
        transfer.inside(-1)
        transfer.handles = tuple(handles)
        with self._lock:
            if transfer.handles and not transfer.is_completed():
                self._unfinished.append(transfer)
                transfers_by_handle.update({id(handle): (self, transfer) for handle in transfer.handles})
            else:
                transfer.complete()

    def poll(self) -> None:
        """Records the messages that have completed."""
        if not self._unfinished:
            return
        with self._lock:
            for transfer in [each for each in self._unfinished if each.is_completed()]:
                self._forget(transfer)
                transfer.complete()

    def waits_since(self, at_ns: int) -> bool:
        """Whether a message that was issued before that time has not completed, and its call has returned."""
        return any(transfer.issued_ns < at_ns for transfer in list(self._unfinished))

    def counts(self) -> dict[Message, tuple[int, int]]:
        """The numbers of messages issued and completed, by peer and direction."""
        with self._lock:
            return {message: lane.counts for message, lane in self._lanes.items()}

    def update_starts(
        self, unfinished: Mapping[Message, Sequence[bool]], before: Mapping[Message, tuple[int, int]]
    ) -> None:
        """Records which messages the device has started.

        Args:
            unfinished: for each peer and direction, whether each unfinished message has been started, oldest first.
            before: the counts before these were read; what has changed since then, or differs from them, is left out.
        """
        with self._lock:
            for message, started in unfinished.items():
                lane = self._lanes.get(message)
                if lane is not None and lane.counts == before.get(message):
                    issued, completed = lane.counts
                    if issued - completed == len(started):
                        lane.start(completed + [*started, False].index(False))

    def close(self) -> None:
        """Forgets the messages of a destroyed communicator."""
        with self._lock:
            for transfer in list(self._unfinished):
                self._forget(transfer)

    def _forget(self, transfer: Transfer) -> None:
        self._unfinished.remove(transfer)
        for handle in transfer.handles:
            transfers_by_handle.pop(id(handle), None)
