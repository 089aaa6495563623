"""Simulated workers: the controller's real handles, messages and codec, without processes behind them.

What the controller would do for real workers it does here, except for its sockets, which `socket_s` measures. What a
worker, or its relay, would do is left out of the account (`Account.beside`).
"""

import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base import waits
from lockstep.base.transport.frames import PeerIdentity
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import NodeInfo, WorkerSpec
from lockstep.cluster.rpc.call_relay import CallRelay
from lockstep.cluster.rpc.codec import signature_of
from lockstep.cluster.rpc.open_calls import OpenCalls
from lockstep.cluster.rpc.relayed_connection import CallRelayLink, ExpectedRelay
from lockstep.cluster.rpc.remote_worker import RemoteWorker
from lockstep.cluster.rpc.rpc_messages import (
    CallMessage,
    ResultMessage,
    ResumeMessage,
    call_id_base,
    pack_message,
    unpack_to_worker,
)
from lockstep.data.samples import Completion
from lockstep.rollout.engine_protocol import EngineAPI, EngineProgress, Request
from lockstep.rollout.engine_service import Outbox
from lockstep.run.policy_api import PolicyAPI
from lockstep.train.trainer_protocol import StepStats

GENERATION = 1
_CALL_IDS = itertools.count(call_id_base(GENERATION) + 1)


def make_node(name: str) -> ClusterNode:
    """A host without processes."""
    return ClusterNode(NodeInfo(name, "127.0.0.1", Path("none")), Path("none"), Path("none"))


class Account:
    """CPU seconds of this process by part, without what was done beside."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.network = Network(self)
        self._beside: list[int] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What this process does in the context, and until all messages are delivered."""
        self._beside.clear()
        began = time.process_time_ns()
        yield
        self.network.settle()
        self.spent[name] += (time.process_time_ns() - began - sum(self._beside)) / 1e9

    def beside(self, began: int) -> None:
        """Since `began` (`time.thread_time_ns`) this thread did the work of somebody else."""
        self._beside.append(time.thread_time_ns() - began)


class Network:
    """Carries messages in a thread, like the one that reads sockets: those that have been sent reach the other ends,
    one after another, and then the controller handles what these have sent. So both do their work without the other's
    in between."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.sent: deque[tuple[FakeConnection, Sequence[Any]]] = deque()
        """Frames, as parts, that are on their way to the other end of a connection."""
        self.arrived: deque[tuple[FakeConnection, bytearray]] = deque()
        """Frames on their way to the controller."""
        self._wake = threading.Event()
        self._delivering = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def wake(self) -> None:
        """Makes the thread deliver what was queued. Any thread may call."""
        if not self._wake.is_set():
            self._wake.set()

    def settle(self) -> None:
        """Waits until everything is delivered."""
        while self.sent or self.arrived or self._wake.is_set() or self._delivering.locked():
            waits.sleep(0.001, "deliveries")

    def _run(self) -> None:
        while True:
            self._wake.wait()
            with self._delivering:
                self._wake.clear()
                began = time.thread_time_ns()
                while self.sent:
                    connection, parts = self.sent.popleft()
                    connection.deliver(parts)
                self._account.beside(began)
                while self.arrived:
                    connection, frame = self.arrived.popleft()
                    connection.near_end(frame)


class FakeWorker:
    """A worker: answers calls at once, those for completions when there are some. `answer` sends a frame."""

    def __init__(self, account: Account, spec: WorkerSpec, node: ClusterNode) -> None:
        self.account, self.spec = account, spec
        self.worker = RemoteWorker(spec, node, "scale", _CALL_IDS, 900.0, 900.0, _nobody)
        self.requests: list[Request] = []
        self.calls: dict[str, int] = defaultdict(int)
        self.answer: Callable[[bytearray], None] = lambda frame: None
        self._outbox = Outbox()
        self._question: tuple[int, float] | None = None
        """Number and `hold_s` of the call for completions."""
        self._lock = threading.RLock()

    def receive(self, frame: bytearray) -> None:
        """Does what a message asks for."""
        message, payload = unpack_to_worker(frame)
        if isinstance(message, CallMessage):
            self._called(message, payload)

    def finish(self, completion: Completion) -> None:
        """A completion is there."""
        with self._lock:
            self._outbox.put([completion])
            self.tell()

    def tell(self) -> None:
        """Answers who asked for completions, as the engine's service does after each decode step."""
        with self._lock:
            if self._question is not None and self._outbox.due(self._question[1]):
                (number, hold_s), self._question = self._question, None
                patience_s = self._outbox.patience_s(hold_s)
                self._say(number, EngineAPI.collect, self._outbox.take(), patience_s)

    def _called(self, call: CallMessage, payload: memoryview) -> None:
        self.calls[call.method] += 1
        method = getattr(EngineAPI if self.spec.role == "rollout" else PolicyAPI, call.method)
        arguments = signature_of(method).decode_arguments(bytearray(payload))
        if call.method == "collect":
            with self._lock:
                self._question = call.id, arguments["hold_s"]
                self.tell()
            return
        if call.method == "submit":
            requests = [request for group in arguments["groups"] for request in group.requests]
            self.requests += requests
            self._outbox.expect(requests)
        self._say(call.id, method, _value(call.method))

    def _say(self, number: int, method: Any, value: Any, patience_s: float = 0.0) -> None:
        payload = signature_of(method).encode_result(value)
        self.answer(bytearray(b"".join(pack_message(ResultMessage(number, patience_s), payload))))


@dataclass(slots=True)
class Traffic:
    """Messages between the controller and the other end of a connection, and their bytes."""

    sent: int = 0
    sent_bytes: int = 0
    received: int = 0
    received_bytes: int = 0


class FakeConnection:
    """The controller's connection to a worker, or to a call relay."""

    closed = pending = False
    bulk_bytes = written_bytes = relay_ns = 0
    peer = PeerIdentity("scale", GENERATION, "far")

    def __init__(self, account: Account) -> None:
        self.account, self.network, self.traffic = account, account.network, Traffic()

    def flush(self) -> bool:
        return True

    def close(self) -> None: ...

    def queue(self, *parts: Any) -> tuple[int, int]:
        """Sends a frame to the other end."""
        self.network.sent.append((self, parts))
        self.network.wake()
        return 0, 0

    def deliver(self, parts: Sequence[Any]) -> None:
        """Hands a frame to the other end."""
        frame = bytearray(b"".join(parts))
        self.traffic.sent += 1
        self.traffic.sent_bytes += len(frame)
        self.far_end(frame)

    def arrive(self, frame: bytearray) -> None:
        """Sends a frame to the controller."""
        self.traffic.received += 1
        self.traffic.received_bytes += len(frame)
        self.network.arrived.append((self, frame))
        self.network.wake()

    def far_end(self, frame: bytearray) -> None:
        raise NotImplementedError

    def near_end(self, frame: bytearray) -> None:
        raise NotImplementedError


class DirectConnection(FakeConnection):
    """The connection of one worker."""

    def __init__(self, worker: FakeWorker) -> None:
        super().__init__(worker.account)
        self._worker = worker
        worker.answer = self.arrive
        worker.worker.handle_message(self, ResumeMessage(0, 1), memoryview(b""))

    def far_end(self, frame: bytearray) -> None:
        self._worker.receive(frame)

    def near_end(self, frame: bytearray) -> None:
        self._worker.worker.handle_frame(self, frame)

    def relay_due(self, now: float) -> None:
        """There is no relay that holds results back."""


class RelayConnection(FakeConnection):
    """The connection of a call relay, a real one without sockets, and of the workers behind it, which are those of one
    node or of nodes that share it. `relay_ns` is the CPU time of the relay."""

    def __init__(self, workers: Sequence[FakeWorker]) -> None:
        super().__init__(workers[0].account)
        self._lock = threading.RLock()
        self._handles = {each.spec.name: each.worker for each in workers}
        expected = ExpectedRelay(workers[0].worker.node.calls, lambda address: None, lambda: None)
        self._link = CallRelayLink(self, lambda connection: None, expected)  # type: ignore[arg-type]
        self._relay = CallRelay(lambda parts: self.arrive(bytearray(b"".join(parts))))
        resume = bytearray(b"".join(pack_message(ResumeMessage(0, 1))))
        for each in workers:
            channel = self._relay.open(each.spec.name, _BehindRelay(each, self._of_worker))
            each.answer = partial(self._worker_says, channel)
            self._relay.from_worker(channel, bytearray(resume))
        self.relay_ns = 0

    def relay_due(self, now: float) -> None:
        """Sends the results that have waited long enough for others."""
        with self._lock:
            if now >= self._relay.due:
                with self._of_relay():
                    self._relay.flush()

    def far_end(self, frame: bytearray) -> None:
        with self._lock, self._of_relay():
            self._relay.from_controller(frame)

    def near_end(self, frame: bytearray) -> None:
        self._link.handle_frame(frame, self._accept)

    def _worker_says(self, channel: int, frame: bytearray) -> None:
        with self._lock, self._of_relay():
            self._relay.from_worker(channel, frame)

    @contextmanager
    def _of_relay(self) -> Iterator[None]:
        """What the relay does: this thread has the lock."""
        began = time.thread_time_ns()
        yield
        self.relay_ns += time.thread_time_ns() - began

    @contextmanager
    def _of_worker(self) -> Iterator[None]:
        """What a worker does in the middle of that."""
        began = time.thread_time_ns()
        yield
        self.relay_ns -= time.thread_time_ns() - began

    def _accept(self, link: CallRelayLink, channel: int, name: str) -> None:
        link.open(channel, self._handles[name])


class _BehindRelay:
    """A worker's connection to its relay. Its work is done in the context `beside`."""

    bulk_bytes = 0

    def __init__(self, worker: FakeWorker, beside: Callable[[], AbstractContextManager[None]]) -> None:
        self._worker, self._beside = worker, beside

    def queue(self, *parts: Any) -> int:
        frame = bytearray(b"".join(parts))
        with self._beside():
            self._worker.receive(frame)
        return 0

    def flush(self) -> bool:
        return True

    def close(self) -> None: ...


def connect_all(workers: Sequence[FakeWorker], relays: bool) -> list[DirectConnection | RelayConnection]:
    """Connects workers: each by itself, or through the relays that their nodes have or share."""
    if not relays:
        return [DirectConnection(each) for each in workers]
    behind: dict[OpenCalls, list[FakeWorker]] = defaultdict(list)
    for each in workers:
        behind[each.worker.node.calls].append(each)
    return [RelayConnection(together) for together in behind.values()]


def _value(method: str) -> Any:
    """What a service answers."""
    if method == "progress":
        return EngineProgress(1, 0, 0, 0, 0, False)
    if method == "step":
        return StepStats({f"metric_{number}": 1.0 for number in range(20)})
    return None


_TOKENS = np.random.default_rng(0).integers(5, 32_000, 1 << 16, dtype=np.int32)
_LOGPROBS = -np.random.default_rng(1).random(1 << 16, np.float32)
"""What completions are cut from: values that differ, as those of engines do, so that they are sent as they are."""


def completion_of(request: Request, tokens: int, version: int) -> Completion:
    """What an engine would have made of it."""
    at = slice(begin := request.seed % (len(_TOKENS) - tokens), begin + tokens)
    return Completion(
        request.id, _TOKENS[at].copy(), _LOGPROBS[at].copy(), np.full(tokens, version, np.int32), "length", "text"
    )


def _nobody(worker: RemoteWorker, connection: object) -> None:
    """Nothing is ever left to write."""
