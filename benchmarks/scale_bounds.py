"""The limit of what a step with many workers costs: small programs that do only what any controller in Python must do.

`benchmarks.scale` runs them in the same process as the real controller, with the numbers of messages, bytes, calls and
samples that it has counted there, part by part of a step (`limits`). Each is straight-line code without layers:

- *frames*: writes and reads each message, and authenticates it, as whoever reaches the port could send one;
- *calls*: numbers and encodes each call with what it acknowledges, keeps it to be sent again until it is answered,
  knows which workers owe the answer, decodes it, records when they made progress, and counts the answers for who waits;
- *requests*: makes the requests of each group with ids and seeds, gives each group to the engine with the fewest,
  encodes them, and remembers which engine has which;
- *completions*: decodes each answer as it arrived, checks it, makes an object with its arrays for each completion,
  takes each once, and finds the oldest version of a token;
- *counters*: decodes those of each engine;
- *rows*: cuts the rows of the ranks of each message out of the columns.
"""

import hashlib
import heapq
import hmac
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from benchmarks.fake_workers import Traffic, completion_of
from lockstep.base.transport.frame_codes import KEY_BYTES, SessionKeys
from lockstep.base.transport.frames import Connection, PeerIdentity
from lockstep.cluster.rpc.relay_messages import CallResults, RelayedCall, RelayedCalls
from lockstep.data.micro_batch import EncodedRanks
from lockstep.data.samples import Completion
from lockstep.rollout.engine_protocol import (
    CompletionBatch,
    EngineProgress,
    RequestGroup,
    RequestSettings,
    request_seeds,
)

ROUNDS = 5
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a part of a step exchanges with workers."""

    sent: int
    received: int
    calls: int
    """Of one worker each."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a step is about."""

    engines: int
    groups: int
    group_size: int
    tokens: int
    """Of a completion."""
    rows: EncodedRanks


def limits(work: Work, exchanged: Mapping[str, Exchange], traffic: Traffic) -> dict[str, dict[str, float]]:
    """CPU seconds that each part of a step takes at the least, by what they are spent on.

    Args:
        traffic: all messages of the step.
    """
    found = {part: {"calls": calls_s(exchange)} for part, exchange in exchanged.items()}
    found["submit"]["requests"] = requests_s(work)
    found["collect"]["completions"] = completions_s(work, exchanged["collect"].calls)
    found["progress"]["counters"] = counters_s(exchanged["progress"].calls)
    found["step"]["rows"] = rows_s(work.rows, exchanged["step"].sent)
    found["sockets"] = {"frames": frames_s(traffic)}
    return found


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


@dataclass(slots=True)
class _Worker:
    progress_count: int = 0
    last_progress_at: float = 0.0


@dataclass(slots=True)
class _Node:
    """A connection and the workers behind it."""

    workers: list[_Worker]
    lock: threading.Lock = field(default_factory=threading.Lock)
    open: dict[int, tuple[bytes, list[_Worker]]] = field(default_factory=dict)
    """The message and the workers of each call that is not answered, by its number."""
    arrived: list[int] = field(default_factory=list)
    """Calls whose answers are not acknowledged."""


def calls_s(exchange: Exchange) -> float:
    """CPU seconds of sending and answering these calls, as this module's description says. Several threads may send, so
    each connection has a lock, as have the answers of a call."""
    if not exchange.sent:
        return 0.0
    each = max(1, round(exchange.calls / exchange.received))
    nodes = [_Node([_Worker() for _ in range(each)]) for _ in range(max(exchange.sent, exchange.received))]
    answers = [bytearray(_ENCODER.encode(CallResults(number, [16]))) for number in range(exchange.received)]
    decode, lock, results = msgspec.msgpack.Decoder(CallResults).decode, threading.Lock(), []

    def work() -> None:
        numbers, left, done = itertools.count(), len(nodes) * each, threading.Event()
        results.clear()
        for node in nodes[: exchange.sent]:
            with node.lock:
                number, acknowledged, node.arrived = next(numbers), node.arrived, []
                calls = [RelayedCall(number, "write_weights", False, [16])]
                message = _ENCODER.encode(RelayedCalls([], calls, (acknowledged, [], [])))
                node.open[number] = message, node.workers
        for node, number in zip(nodes[exchange.sent :], numbers, strict=False):
            node.open[number] = b"", node.workers  # asked in an earlier message
        for node, answer in zip(nodes, answers, strict=False):
            result, now = decode(answer), time.monotonic()
            with node.lock:
                _, workers = node.open.pop(result.id)
                node.arrived.append(result.id)
            for worker in workers:
                worker.progress_count += 1
                worker.last_progress_at = now
            with lock:
                results.append((workers, answer))
                left -= len(workers)
        done.set()

    return _cpu_s(work)


def requests_s(work: Work) -> float:
    """CPU seconds of making, giving out and encoding the requests of a step."""
    prompt, settings = np.arange(32, dtype=np.int32), RequestSettings(max_tokens=work.tokens)
    numbers = range(work.group_size)

    def make() -> None:
        heap = [(0, engine) for engine in range(work.engines)]
        open_requests: list[dict[str, RequestGroup]] = [{} for _ in heap]
        given: list[list[RequestGroup]] = [[] for _ in heap]
        for number in range(work.groups):
            ids = [f"0/0:{number}/{k}" for k in numbers]
            seeds = request_seeds(0, 1, f"0:{number}", numbers)
            group = RequestGroup(f"1/0:{number}", prompt.tobytes(), ids, seeds, settings)
            load, engine = heap[0]
            heapq.heapreplace(heap, (load + work.group_size, engine))
            open_requests[engine].update(dict.fromkeys(ids, group))
            given[engine].append(group)
        for groups in given:
            _ENCODER.encode(groups)

    return _cpu_s(make)


def completions_s(work: Work, answers: int) -> float:
    """CPU seconds of taking all completions of a step, which come in so many answers."""
    ids = [f"0/0:{number}/{k}" for number in range(work.groups) for k in range(work.group_size)]
    groups = RequestGroup("1/0:0", np.arange(32, dtype=np.int32).tobytes(), ids, list(range(len(ids))))
    made = [completion_of(request, work.tokens, 0) for request in groups.requests]
    parts = [made[len(made) * at // answers : len(made) * (at + 1) // answers] for at in range(answers)]
    frames = [bytearray(_ENCODER.encode(CompletionBatch.of(part))) for part in parts]
    decode = msgspec.msgpack.Decoder(CompletionBatch).decode

    def take() -> None:
        open_requests, done = dict.fromkeys(ids), {}
        batches = [decode(frame) for frame in frames]
        tokens = np.frombuffer(bytearray().join([batch.tokens for batch in batches]), np.int32)
        logprobs = np.frombuffer(bytearray().join([batch.logprobs for batch in batches]), np.float32)
        runs = np.array([each for batch in batches for each in batch.versions], np.int32)
        versions = np.repeat(runs, [each for batch in batches for each in batch.version_sizes])
        assert len(tokens) == len(logprobs) == len(versions) and runs.min() == 0
        end = 0
        for batch in batches:
            for id, finish, text, size in zip(batch.requests, batch.finishes, batch.texts, batch.sizes, strict=True):
                part = slice(end, end := end + size)
                if open_requests.pop(id, id) is None:  # each completion once
                    done[id] = Completion(id, tokens[part], logprobs[part], versions[part], finish, text)
        assert len(done) == len(made)

    return _cpu_s(take)


def counters_s(engines: int) -> float:
    """CPU seconds of decoding the counters of so many engines."""
    frames = [bytearray(_ENCODER.encode(EngineProgress(number, 0, 0, 0, 0, False))) for number in range(engines)]
    decode = msgspec.msgpack.Decoder(EngineProgress).decode
    return _cpu_s(lambda: list(map(decode, frames)))


def rows_s(rows: EncodedRanks, messages: int) -> float:
    """CPU seconds of cutting the rows of all ranks, in so many messages, out of their columns."""
    edges = np.linspace(0, len(rows), messages + 1, dtype=np.int64)

    def cut() -> None:
        pieces, bounds = np.diff(rows.bounds).T.astype(np.uint32, order="C"), rows.bounds.T[edges].tolist()
        for first, last, begin, end in zip(edges[:-1], edges[1:], bounds, bounds[1:], strict=False):
            [column[slice(*part)] for column, part in zip(rows.columns, zip(begin, end, strict=True), strict=True)]
            pieces[first:last].tobytes()

    return _cpu_s(cut)


def _cpu_s(work: Callable[[], object]) -> float:
    """The least of some repetitions."""
    spent = []
    for _ in range(ROUNDS):
        began = time.thread_time_ns()
        work()
        spent.append(time.thread_time_ns() - began)
    return min(spent) / 1e9
