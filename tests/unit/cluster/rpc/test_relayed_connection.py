"""When the controller takes a call relay for silent."""

import secrets
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection
from lockstep.cluster.rpc.codec import signature_of
from lockstep.cluster.rpc.futures import CallGroup
from lockstep.cluster.rpc.open_calls import OpenCall, OpenCalls, RelayedArguments
from lockstep.cluster.rpc.relay_messages import RelayedAcks, RelayedResults, pack_relayed, unpack_to_relay
from lockstep.cluster.rpc.relayed_connection import CallRelayLink, ExpectedRelay, RelayedConnection
from lockstep.cluster.rpc.remote_worker import SharedArguments

TOKEN = secrets.token_hex(32)
LIMIT_S = 0.4
EXPECTED = ExpectedRelay(OpenCalls(), lambda address: None, lambda: None)


class Adder:
    def add(self, number: int) -> int:
        return number


@pytest.fixture
def ends() -> Iterator[tuple[CallRelayLink, Connection]]:
    """The controller's end, and the relay's."""
    with auth_handshake.Listener(TOKEN, "run", 1) as listener, ThreadPoolExecutor() as pool:
        accepted = pool.submit(listener.accept, 10.0)
        relay = auth_handshake.connect("127.0.0.1", listener.port, token=TOKEN, run="run", generation=1, name="relay")
        controller = accepted.result(timeout=10)
        assert controller is not None
        with controller, relay:
            link = CallRelayLink(controller, lambda _: None, EXPECTED)
            link.heartbeat.limit_s = LIMIT_S
            yield link, relay


def silent_within(link: CallRelayLink, seconds: float, relay: Connection | None = None) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if relay is not None:
            relay.flush()
        assert link.connection.recv(0) is None, "the frame is longer than the time"
        if link.is_silent():
            return True
        time.sleep(0.05)
    return False


def test_a_relay_is_not_silent_while_a_large_frame_arrives(ends: tuple[CallRelayLink, Connection]) -> None:
    """Its reports are behind the frame, which takes longer than the limit."""
    link, relay = ends
    relay.queue(bytes(256 << 20))
    assert not silent_within(link, 3 * LIMIT_S, relay)
    assert silent_within(link, 3 * LIMIT_S), "it sends nothing more"


def test_what_is_written_for_one_worker_is_no_progress_of_another(ends: tuple[CallRelayLink, Connection]) -> None:
    """A large frame for one engine is on its way through the relay while another one is stuck."""
    link, relay = ends
    stuck, served = RelayedConnection(link, 1), RelayedConnection(link, 2)
    link.channels |= {1: (stuck, None), 2: (served, None)}  # type: ignore[dict-item]
    served.queue(bytes(64 << 20))
    stuck.queue(b"a small frame behind it")
    seen = [(stuck.bulk_bytes, served.bulk_bytes)]
    while link.connection.pending:
        link.flush()
        assert not link.is_silent()
        seen.append((stuck.bulk_bytes, served.bulk_bytes))
        relay.recv(0)
    link.is_silent()
    assert {bytes_of_stuck for bytes_of_stuck, _ in seen} == {0} and stuck.bulk_bytes == 0
    written = [bytes_of_served for _, bytes_of_served in seen]
    assert written == sorted(written) and len(set(written)) > 2 and served.bulk_bytes >= 64 << 20


def test_frames_that_threads_queue_at_once_are_counted_for_their_own_workers() -> None:
    class Queue:
        """Numbers bytes as a connection does."""

        written_bytes = bulk_bytes = queued = 0
        lock = threading.Lock()

        def queue(self, *parts: bytes) -> tuple[int, int]:
            with self.lock:
                begin, self.queued = self.queued, self.queued + sum(map(len, parts))
                return begin, self.queued

    link = CallRelayLink(Queue(), lambda _: None, EXPECTED)  # type: ignore[arg-type]
    large, interval = bytes(2 << 20), sys.getswitchinterval()

    def queue(channel: int) -> None:
        for _ in range(3000):
            link.queue((channel,), b"x" if channel else large)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=queue, args=(channel,)) for channel in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(interval)
    assert [end - begin for begin, end, _ in link._large] == [len(large)] * 3000


def test_acknowledgements_of_a_frame_that_is_refused_go_with_the_next(ends: tuple[CallRelayLink, Connection]) -> None:
    link, relay = ends
    link._arrived = [1, 2], [3], [4]
    limit, link.connection.max_frame = link.connection.max_frame, 8
    signature = signature_of(Adder.add)
    group: CallGroup[int] = CallGroup((), signature.qualified, signature.decode_result)
    call = OpenCall(5, group, signature, SharedArguments(b""), (), [7], link)
    link.send_calls([(call, RelayedArguments(None, (b"x" * 9,), [9]))])
    link.acknowledge()
    link._arrived[0].append(6)
    link.connection.max_frame = limit
    link.acknowledge()
    frame = relay.recv(10.0)
    assert frame is not None
    assert unpack_to_relay(frame)[0] == RelayedAcks(([1, 2, 6], [3], [4])) and relay.recv(0.2) is None


def test_an_answer_that_comes_twice_is_settled_once_and_one_of_a_closed_channel_not_at_all(
    ends: tuple[CallRelayLink, Connection],
) -> None:
    class Worker:
        """A worker's handle, as far as results concern it."""

        progress_count, last_progress_at = 0, 0.0

        def __init__(self) -> None:
            self.unknown: list[tuple[int, int]] = []

        def settle_unknown(self, number: int, payload: memoryview) -> None:
            self.unknown.append((number, payload[0]))

    link, _ = ends
    workers = [Worker() for _ in range(3)]
    signature = signature_of(Adder.add)
    groups = {}
    for number in (5, 6):
        groups[number] = CallGroup(workers, signature.qualified, lambda payload: payload[0])  # type: ignore[arg-type]
        arguments = SharedArguments(b"")
        link._calls.add(OpenCall(number, groups[number], signature, arguments, workers, [1, 2, 3], link))  # type: ignore
    for channel, worker in enumerate(workers, start=1):
        link.channels[channel] = RelayedConnection(link, channel), worker  # type: ignore[assignment]

    def answer(*results: tuple[int, int]) -> None:
        channels, ids = map(list, zip(*results, strict=True))
        message = RelayedResults(channels, ids, [1] * len(results))
        frame = pack_relayed(message, [bytes([10 * id + channel]) for channel, id in results])
        link.handle_frame(bytearray(b"".join(frame)), lambda *_: None)

    answer((1, 5), (1, 5), (3, 5), (9, 5), (2, 6), (3, 6))
    assert [list(group.missing()) for group in groups.values()] == [[workers[1]], [workers[0]]]
    assert [worker.progress_count for worker in workers] == [1, 1, 2]
    answer((2, 5), (3, 5), (1, 6))
    assert groups[5].values() == [51, 52, 53] and groups[6].values() == [61, 62, 63]
    assert [worker.unknown for worker in workers] == [[(5, 51)], [], [(5, 53)]]
    assert link._calls.of(workers[0]) == []  # type: ignore[arg-type]
