"""What a call relay sends to whom and when, without sockets."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.base.transport.frames import ConnectionClosed
from lockstep.cluster.rpc import relay_messages
from lockstep.cluster.rpc.call_relay import DELAY_S, CallRelay
from lockstep.cluster.rpc.codec import INLINE_BYTES
from lockstep.cluster.rpc.relay_messages import (
    SAME,
    CallResults,
    ChannelClosed,
    ChannelOpened,
    RelayAlive,
    RelayedAcks,
    RelayedCall,
    RelayedCalls,
    RelayedFrames,
    RelayedResults,
    cut_batches,
    pack_relayed,
    split_payloads,
    unpack_from_relay,
)
from lockstep.cluster.rpc.rpc_messages import (
    AckMessage,
    CallMessage,
    FailureMessage,
    HeartbeatMessage,
    LeaveMessage,
    ResultMessage,
    pack_message,
    unpack_to_controller,
    unpack_to_worker,
)


def joined(parts: Any) -> bytearray:
    return bytearray(b"".join(parts))


class End:
    """A worker's end."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, bytes]] = []
        self.bulk_bytes, self.accepts, self.closed, self.broken = 0, True, False, False

    def queue(self, *parts: Any) -> int:
        if self.broken:
            raise ConnectionClosed("worker", "broke")
        message, payload = unpack_to_worker(joined(parts))
        self.got.append((message, bytes(payload)))
        return 0

    def flush(self) -> bool:
        return self.accepts

    def close(self) -> None:
        self.closed = True


class Node:
    """A relay with workers, and what it has sent to the controller."""

    def __init__(self, count: int) -> None:
        self.sent: list[tuple[Any, memoryview]] = []
        self.relay = CallRelay(lambda parts: self.sent.append(unpack_from_relay(joined(parts))))
        self.ends = [End() for _ in range(count)]
        self.channels = [self.relay.open(f"w-{place}", end) for place, end in enumerate(self.ends)]
        assert [message for message, _ in self.take()] == [
            ChannelOpened(channel, f"w-{place}") for place, channel in enumerate(self.channels)
        ]

    def take(self) -> list[tuple[Any, memoryview]]:
        sent, self.sent[:] = list(self.sent), []
        return sent

    def call(self, number: int, payloads: list[bytes], arrived: Any = ([], [], [])) -> None:
        sizes = list(map(len, payloads))
        message = RelayedCalls(self.channels, [RelayedCall(number, "add", False, sizes)], arrived)
        self.relay.from_controller(joined(pack_relayed(message, payloads)))

    def answer(self, place: int, message: Any, payload: bytes = b"") -> None:
        self.relay.from_worker(self.channels[place], joined(pack_message(message, payload)))


def results(sent: list[tuple[Any, memoryview]]) -> list[tuple[int, int, bytes]]:
    ((message, payload),) = sent
    assert isinstance(message, RelayedResults)
    parts = list(split_payloads(payload, message.sizes))
    return [(*each, bytes(part)) for *each, part in zip(message.channels, message.ids, parts, strict=True)]


def together(sent: list[tuple[Any, memoryview]]) -> tuple[int, list[bytes]]:
    """The id and the results of a call that all have answered."""
    ((message, payload),) = sent
    assert isinstance(message, CallResults)
    return message.id, [bytes(part) for part in split_payloads(payload, message.sizes)]


def test_every_worker_gets_its_call_and_all_results_leave_together() -> None:
    node = Node(3)
    node.call(7, [b"one", b"second", b""])
    assert [end.got for end in node.ends] == [
        [(CallMessage(7, "add", False), payload)] for payload in (b"one", b"second", b"")
    ]
    node.answer(2, ResultMessage(7), b"c")
    node.answer(0, ResultMessage(7), b"aa")
    assert node.take() == [], "the third may come at any moment"
    assert 0 < node.relay.due - time.monotonic() <= DELAY_S
    node.answer(1, ResultMessage(7), b"b" * 100)
    assert together(node.take()) == (7, [b"aa", b"b" * 100, b"c"]), "in the order of the call"
    assert node.relay.due == float("inf")


def test_equal_arguments_are_sent_once() -> None:
    node = Node(3)
    node.call(1, [b"same"])
    assert [payload for end in node.ends for _, payload in end.got] == [b"same"] * 3


def test_a_result_waits_for_others_for_a_moment_only() -> None:
    node = Node(2)
    node.call(1, [b""])
    node.answer(0, ResultMessage(1), b"x")
    node.relay.flush()  # as the process does when it is due
    assert results(node.take()) == [(node.channels[0], 1, b"x")]
    node.answer(1, ResultMessage(1), b"y")
    assert results(node.take()) == [(node.channels[1], 1, b"y")], "it was the last"


def test_a_failure_and_a_single_result_leave_at_once() -> None:
    node = Node(3)
    node.call(1, [b""])
    node.answer(0, ResultMessage(1), b"x")
    node.answer(1, FailureMessage(1, "ValueError", "bad", "trace"))
    (_, _), (frames, payload) = sent = node.take()
    assert results(sent[:1]) == [(node.channels[0], 1, b"x")]
    assert isinstance(frames, RelayedFrames) and frames.channels == [node.channels[1]]
    assert unpack_to_controller(bytearray(payload))[0] == FailureMessage(1, "ValueError", "bad", "trace")
    node.answer(0, ResultMessage(9), b"of a call that was sent alone")
    assert [each[:2] for each in results(node.take())] == [(node.channels[0], 9)]


def test_a_patient_result_waits_while_another_worker_has_the_same_method_to_answer() -> None:
    node = Node(3)
    first, second, third = node.channels
    node.channels = [first, second]
    node.call(1, [b""])
    node.channels = [third]
    node.call(2, [b""])  # another call of the method
    node.channels = [first, second, third]
    node.answer(0, ResultMessage(1, 5.0), b"x")
    node.answer(1, ResultMessage(1, 5.0), b"y")
    assert node.take() == [] and node.relay.due > time.monotonic() + 1.0, "the third has not answered"
    node.answer(2, ResultMessage(2, 5.0), b"z")
    assert [each[:2] for each in results(node.take())] == [(first, 1), (second, 1), (third, 2)]
    node.call(3, [b""])
    node.answer(0, ResultMessage(3, 5.0), b"x")
    node.answer(1, ResultMessage(3), b"y")
    assert node.relay.due < time.monotonic() + 2 * DELAY_S, "a result without patience takes the others along"
    node.relay.close(third)
    sent = node.take()
    assert [each[:2] for each in results(sent[:1])] == [(first, 3), (second, 3)], "and so does the end of a worker"


def test_equal_results_are_sent_once_unless_their_arrays_may_be_changed() -> None:
    node = Node(3)
    for size in (100, INLINE_BYTES):
        node.call(size, [b""])
        for place in range(3):
            node.answer(place, ResultMessage(size), bytes(size))
        sent = node.take()
        assert together(sent) == (size, [bytes(size)] * (1 if size == 100 else 3))
        assert len(sent[0][1]) == (128 if size == 100 else 3 * size)
    node.call(7, [b""])
    for place, answer in enumerate((b"a", b"b", b"b")):
        node.answer(place, ResultMessage(7), answer)
    sent = node.take()
    assert together(sent) == (7, [b"a", b"b", b"b"]) and sent[0][0].sizes == [1, 1, SAME]


def test_heartbeats_of_a_node_leave_together() -> None:
    node = Node(3)
    for place in range(3):
        node.answer(place, HeartbeatMessage(place, "train", ""))
    assert node.take() == [] and node.relay.due < time.monotonic() + 2 * DELAY_S
    node.relay.flush()
    ((frames, payload),) = node.take()
    assert frames.channels == node.channels
    beats = [unpack_to_controller(part)[0] for part in split_payloads(payload, frames.sizes)]
    assert beats == [HeartbeatMessage(place, "train", "") for place in range(3)]


@pytest.mark.parametrize("how", ["by the worker", "by the controller", "while it is called"])
def test_a_worker_that_is_gone_holds_up_no_result(how: str) -> None:
    node = Node(3)
    gone = node.channels[1]
    if how == "while it is called":
        node.ends[1].broken = True
    node.call(1, [b""])
    node.answer(0, ResultMessage(1), b"x")
    if how == "by the worker":
        node.answer(1, ResultMessage(1), b"its last")
        node.relay.close(gone)
    elif how == "by the controller":
        node.relay.from_controller(joined(pack_relayed(ChannelClosed(gone))))
    sent = node.take()
    assert node.ends[1].closed and ChannelClosed(gone) in [message for message, _ in sent]
    if how == "by the worker":
        assert [each[:2] for each in results(sent[:1])] == [(node.channels[0], 1), (gone, 1)], "before its end"
    node.answer(2, ResultMessage(1), b"z")
    assert (node.channels[2], 1, b"z") in results(node.take()), "nobody else is waited for"
    node.relay.close(gone)
    assert node.take() == [], "its end is reported once"


def test_acknowledgements_reach_the_workers_that_keep_the_results() -> None:
    node = Node(3)
    first, second, third = node.channels
    node.channels = [first, second]
    node.call(5, [b""], ([], [first, third, first], [3, 3, 4]))
    assert node.ends[0].got[0][0] == CallMessage(5, "add", False, [3, 4])
    assert node.ends[1].got[0][0] == CallMessage(5, "add", False, [])
    assert node.ends[2].got[0][0] == AckMessage([3])
    node.relay.from_controller(joined(pack_relayed(RelayedAcks(([], [second], [5])))))
    assert node.ends[1].got[1][0] == AckMessage([5])
    for place in (0, 1):
        node.answer(place, ResultMessage(5))
    assert together(node.take())[0] == 5
    node.call(6, [b""], ([5], [], []))
    assert [node.ends[place].got[-1][0] for place in (0, 1)] == [CallMessage(6, "add", False, [5])] * 2
    node.relay.from_controller(joined(pack_relayed(RelayedAcks(([5], [], [])))))
    assert not isinstance(node.ends[0].got[-1][0], AckMessage), "a call is acknowledged once"


def test_calls_in_one_message_follow_each_other_and_channels_are_named_once() -> None:
    node = Node(2)
    calls = [RelayedCall(1, "add", False, [2, 1]), RelayedCall(2, "sub", True, [1])]
    node.relay.from_controller(
        joined(pack_relayed(RelayedCalls(node.channels, calls, ([], [], [])), [b"aa", b"b", b"c"]))
    )
    again = RelayedCalls([], [RelayedCall(3, "add", False, [1])], ([], [], []))
    node.relay.from_controller(joined(pack_relayed(again, [b"d"])))
    for end, own in zip(node.ends, (b"aa", b"b"), strict=True):
        assert end.got == [
            (CallMessage(1, "add", False), own),
            (CallMessage(2, "sub", True), b"c"),
            (CallMessage(3, "add", False), b"d"),
        ]
    with pytest.raises(ValueError, match="no channels"):
        Node(1).relay.from_controller(joined(pack_relayed(again, [b"d"])))


def test_other_messages_pass_unchanged_and_a_full_connection_is_written_later() -> None:
    node = Node(2)
    leave = joined(pack_message(LeaveMessage("stopped")))
    node.ends[1].accepts = False
    message = RelayedFrames(node.channels, [len(leave)] * 2)
    node.relay.from_controller(joined(pack_relayed(message, [leave, leave])))
    assert [end.got for end in node.ends] == [[(LeaveMessage("stopped"), b"")]] * 2
    assert node.relay.blocked == {node.channels[1]}
    node.ends[1].accepts = True
    node.relay.write(node.channels[1])
    assert node.relay.blocked == set()
    node.ends[0].bulk_bytes = 1 << 20
    node.relay.report()
    node.relay.report()
    assert [message for message, _ in node.take()] == [RelayAlive([(node.channels[0], 1 << 20)]), RelayAlive([])]


def test_results_that_are_large_together_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.cluster.rpc.call_relay.MAX_BATCH_BYTES", 1000)
    node = Node(3)
    node.call(1, [b""])
    node.answer(0, ResultMessage(1), bytes(600))
    assert node.take() == []
    node.answer(1, ResultMessage(1), bytes(600))
    assert len(results(node.take())) == 2


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_batches_are_cut_in_order_and_below_the_limit(sizes: list[int], limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay_messages, "MAX_BATCH_BYTES", limit)
        parts = [sizes[part] for part in cut_batches(sizes)]
    assert [size for part in parts for size in part] == sizes
    assert all(part and (sum(part) <= limit or sum(map(bool, part)) <= 1) for part in parts)


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_payloads_survive_and_are_aligned(payloads: list[bytes]) -> None:
    numbers = list(range(len(payloads)))
    frame = joined(pack_relayed(RelayedResults(numbers, numbers, list(map(len, payloads))), payloads))
    message, payload = unpack_from_relay(frame)
    assert isinstance(message, RelayedResults)
    parts = list(split_payloads(payload, message.sizes))
    assert list(map(bytes, parts)) == payloads
    assert len(payload) % 64 == 0
    if payloads and payloads[-1]:
        with pytest.raises(ValueError, match="truncated"):
            list(split_payloads(payload[:-64], message.sizes))
