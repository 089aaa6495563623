"""The controller's handle of a worker: starting its process, its calls, and what is known of its state."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

from lockstep.base.folders import run_shm_dir
from lockstep.base.text import log_tail
from lockstep.base.transport.frames import Connection
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import RemoteError, Worker, WorkerDied, WorkerSpec
from lockstep.cluster.rpc.codec import Payload, signature_of
from lockstep.cluster.rpc.futures import OVERDUE_CHECK_S, PendingCall
from lockstep.cluster.rpc.rpc_messages import (
    START_CALL_ID,
    AckMessage,
    CallMessage,
    FailureMessage,
    HeartbeatMessage,
    LeaveMessage,
    ResultMessage,
    ResumeMessage,
    ToController,
    call_id_base,
    pack_message,
    queue_message,
)
from lockstep.watch.agent.agent_client import AgentGone
from lockstep.watch.beacon.beacon_records import BeaconState
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.procfs import processes

P = ParamSpec("P")
R = TypeVar("R")


class RemoteWorker:
    """A worker process and the calls it owes. Any thread may submit; the hub's thread hears."""

    def __init__(
        self, spec: WorkerSpec, node: ClusterNode, run: str, generation: int, stall_limit_s: float,
        notice_after_s: float,
        wake: Callable[["RemoteWorker", Connection | None], None],
    ) -> None:  # fmt: skip
        """`wake` is told when a connection has something left to write, or is closed."""
        self.spec, self.name, self.node = spec, spec.name, node
        self.log = node.logs / f"{spec.name}.log"
        """A file of the node."""
        self.pid = 0
        self.stall_limit_s, self.notice_after_s = stall_limit_s, notice_after_s
        self.moves, self.moved_at = 0, time.monotonic()
        self.connected_once = False
        self._beacon = run_shm_dir(run) / f"{spec.name}.beacon"
        self._wake = wake
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._ids = itertools.count(call_id_base(generation) + 1)
        self._open: dict[int, tuple[PendingCall[Any], tuple[bytes, Payload | bytearray]]] = {}
        self._arrived: list[int] = []
        """Answers that it is not told of yet."""
        self._death: WorkerDied | None = None
        self._mourners: list[Callable[[WorkerDied], None]] = []
        self._pulse: HeartbeatMessage | None = None
        self._probed: object = None
        self.started: PendingCall[None] = PendingCall(self, "start", lambda payload: None)
        """Settled when the service is constructed, or renewed."""

    def __repr__(self) -> str:
        return f"RemoteWorker({self.name}, pid {self.pid}, {'dead' if self._death else 'alive'})"

    def submit(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> PendingCall[R]:
        """Sends a call and returns at once. The arguments are taken as they are now.

        Raises:
            TypeError: the method does not take these arguments, or one of them cannot travel (CodecError).
        """
        signature = signature_of(method)
        payload = signature.encode_arguments(args, kwargs)
        beside = signature.concurrent
        call: PendingCall[R] = PendingCall(self, signature.qualified, signature.decode_result, beside)
        with self._lock:
            if self._death is not None:
                call.fail(self._death)
                return call
            number = next(self._ids)
            arrived, self._arrived = self._arrived, []
            parts = pack_message(CallMessage(number, signature.name, beside, arrived), payload)
            self._open[number] = call, parts
            self._send(parts)
        return call

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`submit(...).result(why=method name)`."""
        pending = self.submit(method, *args, **kwargs)
        return pending.result(why=pending.label)

    def alive(self) -> bool:
        return (
            self._death is None
            and self.pid > 0
            and (processes.is_alive(self.pid) if self.node.here else self.node.alive)
        )

    def on_death(self, callback: Callable[[WorkerDied], None]) -> None:
        """Calls `callback` once its end is known, in the thread that hears of it; now, when it is."""
        with self._lock:
            if self._death is None:
                self._mourners.append(callback)
                return
        callback(self._death)

    @property
    def dead(self) -> bool:
        """Whether its end is known."""
        return self._death is not None

    @property
    def death(self) -> WorkerDied | None:
        """Its end, once it is known."""
        return self._death

    @property
    def busy(self) -> bool:
        """Whether calls are unanswered."""
        return bool(self._open) or not self.started.done()

    @property
    def connection(self) -> Connection | None:
        return self._connection

    def leave(self, why: str) -> None:
        """Asks it to end after the running call."""
        with self._lock:
            self._send(pack_message(LeaveMessage(why)))

    def describe(self) -> str:
        """What it does, after "it": read from its beacon where that is on this host, else from its last pulse."""
        here = self.node.here
        if here and self.pid and processes.process_state(self.pid) in ("T", "t"):
            return "is stopped (SIGSTOP, or a debugger)"
        if not self.connected_once:
            return "has not said hello yet"
        state = read_beacon(self._beacon) if here else None
        if state is not None and state.pid != self.pid:
            state = None
        stage, wait = self._doing(state)
        place = f"is in stage {stage}" if stage else "names no stage"
        waits_for = f", waits for {wait}" if wait else ""
        silent_s = 0.0 if state is None or not state.beat_ns else (time.monotonic_ns() - state.beat_ns) / 1e9
        frozen = f", frozen: no thread of it ran for {silent_s:.0f} s" if silent_s > OVERDUE_CHECK_S else ""
        lost = "" if self._connection is not None else ", and its connection is down"
        return place + waits_for + frozen + lost

    def _doing(self, state: BeaconState | None) -> tuple[str, str]:
        """Its stage, and the wait of its main thread (or of another, when that is in none)."""
        if state is None:
            return (self._pulse.stage, self._pulse.wait) if self._pulse is not None else ("", "")
        waiting = [wait for wait in state.waits if wait.thread == state.pid] or list(state.waits)
        idle = not waiting or waiting[-1].why == "the next call"
        return state.stage, "" if idle else f"{waiting[-1].waits_for} ({waiting[-1].why})"

    # --- what the hub's thread does

    def hear(self, connection: Connection, message: ToController, payload: memoryview) -> None:
        """Takes a message of the worker."""
        match message:
            case ResultMessage(id=number):
                self._answered(number, None, payload)
            case ResumeMessage(received=received, pid=pid):
                if self.pid not in (0, pid):
                    raise ValueError(f"process {pid} is not {self.name}, which is {self.pid}")
                self._resume(connection, received)
            case FailureMessage(id=number):
                error = RemoteError(
                    self.name, self.spec.rank, message.kind, message.message, message.traceback, message.code
                )
                self._answered(number, error, payload)
            case HeartbeatMessage():
                if self._pulse is None or self._pulse.moves != message.moves:
                    self.moved()
                self._pulse = message

    def moved(self) -> None:
        self.moves += 1
        self.moved_at = time.monotonic()

    def probe(self, facts: object) -> None:
        """Something that changes as the worker moves: bytes of a frame under way, CPU time while it imports."""
        if facts != self._probed:
            self._probed = facts
            self.moved()

    def lost(self, connection: Connection) -> None:
        """The connection broke; the worker dials again."""
        with self._lock:
            connection.close()
            if self._connection is connection:
                self._connection = None
        self._wake(self, connection)

    def acknowledge(self) -> None:
        """Tells it which answers have arrived, where no call has told it."""
        if self._arrived:
            with self._lock:
                arrived, self._arrived = self._arrived, []
                self._send(pack_message(AckMessage(arrived)))

    def die(self, exit_code: int | None, said: str = "") -> None:
        """Its end is known, and the end of its log, where the node told it: every call it owes fails. Idempotent."""
        with self._lock:
            if self._death is not None:
                return
            said = log_tail(self.log) if self.node.here else said
            lost = "" if exit_code is not None or self.node.here else self.node.why_lost
            self._death = WorkerDied(self.name, self.spec.rank, exit_code, said, lost)
            owed, self._open = list(self._open.values()), {}
            mourners, self._mourners = self._mourners, []
            if self._connection is not None:
                self.lost(self._connection)
        self.started.fail(self._death)
        for call, _ in owed:
            call.fail(self._death)
        for callback in mourners:
            callback(self._death)

    def _resume(self, connection: Connection, received: int) -> None:
        with self._lock:
            if self._connection is not None and self._connection is not connection:
                self.lost(self._connection)
            self._connection = connection
            self.connected_once = True
            for number, (_, parts) in self._open.items():
                if number > received:
                    self._send(parts)
        self.moved()

    def _answered(self, number: int, error: RemoteError | None, payload: memoryview) -> None:
        with self._lock:
            known = (self.started, None) if number == START_CALL_ID else self._open.pop(number, None)
            self._arrived.append(number)
        if known is None:
            return
        if not known[0].beside:  # that its other thread answers does not mean that it gets on
            self.moved()
        if error is not None:
            known[0].fail(error)
        else:
            known[0].settle(payload)

    def _send(self, parts: tuple[bytes, Payload | bytearray]) -> None:
        """Needs the lock."""
        connection = self._connection
        queue_message(connection, parts, lambda broken, _: self.lost(broken), lambda: self._wake(self, connection))


def worker_and_node(worker: Worker) -> str:
    """A worker for people, with its node where it has one."""
    return f"{worker.spec.name} on {worker.node.info.name}" if isinstance(worker, RemoteWorker) else worker.spec.name


def spawn_worker_process(worker: RemoteWorker, environment: Mapping[str, str], note: str, device: str) -> "Future[int]":
    """Has the agent of the worker's node start the process; its pid, which the handle is told as well."""
    node: ClusterNode = worker.node
    if node.agent is None:
        raise AgentGone("start", f"{node.info.name} has no agent")
    preload = () if node.uses_cuda(device, environment) else worker.spec.preload
    python, folder = node.place()
    argv = [python, "-m", "lockstep.cluster.rpc.worker_main"]
    pid = node.agent.submit_spawn(
        worker.name, argv, log_path=worker.log, env=environment, cwd=folder, preload=preload, note=note,
        trusted=True,
    )  # fmt: skip
    pid.add_done_callback(lambda done: _set_pid(worker, done))  # in the thread that hears of its end, before it
    return pid


def _set_pid(worker: RemoteWorker, done: "Future[int]") -> None:
    if done.exception() is None:
        worker.pid = done.result(timeout=0)
        worker.moved()  # its stall clock starts with its life, not with the order for it
