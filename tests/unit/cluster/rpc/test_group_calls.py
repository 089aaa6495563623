"""Calls of many workers: one handle for all, and arguments in columns of which each worker gets its piece."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.base.transport.frames import PeerIdentity
from lockstep.base.wait_state import Stalled
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import NodeInfo, RemoteError, WorkerDied, WorkerSpec
from lockstep.cluster.rpc.call_relay import CallRelay
from lockstep.cluster.rpc.codec import CodecError, signature_of
from lockstep.cluster.rpc.futures import (
    CallGroup,
    gather_identical,
    gather_outcomes,
    gather_results,
    on_answers,
    wait_for_calls,
)
from lockstep.cluster.rpc.group_calls import Scattered, submit_all, submit_in_turn
from lockstep.cluster.rpc.open_calls import OpenCalls
from lockstep.cluster.rpc.relay_messages import CallResults, RelayedResults, cut_columns, pack_relayed
from lockstep.cluster.rpc.relayed_connection import CallRelayLink, ExpectedRelay
from lockstep.cluster.rpc.remote_worker import RemoteWorker
from lockstep.cluster.rpc.rpc_messages import CallMessage, FailureMessage, ResultMessage, ResumeMessage, pack_message
from lockstep.cluster.rpc.rpc_messages import unpack_to_worker as unpack
from lockstep.data.micro_batch import EncodedRanks


class Adder:
    def add(self, own: tuple[int, np.ndarray], factor: int) -> int:
        return int(own[1].astype(int).sum()) * factor + own[0]


class Node:
    """The workers of a node, or of `hosts` nodes, behind a real relay, without sockets. They answer when `answer` is
    called."""

    closed, bulk_bytes, written_bytes, pending = False, 0, 0, False
    peer = PeerIdentity("run", 1, "relay")

    def __init__(
        self, name: str, ranks: Sequence[int], call_ids: Any, stall_limit_s: float = 60.0, hosts: int = 1
    ) -> None:
        self.calls = OpenCalls()
        homes = [
            ClusterNode(NodeInfo(f"{name}-{host}", "127.0.0.1", Path("none")), Path("none"), Path("none"))
            for host in range(hosts)
        ]
        for home in homes:
            home.calls = self.calls
        limits = stall_limit_s, 60.0
        self.workers = {
            rank: RemoteWorker(
                WorkerSpec(f"w-{rank}", "x", rank, "a:B"), homes[at % hosts], "run", call_ids, *limits, _no
            )
            for at, rank in enumerate(ranks)
        }
        expected = ExpectedRelay(self.calls, lambda address: None, lambda: None)
        self.link = CallRelayLink(self, lambda _: None, expected)  # type: ignore[arg-type]
        self.relay = CallRelay(lambda parts: self.link.handle_frame(bytearray(b"".join(parts)), self._accept))
        self.got: dict[int, tuple[CallMessage, bytes]] = {}
        self.messages = 0
        self.channels: dict[int, int] = {}
        for rank in ranks:
            self.channels[rank] = self.relay.open(f"w-{rank}", _Behind(self, rank))
            self.relay.from_worker(self.channels[rank], bytearray(b"".join(pack_message(ResumeMessage(0, 1)))))

    def _accept(self, link: CallRelayLink, channel: int, name: str) -> None:
        link.open(channel, self.workers[int(name[2:])])

    def queue(self, *parts: Any) -> tuple[int, int]:
        self.messages += 1
        self.relay.from_controller(bytearray(b"".join(parts)))
        return 0, 0

    def flush(self) -> bool:
        return True

    def answer(self, rank: int, error: str = "") -> None:
        call, payload = self.got.pop(rank)
        signature = signature_of(Adder.add)
        if error:
            parts = pack_message(FailureMessage(call.id, "ValueError", error, ""))
        else:
            value = Adder().add(**signature.decode_arguments(bytearray(payload)))
            parts = pack_message(ResultMessage(call.id), signature.encode_result(value))
        self.relay.from_worker(self.channels[rank], bytearray(b"".join(parts)))
        self.relay.flush()


class _Behind:
    bulk_bytes = 0

    def __init__(self, node: Node, rank: int) -> None:
        self.node, self.rank = node, rank

    def queue(self, *parts: Any) -> int:
        message, payload = unpack(bytearray(b"".join(parts)))
        if isinstance(message, CallMessage):
            self.node.got[self.rank] = message, bytes(payload)
        return 0

    def flush(self) -> bool:
        return True

    def close(self) -> None: ...


def _no(*_: object) -> None:
    """Nothing is left to write."""


def columns(count: int) -> EncodedRanks:
    """Worker i gets i bytes of value 1 and then one of value i."""
    edges = [[0, *itertools.accumulate(range(count))], range(count + 1)]
    values = bytes([1]) * (count * (count - 1) // 2), bytes(range(count))
    return EncodedRanks((7,), [memoryview(each) for each in values], np.asarray(edges, np.int64))  # type: ignore[arg-type]


def two_nodes(first: Sequence[int], second: Sequence[int], stall_limit_s: float = 60.0) -> tuple[list[Node], list[Any]]:
    ids = itertools.count(1)
    nodes = [Node("a", first, ids, stall_limit_s), Node("b", second, ids, stall_limit_s)]
    workers = {**nodes[0].workers, **nodes[1].workers}
    return nodes, [workers[rank] for rank in sorted(workers)]


def test_workers_of_nodes_that_share_a_relay_get_one_message() -> None:
    node = Node("a", range(6), itertools.count(1), hosts=3)
    workers = list(node.workers.values())
    assert len({worker.node for worker in workers}) == 3
    calls = submit_all(workers, Adder.add, Scattered(columns(6), (10,)))
    assert node.messages == 1
    for rank in (0, 1, 2, 3, 5):
        node.answer(rank)
    assert [bool(node.calls.of(worker)) for worker in workers] == [False] * 4 + [True, False]
    workers[4].mark_dead(-9)
    outcomes = gather_outcomes(calls, "sums")
    assert isinstance(outcomes[4], WorkerDied) and [outcomes[rank] for rank in (0, 1, 5)] == [7, 27, 107]


def test_a_worker_that_comes_through_the_relay_of_other_nodes_is_refused() -> None:
    """The address of its node's former relay may still be known there."""
    ids = itertools.count(1)
    one, other = Node("a", [0], ids), Node("b", [1], ids)
    with pytest.raises(ValueError, match="w-1 has another call relay"):
        one.link.open(7, other.workers[1])
    assert 7 not in one.link.channels and other.workers[1].link is other.link


@pytest.mark.parametrize(("first", "second", "messages"), [((0, 1, 2), (3, 4), (1, 1)), ((0, 2, 3), (1, 4), (2, 2))])
def test_each_worker_gets_its_piece_of_the_columns(
    first: Sequence[int], second: Sequence[int], messages: tuple[int, int]
) -> None:
    """A node's workers that are next to each other in the columns get one message."""
    nodes, workers = two_nodes(first, second)
    calls = submit_all(workers, Adder.add, Scattered(columns(5), (10,)))
    assert isinstance(calls, CallGroup) and tuple(node.messages for node in nodes) == messages
    for node in nodes:
        for rank in list(node.got):
            node.answer(rank)
    assert gather_results(calls, "sums") == [10 * 2 * rank + 7 for rank in range(5)]
    assert gather_identical(calls, "sums") == 7 and calls[3].result("one") == 67


def test_results_in_one_message_belong_to_their_workers_in_any_order() -> None:
    nodes, workers = two_nodes((0, 1, 2), ())
    calls = submit_all(workers, Adder.add, Scattered(columns(3), (1,)))
    (node, _), answered = nodes, []
    calls.on_answers(lambda workers, read: answered.append(([each.name for each in workers], read())))  # type: ignore[union-attr]
    node.relay.flush = lambda: None  # type: ignore[method-assign]
    for rank in (2, 0, 1):
        node.answer(rank)
    del node.relay.flush  # type: ignore[method-assign]
    node.relay.flush()
    assert answered == [(["w-0", "w-1", "w-2"], [7, 9, 11])]
    assert gather_results(calls, "sums") == [7, 9, 11] and not any(
        node.workers[0].node.calls.of(each) for each in workers
    )


def test_calls_in_turn_are_one_message_of_a_relay() -> None:
    nodes, workers = two_nodes((0, 1), (2,))
    direct = _Direct()
    workers[2].handle_message(direct, ResumeMessage(0, 1), memoryview(b""))
    first, second = submit_in_turn(workers, (Adder.add, Scattered(columns(3), (1,))), (Adder.add, [((5, _ONE), 2)] * 3))
    assert nodes[0].messages == 1 and [call.method for call, _ in direct.got] == ["add", "add"]
    nodes[0].answer(1)  # the second, since the node keeps the last call of each worker
    nodes[0].answer(0)
    workers[2].handle_message(direct, ResultMessage(direct.got[1][0].id), memoryview(_encoded(7)))
    assert gather_results(second, "sums") == [7, 7, 7] and not first.done()  # type: ignore[attr-defined]


_ONE = np.ones(1, np.uint8)


def _encoded(value: int) -> Any:
    return signature_of(Adder.add).encode_result(value)


def test_results_that_come_again_with_those_of_the_others_count_once() -> None:
    """A worker that connects anew may answer over its new connection before the relay sends the results of all."""
    nodes, workers = two_nodes((0, 1), ())
    calls = submit_all(workers, Adder.add, Scattered(columns(2), (1,)))
    node = nodes[0]
    number = node.got[0][0].id
    workers[1].handle_message(node.link.channels[2][0], ResultMessage(number), memoryview(_encoded(9)))
    frame = pack_relayed(CallResults(number, [len(_encoded(7))] * 2), [_encoded(7), _encoded(1)])
    for _ in range(2):
        node.link.handle_frame(bytearray(b"".join(frame)), node._accept)
    assert gather_results(calls, "sums") == [7, 9]


def test_results_of_a_worker_whose_connection_is_closed_meanwhile_count() -> None:
    nodes, workers = two_nodes((0, 1, 2), ())
    calls = submit_all(workers, Adder.add, Scattered(columns(3), (1,)))
    node = nodes[0]
    node.relay.flush = lambda: None  # type: ignore[method-assign]
    for rank in (1, 2, 0):
        node.answer(rank)
    del node.relay.flush  # type: ignore[method-assign]
    node.link.channels.pop(node.channels[2])  # as `RelayedConnection.close` does
    workers[2].link = None
    node.relay.flush()
    assert gather_results(calls, "sums") == [7, 9, 11]


def test_results_of_a_relay_that_replaced_another_belong_to_its_own_channels() -> None:
    """Every relay counts its channels from 1, and the workers may connect to the new one in another order."""
    nodes, workers = two_nodes((0, 1), ())
    calls = submit_all(workers, Adder.add, Scattered(columns(2), (1,)))
    node = nodes[0]
    assert node.channels == {0: 1, 1: 2}
    link = CallRelayLink(node, lambda _: None, node.link.expected)  # type: ignore[arg-type]
    link.open(1, workers[1])
    link.open(2, workers[0])
    number = node.got[0][0].id
    of_1, of_0 = (signature_of(Adder.add).encode_result(value) for value in (9, 7))
    frame = pack_relayed(RelayedResults([1, 2], [number] * 2, [len(of_1), len(of_0)]), [of_1, of_0])
    link.handle_frame(bytearray(b"".join(frame)), node._accept)
    assert gather_results(calls, "sums") == [7, 9]


def test_a_malformed_frame_of_results_is_refused() -> None:
    nodes, workers = two_nodes((0, 1), ())
    submit_all(workers, Adder.add, Scattered(columns(2), (1,)))
    for message in (
        RelayedResults([], [], []),
        RelayedResults([1, 2], [1], [0, 0]),
        RelayedResults([1, 2], [1, 1], [0]),
        CallResults(1, [0, 0, 0]),
    ):
        with pytest.raises(ValueError, match="relayed frame"):
            nodes[0].link.handle_frame(bytearray(b"".join(pack_relayed(message))), nodes[0]._accept)


def test_answers_are_handed_over_as_they_come_and_a_failure_comes_alone() -> None:
    nodes, workers = two_nodes((0, 1), (2,))
    calls = submit_all(workers, Adder.add, Scattered(columns(3), (1,)))
    nodes[0].answer(1)
    answered: list[tuple[list[str], Any]] = []

    def callback(workers: Sequence[Any], read: Any) -> None:
        try:
            answered.append(([each.name for each in workers], read()))
        except (RemoteError, WorkerDied) as error:
            answered.append(([each.name for each in workers], type(error)))

    on_answers(workers, calls, callback)
    assert answered == [(["w-1"], [9])], "what was there before"
    nodes[1].answer(2, error="bad rows")
    workers[0].mark_dead(1)
    assert answered[1:] == [(["w-2"], RemoteError), (["w-0"], WorkerDied)] and calls.done()  # type: ignore[attr-defined]


def test_a_worker_that_has_answered_is_not_called_again_after_it_connects_anew() -> None:
    nodes, workers = two_nodes((0, 1), (2,))
    calls = submit_all(workers, Adder.add, Scattered(columns(3), (1,)))
    nodes[0].answer(0)
    again = [_Direct(), _Direct()]
    for worker, connection in zip(workers, again, strict=False):
        worker.handle_message(connection, ResumeMessage(0, 1), memoryview(b""))
    assert [len(each.got) for each in again] == [0, 1], "only the call that is open"
    done = signature_of(Adder.add).encode_result(9)
    for _ in range(2):  # a repeated result is taken once
        workers[1].handle_message(again[1], ResultMessage(again[1].got[0][0].id), memoryview(done))
    nodes[1].answer(2)
    assert gather_results(calls, "sums") == [7, 9, 11]


def test_a_failure_names_its_worker_and_the_others_have_their_results() -> None:
    nodes, workers = two_nodes((0, 1), (2,))
    calls = submit_all(workers, Adder.add, Scattered(columns(3), (1,)))
    early = calls[1]
    assert not early.done()
    nodes[0].answer(1, error="bad rows")
    with pytest.raises(RemoteError, match="bad rows") as raised:
        gather_results(calls, "sums")
    assert raised.value.worker == "w-1" and early.done()
    nodes[0].answer(0)
    nodes[1].answer(2)
    first, second, third = gather_outcomes(calls, "sums")
    assert (first, third) == (7, 11) and isinstance(second, RemoteError)


def test_a_worker_that_does_nothing_is_named() -> None:
    nodes, workers = two_nodes((0, 1), (2,), stall_limit_s=0.5)
    calls = submit_all(workers, Adder.add, Scattered(columns(3), (1,)))
    nodes[0].answer(0)
    nodes[1].answer(2)
    with pytest.raises(Stalled) as raised:
        wait_for_calls([calls], "sums")
    assert raised.value.waits_for == "w-1"
    outcomes = gather_outcomes(calls, "sums")
    assert [type(each) for each in outcomes] == [int, Stalled, int]


def test_a_dead_worker_fails_its_call_and_the_call_is_sent_again_to_one_that_connects_anew() -> None:
    nodes, workers = two_nodes((0, 1), (2,))
    workers[0].mark_dead(1)
    calls = submit_all(workers, Adder.add, Scattered(columns(3), (1,)))
    again = _Direct()
    workers[2].handle_message(again, ResumeMessage(0, 1), memoryview(b""))
    (call, payload) = again.got[0]
    assert signature_of(Adder.add).decode_arguments(bytearray(payload))["own"][1].tolist() == [1, 1, 2]
    done = signature_of(Adder.add).encode_result(11)
    workers[2].handle_message(again, ResultMessage(call.id), memoryview(done))
    nodes[0].answer(1)
    dead, *others = gather_outcomes(calls, "sums")
    assert "w-0 exited with 1" in str(dead) and others == [9, 11]


class _Direct:
    """A connection without a relay."""

    closed, bulk_bytes, pending = False, 0, False

    def __init__(self) -> None:
        self.got: list[tuple[CallMessage, bytes]] = []

    def queue(self, *parts: Any) -> int:
        message, payload = unpack(bytearray(b"".join(parts)))
        if isinstance(message, CallMessage):
            self.got.append((message, bytes(payload)))
        return 0

    def flush(self) -> bool:
        return True

    def close(self) -> None: ...


def test_pieces_that_do_not_make_up_their_columns_are_refused() -> None:
    good = np.asarray([[1, 2], [3, 0]], np.uint32)
    columns = memoryview(b"abcdxy")
    assert [b"".join(each) for each in cut_columns(columns, good.tobytes(), 2)] == [b"axy", b"bcd"]
    for bad in (good[:1].tobytes(), (good + 1).tobytes(), good.tobytes()[:-1], b""):
        with pytest.raises(ValueError, match="pieces"):
            list(cut_columns(columns, bad, 2))


def test_large_arrays_are_not_combined_with_own_bytes() -> None:
    class Large:
        def take(self, own: tuple[int, np.ndarray], table: np.ndarray) -> None: ...

    nodes, workers = two_nodes((0,), (1,))
    with pytest.raises(CodecError, match="cannot be combined"):
        submit_all(workers, Large.take, Scattered(columns(2), (np.zeros(1 << 20),)))
    assert nodes[0].messages == 0
