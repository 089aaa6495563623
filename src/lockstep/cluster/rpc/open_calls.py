"""The calls of the workers of a node, or of nodes that share a call relay, that are not answered yet."""

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from lockstep.base.transport.frames import Buffer
from lockstep.cluster.rpc.codec import MethodSignature
from lockstep.cluster.rpc.futures import CallGroup

if TYPE_CHECKING:
    from lockstep.cluster.rpc.relayed_connection import CallRelayLink
    from lockstep.cluster.rpc.remote_worker import RemoteWorker


class CallArguments(Protocol):
    """The encoded arguments of a call of one or many workers."""

    def of(self, worker: "RemoteWorker") -> Sequence[Buffer]:
        """The parts of the payload for one worker."""

    def messages(self, workers: "Sequence[RemoteWorker]") -> "Iterable[RelayedArguments]":
        """What is sent to the relay of these workers, for some of them after the others."""


class RelayedArguments(msgspec.Struct):
    """The arguments of some workers, with sizes and pieces as in `RelayedCall`."""

    count: int | None
    """How many workers; None: all."""
    payload: Sequence[Buffer]
    """Its parts, padded."""
    sizes: list[int]
    pieces: bytes = b""


class OpenCall(msgspec.Struct, eq=False):
    """One message's call of one or several workers behind a relay, kept until all of them have answered."""

    number: int
    """The id of the call, the same for these workers."""
    group: CallGroup[Any]
    """What waits for the results of all its workers, also of those behind other relays."""
    signature: MethodSignature
    arguments: CallArguments
    workers: "Sequence[RemoteWorker]"
    channels: list[int] = []
    """The channels of the workers in their relay; none for a worker that is called by itself."""
    link: "CallRelayLink | None" = None
    """The connection to that relay. A relay that replaces it numbers its channels anew."""
    left: "set[RemoteWorker] | None" = None
    """The workers that have not answered; None if no worker has."""

    def awaits(self, worker: "RemoteWorker") -> bool:
        """Whether the worker was called and has not answered."""
        return worker in (self.workers if self.left is None else self.left)


class OpenCalls:
    """The open calls of the workers of one node, or of nodes that share a call relay, by id. A call is entered and sent
    while `lock` is held, so that calls of several threads leave in the order of their ids."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.links = 0
        """How often one of the workers has connected or lost its connection."""
        self._calls: dict[int, OpenCall] = {}

    def add(self, call: OpenCall) -> None:
        """Enters a call. The caller holds the lock, and sends it before it releases the lock."""
        self._calls[call.number] = call

    def of(self, worker: "RemoteWorker") -> list[OpenCall]:
        """The calls that a worker has not answered, in the order of their ids."""
        with self.lock:
            return [call for call in self._calls.values() if call.awaits(worker)]

    def take(self, number: int, worker: "RemoteWorker") -> OpenCall | None:
        """Records that a worker has answered a call. Returns None if it had answered it before, or never got it."""
        return self.take_some(number, (worker,))[0]

    def take_some(
        self, number: int, workers: "Sequence[RemoteWorker | None]"
    ) -> "tuple[OpenCall | None, list[RemoteWorker]]":
        """Records that workers have answered a call. Returns it with those of them that had got it and not answered
        before; None if there are none."""
        with self.lock:
            call = self._calls.get(number)
            if call is None:
                return None, []
            left = call.left
            if left is None:
                left = call.left = set(call.workers)
            answered = []
            for worker in workers:
                if worker in left:  # not if its answer has come twice
                    left.remove(worker)
                    answered.append(worker)
            if not left:
                del self._calls[number]
            return (call if answered else None), answered

    def take_all(self, number: int, link: "CallRelayLink") -> OpenCall | None:
        """Records that all workers of a call have answered in one message of the relay that it was sent over. Returns
        None if it was sent over another one, or all have answered before. Those that had are not in `left`."""
        with self.lock:
            call = self._calls.get(number)
            if call is None or call.link is not link:
                return None
            del self._calls[number]
            return call
