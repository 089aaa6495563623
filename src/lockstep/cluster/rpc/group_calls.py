"""Calls of many workers: one message for the workers behind each relay, and one handle for all of them."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from lockstep.base.transport.frames import Buffer
from lockstep.cluster.protocol import PendingResult, Worker
from lockstep.cluster.rpc.codec import OWN_BYTES, MethodSignature, Payload, signature_of
from lockstep.cluster.rpc.futures import CallGroup
from lockstep.cluster.rpc.open_calls import CallArguments, OpenCall, OpenCalls, RelayedArguments
from lockstep.cluster.rpc.relay_messages import MAX_BATCH_BYTES, cut_batches, padded
from lockstep.cluster.rpc.relayed_connection import CallRelayLink
from lockstep.cluster.rpc.remote_worker import RemoteWorker, SharedArguments
from lockstep.cluster.rpc.rpc_messages import ALIGN, PADDING

P = ParamSpec("P")
R = TypeVar("R")


class WorkerColumns(Protocol):
    """Bytes for many workers in columns: worker i gets `columns[c][bounds[c, i] : bounds[c, i + 1]]` of each column c,
    one after the other."""

    @property
    def shared(self) -> tuple[Any, ...]:
        """Values that all workers get."""

    @property
    def columns(self) -> "Sequence[memoryview]": ...
    @property
    def bounds(self) -> np.ndarray:
        """int64 `[columns, workers + 1]`, in bytes."""

    def __getitem__(self, index: int, /) -> tuple[Any, ...]:
        """What worker `index` gets: the shared values, and its bytes as uint8 `[bytes]`."""


@dataclass(frozen=True, slots=True)
class Scattered:
    """Arguments of a call of many workers. The first one is a tuple of shared values and the worker's own bytes, which
    are sent in columns, which a relay cuts up for its workers."""

    own: WorkerColumns
    others: tuple[Any, ...] = ()
    """The other arguments, the same for all workers."""

    def of(self, index: int) -> tuple[Any, ...]:
        return (self.own[index], *self.others)


class _OwnArguments:
    """Arguments of a call that were encoded for each worker."""

    def __init__(self, payloads: dict[Any, Payload]) -> None:
        self._payloads = payloads

    def of(self, worker: RemoteWorker) -> Sequence[Buffer]:
        return (self._payloads[worker],)

    def messages(self, workers: Sequence[RemoteWorker]) -> Iterator[RelayedArguments]:
        payloads = [self._payloads[worker] for worker in workers]
        sizes = list(map(len, payloads))
        for part in cut_batches(sizes):
            yield RelayedArguments(len(payloads[part]), padded(payloads[part]), sizes[part])


class _ScatteredArguments:
    """Arguments of a call whose columns are cut up for the workers."""

    def __init__(self, signature: MethodSignature, arguments: Scattered, workers: Iterable[Any]) -> None:
        own = arguments.own
        self._head = signature.encode_head(((*own.shared, OWN_BYTES), *arguments.others))
        self._padded_head = padded((self._head,))
        self._columns = own.columns
        bounds = np.asarray(own.bounds, np.int64)
        self._pieces = np.diff(bounds).T.astype(np.uint32, order="C")
        """Bytes of each worker in each column."""
        self._bounds = np.ascontiguousarray(bounds.T)
        self._ends: list[int] = bounds.sum(axis=0).tolist()
        """Bytes of all workers before each worker."""
        self._index = dict(zip(workers, itertools.count(), strict=False))

    def of(self, worker: RemoteWorker) -> Sequence[Buffer]:
        return [self._head, *self._between(self._index[worker], self._index[worker] + 1)]

    def messages(self, workers: Sequence[RemoteWorker]) -> Iterator[RelayedArguments]:
        rows = [self._index[worker] for worker in workers]
        for part in self._side_by_side(rows):
            first, last = rows[part][0], rows[part][-1] + 1
            size = self._ends[last] - self._ends[first]
            payload = [*self._padded_head, *self._between(first, last), PADDING[-size % ALIGN]]
            yield RelayedArguments(last - first, payload, [len(self._head), size], self._pieces[first:last].tobytes())

    def _side_by_side(self, rows: list[int]) -> Iterator[slice]:
        """The parts of these rows that are next to each other in the columns, and not too large for a message."""
        ends = self._ends
        if rows == list(range(rows[0], rows[0] + len(rows))) and ends[rows[-1] + 1] - ends[rows[0]] <= MAX_BATCH_BYTES:
            yield slice(0, len(rows))  # as usual
            return
        begin = 0
        for end in range(1, len(rows) + 1):
            full = end < len(rows) and ends[rows[end] + 1] - ends[rows[begin]] > MAX_BATCH_BYTES
            if end == len(rows) or rows[end] != rows[end - 1] + 1 or full:
                yield slice(begin, end)
                begin = end

    def _between(self, first: int, last: int) -> Iterator[memoryview]:
        begins, ends = self._bounds[first].tolist(), self._bounds[last].tolist()
        return map(memoryview.__getitem__, self._columns, map(slice, begins, ends))


MethodCall = tuple[Callable[..., Any], Iterable[tuple[Any, ...]] | Scattered]
"""A method, and the positional arguments of each worker."""


def submit_all(
    workers: Sequence[Worker],
    method: Callable[Concatenate[Any, P], R],
    arguments: Iterable[tuple[Any, ...]] | Scattered,
) -> Sequence[PendingResult[R]]:
    """Submits a call to each of these workers, with the positional arguments that belong to it. A call relay gets one
    message for all its workers, any other worker one of its own.

    Raises:
        TypeError: as `RemoteWorker.submit`. Some workers may have been called.
    """
    return submit_in_turn(workers, (method, arguments))[0]


def submit_in_turn(workers: Sequence[Worker], *calls: MethodCall) -> list[Sequence[PendingResult[Any]]]:
    """Like `submit_all` for several calls of the same workers, which follow each other: a relay gets one message for
    all of them. Returns the results of each call."""
    by_relay = _by_relay(tuple(workers))
    if by_relay is None:
        return [_submit_each(workers, *call) for call in calls]
    new = [_NewCall.of(workers, *call) for call in calls]
    for together in by_relay:
        _send(new, together)
    return [call.group for call in new]


class _SideBySide:
    """Workers of one node, or of nodes that share a call relay, that are called together, and how they are reached."""

    def __init__(self) -> None:
        self.workers: list[RemoteWorker] = []
        self._links = -1
        """The value of `OpenCalls.links` for which the other fields are."""
        self._link: CallRelayLink | None = None
        self._there: list[RemoteWorker] = []
        self._channels: list[int] = []
        self._alone: list[RemoteWorker] = []

    def routes(
        self, calls: OpenCalls
    ) -> tuple[CallRelayLink | None, list[RemoteWorker], list[int], list[RemoteWorker]]:
        """Their relay, if they have one, the workers behind it and their channels, and the other workers. The caller
        holds the lock of these calls."""
        if self._links != calls.links:
            self._links = calls.links
            self._link = next((worker.link for worker in self.workers if worker.link is not None), None)
            behind = self._link is not None
            self._there = [worker for worker in self.workers if behind and worker.link is self._link]
            self._channels = [worker.channel for worker in self._there]
            self._alone = [worker for worker in self.workers if not behind or worker.link is not self._link]
        return self._link, self._there, self._channels, self._alone


@lru_cache(maxsize=64)
def _by_relay(workers: tuple[Worker, ...]) -> list[_SideBySide] | None:
    """The workers that share a relay, in their order: those of a role are called many times, and stay on their nodes.
    None if one is of another cluster, or called twice."""
    found: dict[OpenCalls, _SideBySide] = {}
    for worker in workers:
        if not isinstance(worker, RemoteWorker):
            return None
        together = found.get(worker.node.calls)
        if together is None:
            together = found[worker.node.calls] = _SideBySide()
        together.workers.append(worker)
    return list(found.values()) if len(set(workers)) == len(workers) else None


def _submit_each(
    workers: Sequence[Worker], method: Callable[..., R], arguments: Iterable[tuple[Any, ...]] | Scattered
) -> Sequence[PendingResult[R]]:
    own = map(arguments.of, itertools.count()) if isinstance(arguments, Scattered) else arguments
    return [worker.submit(method, *each) for worker, each in zip(workers, own, strict=False)]


@dataclass(frozen=True, slots=True)
class _NewCall:
    """A call of many workers that has not been sent to all of them."""

    group: CallGroup[Any]
    signature: MethodSignature
    arguments: CallArguments

    @classmethod
    def of(
        cls, workers: Sequence[Any], method: Callable[..., Any], given: Iterable[tuple[Any, ...]] | Scattered
    ) -> "_NewCall":
        signature = signature_of(method)
        arguments = _encode(signature, given, workers)
        group: CallGroup[Any] = CallGroup(workers, signature.qualified, signature.decode_result, signature.concurrent)
        return cls(group, signature, arguments)

    def enter(
        self, calls: OpenCalls, link: CallRelayLink, workers: list[RemoteWorker], channels: list[int]
    ) -> list[tuple[OpenCall, RelayedArguments]]:
        """Enters the call of workers behind a relay, in as many parts as their arguments need messages. The caller
        holds the lock of these calls."""
        entered, done = [], 0
        for own in self.arguments.messages(workers):
            some, of_some = workers, channels
            if own.count is not None and own.count < len(workers):
                some, of_some = workers[done : done + own.count], channels[done : done + own.count]
                done += own.count
            call = OpenCall(next(workers[0].call_ids), self.group, self.signature, self.arguments, some, of_some, link)
            calls.add(call)
            entered.append((call, own))
        return entered


def _encode(
    signature: MethodSignature, arguments: Iterable[tuple[Any, ...]] | Scattered, workers: Sequence[Any]
) -> CallArguments:
    if isinstance(arguments, Scattered):
        return _ScatteredArguments(signature, arguments, workers)
    given = list(arguments)
    if len(set(map(id, given))) == 1:
        return SharedArguments(signature.encode_arguments(given[0], {}))
    payloads = [signature.encode_arguments(args, {}) for args in given]
    if len(set(map(id, payloads))) == 1:  # equal arguments, which are encoded once
        return SharedArguments(payloads[0])
    return _OwnArguments(dict(zip(workers, payloads, strict=True)))


def _send(new: Sequence[_NewCall], together: _SideBySide) -> None:
    """Sends calls to workers that share a relay, with the lock of their calls, so that calls of other threads come
    before or after them on the link to the relay, as their ids say."""
    calls = together.workers[0].node.calls
    with calls.lock:
        link, there, channels, alone = together.routes(calls)
        if link is not None:
            link.send_calls([each for call in new for each in call.enter(calls, link, there, channels)])
        for worker in alone:
            for each in new:
                worker.send_new_call(each.group, each.signature, each.arguments)
