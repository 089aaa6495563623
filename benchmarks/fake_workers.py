"""Simulated workers: the controller's real handles, messages and codec, without processes behind them.

What the controller would do for real workers it does here, except for its sockets, which `socket_s` measures for one
call. What a worker would do happens in between and is left out of the account (`Account.beside`).
"""

import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.base.transport.frame_codes import KEY_BYTES, SessionKeys
from lockstep.base.transport.frames import Connection, PeerIdentity
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import NodeInfo, WorkerSpec
from lockstep.cluster.rpc.codec import signature_of
from lockstep.cluster.rpc.remote_worker import RemoteWorker
from lockstep.cluster.rpc.rpc_messages import (
    CallMessage,
    ResultMessage,
    ResumeMessage,
    pack_message,
    unpack_to_controller,
    unpack_to_worker,
)
from lockstep.data.samples import Completion
from lockstep.rollout.engine_protocol import EngineAPI, EngineProgress, Request
from lockstep.rollout.engine_service import Outbox
from lockstep.run.policy_api import PolicyAPI
from lockstep.train.trainer_protocol import StepStats

GENERATION = 1
HOST = ClusterNode(NodeInfo("here", "127.0.0.1", Path("none")), Path("none"), Path("none"))


class Account:
    """CPU seconds of this process by part, without what was done beside."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._beside: list[int] = []
        """Nanoseconds, negative where what is beside does work of ours."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._beside.clear()
        began = time.process_time_ns()
        yield
        self.spent[name] += (time.process_time_ns() - began - sum(self._beside)) / 1e9

    def beside(self, began: int) -> None:
        """Since `began` (`time.thread_time_ns`) this thread did the work of somebody else."""
        self._beside.append(time.thread_time_ns() - began)

    def ours(self, began: int) -> None:
        """Within that, since `began` it did ours."""
        self._beside.append(began - time.thread_time_ns())


class FakeConnection:
    """The worker's end and the wire to it: answers calls at once, those for completions when there are some."""

    closed = pending = False

    def __init__(self, account: Account, spec: WorkerSpec) -> None:
        self.account, self.spec = account, spec
        self.worker = RemoteWorker(spec, HOST, "scale", GENERATION, 900.0, 900.0, _nobody)
        self.requests: list[Request] = []
        self.calls: dict[str, int] = defaultdict(int)
        self._outbox = Outbox()
        self._question: tuple[int, int, float] | None = None
        """Number, acknowledgement and patience of the call for completions."""
        self._lock = threading.RLock()
        self.worker.handle_message(self, ResumeMessage(0, 1), memoryview(b""))  # type: ignore[arg-type]

    def queue(self, *parts: Any) -> None:
        began = time.thread_time_ns()
        message, payload = unpack_to_worker(bytearray(b"".join(parts)))
        if isinstance(message, CallMessage):
            self._called(message, payload)
        self.account.beside(began)

    def flush(self) -> bool:
        return True

    def close(self) -> None: ...

    def finish(self, completion: Completion) -> None:
        """A completion is there."""
        with self._lock:
            self._outbox.put([completion])
            self.tell()

    def tell(self) -> None:
        """Answers who asked for completions, as the engine's service does after each decode step."""
        with self._lock:
            if self._question is not None and self._outbox.due(*self._question[1:]):
                (number, ack, _), self._question = self._question, None
                self._say(number, EngineAPI.collect, self._outbox.collect(ack))

    def _called(self, call: CallMessage, payload: memoryview) -> None:
        self.calls[call.method] += 1
        method = getattr(EngineAPI if self.spec.role == "rollout" else PolicyAPI, call.method)
        arguments = signature_of(method).decode_arguments(bytearray(payload))
        if call.method == "collect":
            with self._lock:
                self._question = call.id, arguments["ack"], arguments["hold_s"]
                self._outbox.acknowledge(arguments["ack"])
                self.tell()
            return
        if call.method == "submit":
            requests = arguments["batch"].requests
            self.requests += requests
            self._outbox.expect(requests)
        self._say(call.id, method, _value(call.method))

    def _say(self, number: int, method: Any, value: Any) -> None:
        """Says it; the hub hears it in this thread."""
        frame = bytearray(b"".join(pack_message(ResultMessage(number), signature_of(method).encode_result(value))))
        began = time.thread_time_ns()
        message, body = unpack_to_controller(frame)
        self.worker.handle_message(self, message, body)  # type: ignore[arg-type]
        self.account.ours(began)


def _value(method: str) -> Any:
    """What a service answers."""
    if method == "progress":
        return EngineProgress(1, 0, 0, 0, 0, False)
    if method == "step":
        return StepStats({f"metric_{number}": 1.0 for number in range(20)})
    return None


def socket_s(size: int = 2048, connections: int = 64, rounds: int = 30) -> float:
    """CPU seconds that a call costs beside its message: a frame of so many bytes written to a connection over loopback,
    and the answer heard of by a selector and read, as the hub does."""
    selector, pairs = selectors.DefaultSelector(), []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for number in range(connections):
            far = socket.create_connection(listening.getsockname())
            near = listening.accept()[0]
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer, keys = PeerIdentity("scale", GENERATION, str(number)), (b"n" * KEY_BYTES, b"f" * KEY_BYTES)
            pairs.append([Connection(near, peer, SessionKeys(*keys)), Connection(far, peer, SessionKeys(*keys[::-1]))])
            selector.register(pairs[-1][0], selectors.EVENT_READ, pairs[-1][0])
    ours = 0
    for _ in range(rounds):
        began = time.thread_time_ns()
        for near, _ in pairs:
            near.queue(b"head", b"x" * size)
            near.flush()
        ours += time.thread_time_ns() - began
        for _, far in pairs:
            while far.recv(1.0) is None:
                pass
            far.send(b"x" * 96)
        began, heard = time.thread_time_ns(), 0
        while heard < connections:
            for key, _ in selector.select(1.0):
                heard += sum(1 for _ in key.data.frames())
                key.data.flush()
        ours += time.thread_time_ns() - began
    for pair in pairs:
        for each in pair:
            each.close()
    selector.close()
    return ours / 1e9 / rounds / connections


def completion_of(request: Request, tokens: int, version: int) -> Completion:
    """What an engine would have made of it."""
    made = np.full(tokens, 5, np.int32)
    return Completion(
        request.id, made, np.full(tokens, -1.0, np.float32), np.full(tokens, version, np.int32), "length", "text"
    )


def _nobody(worker: RemoteWorker, connection: object) -> None:
    """Nothing is ever left to write."""
