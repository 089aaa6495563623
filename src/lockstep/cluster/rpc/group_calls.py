"""Calls of many workers: one message for the workers behind each relay, and one handle for all of them."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np

from lockstep.base.transport.frames import Buffer, WireError
from lockstep.cluster.protocol import PendingResult, Worker
from lockstep.cluster.rpc.codec import OWN_BYTES, MethodSignature, Payload, signature_of
from lockstep.cluster.rpc.futures import CallGroup
from lockstep.cluster.rpc.open_calls import CallArguments, OpenCall
from lockstep.cluster.rpc.relay_messages import MAX_BATCH_BYTES, cut_batches
from lockstep.cluster.rpc.relayed_connection import CallRelayLink
from lockstep.cluster.rpc.remote_worker import RemoteWorker, SharedArguments

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
    are sent in columns: the relay of a node cuts them up for its workers."""

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

    def messages(self, workers: Sequence[RemoteWorker]) -> Iterator[tuple[slice, Sequence[Buffer], bytes]]:
        payloads = [self._payloads[worker] for worker in workers]
        for part in cut_batches(list(map(len, payloads))):
            yield part, payloads[part], b""


class _ScatteredArguments:
    """Arguments of a call whose columns are cut up for the workers."""

    def __init__(self, signature: MethodSignature, arguments: Scattered, workers: Iterable[Any]) -> None:
        own = arguments.own
        self._head = signature.encode_head(((*own.shared, OWN_BYTES), *arguments.others))
        self._columns, self._bounds = own.columns, np.asarray(own.bounds, np.int64)
        self._ends: list[int] = self._bounds.sum(axis=0).tolist()
        """Bytes of all workers before each worker."""
        self._index = dict(zip(workers, itertools.count(), strict=False))

    def of(self, worker: RemoteWorker) -> Sequence[Buffer]:
        return self._between(self._index[worker], self._index[worker] + 1)

    def messages(self, workers: Sequence[RemoteWorker]) -> Iterator[tuple[slice, Sequence[Buffer], bytes]]:
        rows = [self._index[worker] for worker in workers]
        for part in self._side_by_side(rows):
            first, last = rows[part][0], rows[part][-1] + 1
            yield part, self._between(first, last), self._bounds[:, first : last + 1].tobytes()

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

    def _between(self, first: int, last: int) -> Sequence[Buffer]:
        parts = map(slice, self._bounds[:, first].tolist(), self._bounds[:, last].tolist())
        return [self._head, *map(memoryview.__getitem__, self._columns, parts)]


def submit_all(
    workers: Sequence[Worker],
    method: Callable[Concatenate[Any, P], R],
    arguments: Iterable[tuple[Any, ...]] | Scattered,
) -> Sequence[PendingResult[R]]:
    """Submits a call to each of these workers, with the positional arguments that belong to it. A node with a call
    relay gets one message for all its workers, any other worker one of its own.

    Raises:
        TypeError: as `RemoteWorker.submit`. Some workers may have been called.
    """
    remote = [worker for worker in workers if isinstance(worker, RemoteWorker)]
    if len(remote) < len(workers) or len(set(remote)) < len(remote):  # of another cluster, or called twice
        own = map(arguments.of, itertools.count()) if isinstance(arguments, Scattered) else arguments
        return [worker.submit(method, *each) for worker, each in zip(workers, own, strict=False)]  # type: ignore[call-arg]
    signature = signature_of(method)
    encoded = _encode(signature, arguments, remote)
    group: CallGroup[R] = CallGroup(remote, signature.qualified, signature.decode_result, signature.concurrent)
    by_link: dict[CallRelayLink | None, list[RemoteWorker]] = {}
    for link, side_by_side in itertools.groupby(remote, _LINK):
        by_link.setdefault(link, []).extend(side_by_side)
    for worker in by_link.pop(None, ()):
        worker.send_new_call(group, signature, encoded)
    for link, of_link in by_link.items():
        if link is not None:
            _send(link, group, signature, encoded, of_link)
    return group


_LINK = attrgetter("link")


def _encode(
    signature: MethodSignature, arguments: Iterable[tuple[Any, ...]] | Scattered, workers: list[RemoteWorker]
) -> Any:
    if isinstance(arguments, Scattered):
        return _ScatteredArguments(signature, arguments, workers)
    given = list(arguments)
    if len(set(map(id, given))) == 1:
        return SharedArguments(signature.encode_arguments(given[0], {}))
    payloads = [signature.encode_arguments(args, {}) for args in given]
    if len(set(map(id, payloads))) == 1:  # equal arguments, which are encoded once
        return SharedArguments(payloads[0])
    return _OwnArguments(dict(zip(workers, payloads, strict=True)))


def _send(
    link: CallRelayLink,
    group: CallGroup[Any],
    signature: MethodSignature,
    arguments: CallArguments,
    workers: list[RemoteWorker],
) -> None:
    """Sends a call to workers behind one relay, with their node's lock, so that calls of other threads come before or
    after it on the link, as their ids say."""
    calls = workers[0].node.calls
    with calls.lock:
        there = [worker for worker in workers if worker.link is link]
        if there:
            channels = [worker.channel for worker in there]
            call = OpenCall(next(there[0].call_ids), group, signature, arguments, there, channels, link)
            calls.add(call)
            with contextlib.suppress(WireError):  # they are sent again when the workers have connected anew
                link.send_calls(call)
        if len(there) < len(workers):  # some have ended, or connected anew
            for worker in workers:
                if worker not in there:
                    worker.send_new_call(group, signature, arguments)
