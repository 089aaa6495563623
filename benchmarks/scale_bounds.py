"""What a step of many workers costs at the least: small programs that do only what any controller in Python must do.

`benchmarks.scale` runs them beside the real controller, with the numbers of messages, bytes, calls and samples that it
has counted there. Each does one thing, in one thread, without classes of ours or anything that handles failures:

- `frames_s`: writes and reads each message, and authenticates it, as whoever reaches the port could send one;
- `heads_s`: encodes and decodes what each message says of its calls;
- `payloads_s`: encodes the requests of each engine, and decodes the completions of each answer;
- `objects_s`: makes the requests of each group with their seeds and each completion with its arrays, and frees them;
- `calls_s`: enters each call until it is answered, without which no failure could name its worker, and records when
  each worker made progress, without which no stall could be noticed; with a lock for each message;
- `routing_s`: gives each group to the engine with the fewest requests, and takes each completion once.
"""

import hashlib
import heapq
import hmac
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from benchmarks.fake_workers import Traffic, completion_of
from lockstep.base.transport.frame_codes import KEY_BYTES, SessionKeys
from lockstep.base.transport.frames import Connection, PeerIdentity
from lockstep.cluster.rpc.relay_messages import CallResults, RelayedCall, RelayedCalls
from lockstep.data.samples import Completion
from lockstep.rollout.engine_protocol import CompletionBatch, RequestGroup, RequestSettings, request_seeds

ROUNDS = 3
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Groups:
    """How many groups of requests a step has, of how many requests, and the tokens of a completion."""

    count: int
    size: int
    tokens: int

    def requests(self) -> list[RequestGroup]:
        prompt, settings = np.arange(32, dtype=np.int32), RequestSettings(max_tokens=self.tokens)
        return [
            RequestGroup(
                f"0/{group}",
                prompt.tobytes(),
                [f"0/{group}/{k}" for k in range(self.size)],
                request_seeds(0, 1, f"0:{group}", range(self.size)),
                settings,
            )
            for group in range(self.count)
        ]


def socket_s(traffic: Traffic, connections: int = 64, rounds: int = 30) -> float:
    """CPU seconds that this traffic costs beside its messages: frames of its mean size written to connections over
    loopback, and answers heard of by a selector and read, as the controller does."""
    selector, pairs = selectors.DefaultSelector(), []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for number in range(connections):
            far = socket.create_connection(listening.getsockname())
            near = listening.accept()[0]
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer, keys = PeerIdentity("scale", 1, str(number)), (b"n" * KEY_BYTES, b"f" * KEY_BYTES)
            pairs.append([Connection(near, peer, SessionKeys(*keys)), Connection(far, peer, SessionKeys(*keys[::-1]))])
            selector.register(pairs[-1][0], selectors.EVENT_READ, pairs[-1][0])
    writes = reads = 0
    sent = b"x" * (traffic.sent_bytes // max(1, traffic.sent))
    received = b"x" * (traffic.received_bytes // max(1, traffic.received))
    for _ in range(rounds):
        began = time.thread_time_ns()
        for near, _ in pairs:
            near.queue(b"head", sent)
            near.flush()
        writes += time.thread_time_ns() - began
        for _, far in pairs:
            while far.recv(1.0) is None:
                pass
            far.send(received)
        began, heard = time.thread_time_ns(), 0
        while heard < connections:
            for key, _ in selector.select(1.0):
                heard += sum(1 for _ in key.data.frames())
        reads += time.thread_time_ns() - began
    for pair in pairs:
        for each in pair:
            each.close()
    selector.close()
    return (writes * traffic.sent + reads * traffic.received) / 1e9 / rounds / connections


def frames_s(traffic: Traffic, connections: int = 64, rounds: int = 20) -> float:
    """CPU seconds of as many plain writes and reads of these mean sizes, each with the two codes that authenticate its
    length and its content. As in `socket_s`, frames go to one connection after the other, and a selector says which of
    them have an answer."""
    writes = reads = 0
    sent = b"x" * (traffic.sent_bytes // max(1, traffic.sent))
    received = b"x" * (traffic.received_bytes // max(1, traffic.received))
    keys = [hashlib.blake2b(key=bytes([at] * KEY_BYTES), digest_size=16) for at in range(connections)]
    selector, pairs = selectors.DefaultSelector(), []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for keyed in keys:
            far = socket.create_connection(listening.getsockname())
            near = listening.accept()[0]
            pairs.append((near, far, keyed))
            selector.register(near, selectors.EVENT_READ, keyed)
    for _ in range(rounds):
        began = time.thread_time_ns()
        for near, _, keyed in pairs:
            near.sendall(b"".join((*_codes(keyed, sent), sent)))
        writes += time.thread_time_ns() - began
        for _, far, _ in pairs:
            far.recv(len(sent) + 32, socket.MSG_WAITALL)
            far.sendall(received)
        began, heard = time.thread_time_ns(), 0
        while heard < connections:
            for key, _ in selector.select(1.0):
                data = key.fileobj.recv(len(received), socket.MSG_WAITALL)  # type: ignore[union-attr]
                hmac.compare_digest(b"".join(_codes(key.data, data)), bytes(32))
                heard += 1
        reads += time.thread_time_ns() - began
    for near, far, _ in pairs:
        near.close()
        far.close()
    selector.close()
    return (writes * traffic.sent + reads * traffic.received) / 1e9 / rounds / connections


def _codes(keyed: "hashlib.blake2b", content: bytes) -> tuple[bytes, bytes]:
    code = keyed.copy()
    code.update(len(content).to_bytes(16, "big"))
    of_length = code.digest()
    code.update(hashlib.sha256(content).digest() if len(content) >= 1024 else content)
    return of_length, code.digest()


def heads_s(traffic: Traffic) -> float:
    """CPU seconds of encoding the head of each message that is sent, and decoding that of each that is received."""
    call = RelayedCalls([], [RelayedCall(1 << 33, "write_weights", False, [16])], ([1 << 33], [], []))
    answer = _ENCODER.encode(CallResults(1 << 33, [16]))
    decode = msgspec.msgpack.Decoder(CallResults).decode

    def work() -> None:
        for _ in range(traffic.sent):
            _ENCODER.encode(call)
        for _ in range(traffic.received):
            decode(answer)

    return _cpu_s(work)


def payloads_s(engines: int, size: Groups, answers: int) -> float:
    """CPU seconds of encoding the requests of each engine, and decoding so many answers, which have all completions in
    columns."""
    groups = size.requests()
    of_engine = [groups[engine::engines] for engine in range(engines)]
    each = max(1, round(size.count * size.size / max(1, answers)))
    requests = [request for group in groups for request in group.requests][:each]
    answer = _ENCODER.encode(CompletionBatch.of([completion_of(request, size.tokens, 0) for request in requests]))
    decode = msgspec.msgpack.Decoder(CompletionBatch).decode

    def work() -> None:
        for some in of_engine:
            _ENCODER.encode(some)
        kept = [decode(answer) for _ in range(answers)]
        b"".join([batch.tokens for batch in kept])
        b"".join([batch.logprobs for batch in kept])

    return _cpu_s(work)


def objects_s(size: Groups) -> float:
    """CPU seconds of what any program with objects does for so many requests and completions: a group of requests with
    their ids and seeds, a completion with views of three arrays, and its place in a dict; and of freeing them."""
    tokens = size.tokens
    values = np.frombuffer(bytearray(12 * tokens * size.count * size.size), np.int32)
    logprobs = values.view(np.float32)

    def work() -> None:
        done, at = {}, 0
        for group in size.requests():
            for id in group.ids:
                arrays = (
                    values[at : at + tokens],
                    logprobs[at + tokens : at + 2 * tokens],
                    values[at + 2 * tokens : at + 3 * tokens],
                )
                done[id] = Completion(id, *arrays, "length", "text")
                at += 3 * tokens
        assert len(done) == size.count * size.size

    return _cpu_s(work)


def calls_s(calls: int, messages: int, workers: int) -> float:
    """CPU seconds of what any program that knows which worker has not answered, and since when each has made no
    progress, does for so many calls in so many messages: it enters each in a dict, looks up the answer's worker by the
    number in the answer, takes the call out, and records the time at the worker; with the lock of the connection for
    each message and each answer, since several threads send."""
    lock, alive = threading.Lock(), [_Progress() for _ in range(workers)]

    def work() -> None:
        open_calls: dict[int, _Progress] = {}
        for _ in range(messages):
            with lock:
                pass
        for number in range(calls):
            open_calls[number] = alive[number % workers]
        now = time.monotonic()
        for number in range(calls):
            worker = open_calls.pop(number)
            worker.count += 1
            worker.at = now

    return _cpu_s(work)


class _Progress:
    """How often a worker has made progress, and when the last time."""

    __slots__ = ("at", "count")

    def __init__(self) -> None:
        self.count, self.at = 0, 0.0


def routing_s(engines: int, groups: Groups) -> float:
    """CPU seconds of giving each group of requests to the engine with the fewest, and of taking each completion once:
    from its engine's open requests to those of its step that are done."""
    ids = [[f"0/{group}/{k}" for k in range(groups.size)] for group in range(groups.count)]

    def work() -> None:
        heap = [(0, engine) for engine in range(engines)]
        open_requests: list[dict[str, None]] = [{} for _ in range(engines)]
        engine_of = []
        for group in ids:
            load, engine = heap[0]
            heapq.heapreplace(heap, (load + groups.size, engine))
            open_requests[engine].update(dict.fromkeys(group))
            engine_of.append(engine)
        done = {}
        for group, engine in zip(ids, engine_of, strict=True):
            for id in group:
                open_requests[engine].pop(id)
                done[id] = None

    return _cpu_s(work)


def _cpu_s(work: Callable[[], None]) -> float:
    """The least of some repetitions."""
    spent = []
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        work()
        spent.append(time.thread_time_ns() - began)
    return min(spent) / 1e9
