"""The controller's handle of a worker: its process, its calls, and its state."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

from lockstep.base.folders import run_shm_dir
from lockstep.base.text import log_tail
from lockstep.base.transport.frames import Buffer
from lockstep.base.wait_state import WAITING_FOR_WORK
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import RemoteError, Worker, WorkerDied, WorkerSpec
from lockstep.cluster.rpc.call_wait import OVERDUE_CHECK_S
from lockstep.cluster.rpc.codec import MethodSignature, Payload, signature_of
from lockstep.cluster.rpc.futures import CallGroup, PendingCall
from lockstep.cluster.rpc.open_calls import CallArguments, OpenCall, RelayedArguments
from lockstep.cluster.rpc.relay_messages import padded
from lockstep.cluster.rpc.relayed_connection import CallRelayLink, RelayedConnection
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
    WorkerConnection,
    pack_body,
    pack_message,
    queue_message,
    unpack_to_controller,
)
from lockstep.watch.agent.agent_client import AgentGone
from lockstep.watch.beacon.beacon_records import BeaconState
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.procfs import processes

P = ParamSpec("P")
R = TypeVar("R")


class SharedArguments:
    """Arguments that are the same for all workers of a call."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._messages = (RelayedArguments(None, padded((payload,)), [len(payload)]),)

    def of(self, worker: "RemoteWorker") -> Sequence[Buffer]:
        return (self._payload,)

    def messages(self, workers: "Sequence[RemoteWorker]") -> Sequence[RelayedArguments]:
        return self._messages


class RemoteWorker:
    """A worker process and its open calls. Any thread may submit calls; the RPC server's thread handles messages."""

    def __init__(
        self, spec: WorkerSpec, node: ClusterNode, run: str, call_ids: Iterator[int], stall_limit_s: float,
        notice_after_s: float,
        wake: Callable[["RemoteWorker", WorkerConnection | None], None],
    ) -> None:  # fmt: skip
        """Args:
        call_ids: ids for the calls of all workers, of which those of one message have the same; see `RpcServer`.
        wake: called when the connection has data left to write, or is closed.
        """
        self.spec, self.name, self.node = spec, spec.name, node
        self.agent = node.agent
        """The agent that started it, and with which it ends; the node may have another one since."""
        self.log = node.logs / f"{spec.name}.log"
        """Path of the worker's log, on the worker's node."""
        self.pid = 0
        self.stall_limit_s, self.notice_after_s = stall_limit_s, notice_after_s
        self.progress_count, self.last_progress_at = 0, time.monotonic()
        self.connected_once = False
        self._beacon = run_shm_dir(run) / f"{spec.name}.beacon"
        self._wake = wake
        self._lock = node.calls.lock
        self._connection: WorkerConnection | None = None
        self.link: CallRelayLink | None = None
        """The relay through which it is connected, if it is, on `channel`."""
        self.channel = 0
        self.call_ids = call_ids
        self._unacknowledged: list[int] = []
        """Ids of results that are not acknowledged yet."""
        self._death: WorkerDied | None = None
        self._death_callbacks: list[Callable[[WorkerDied], None]] = []
        self._heartbeat: HeartbeatMessage | None = None
        self._observed: object = None
        self.started: PendingCall[None] = PendingCall(self, "start", lambda payload: None)
        """Settled once the service is constructed, or renewed for this controller."""

    def __repr__(self) -> str:
        return f"RemoteWorker({self.name}, pid {self.pid}, {'dead' if self._death else 'alive'})"

    def submit(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> PendingCall[R]:
        """Sends a call and returns immediately. The arguments are encoded as they are now.

        Raises:
            TypeError: the method does not accept these arguments, or one of them cannot be sent (CodecError).
        """
        signature = signature_of(method)
        arguments = SharedArguments(signature.encode_arguments(args, kwargs))
        group: CallGroup[R] = CallGroup((self,), signature.qualified, signature.decode_result, signature.concurrent)
        self.send_new_call(group, signature, arguments)
        return group.call_of(self)

    def send_new_call(self, group: CallGroup[Any], signature: MethodSignature, arguments: CallArguments) -> None:
        """Sends a call with an id of its own. If the worker is dead, the call has failed; if there is no connection, it
        will be sent later."""
        with self._lock:
            if self._death is not None:
                group.fail(self, self._death)
                return
            call = OpenCall(next(self.call_ids), group, signature, arguments, (self,))
            self.node.calls.add(call)
            arrived, self._unacknowledged = self._unacknowledged, []
            self._send_call(call, arrived)

    def _send_call(self, call: OpenCall, arrived: list[int]) -> None:
        """Sends a call, and ids of results that have arrived. The caller holds the lock."""
        message = CallMessage(call.number, call.signature.name, call.signature.concurrent, arrived)
        self._send((pack_body(message), *call.arguments.of(self)))

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`submit(...).result(why=method name)`."""
        pending = self.submit(method, *args, **kwargs)
        return pending.result(why=pending.label)

    def alive(self) -> bool:
        return (
            self._death is None
            and self.pid > 0
            and (processes.is_alive(self.pid) if self.node.is_local else self.agent_alive)
        )

    @property
    def agent_alive(self) -> bool:
        """Whether the agent that started it is alive."""
        return self.agent is not None and self.agent.alive

    def on_death(self, callback: Callable[[WorkerDied], None]) -> None:
        """Calls `callback` once it is known that the worker ended, in the thread that notices it; immediately if it is
        already known."""
        with self._lock:
            if self._death is None:
                self._death_callbacks.append(callback)
                return
        callback(self._death)

    @property
    def dead(self) -> bool:
        """Whether the worker is known to have ended."""
        return self._death is not None

    @property
    def death(self) -> WorkerDied | None:
        """How the worker ended; None while that is not known."""
        return self._death

    @property
    def busy(self) -> bool:
        """Whether the worker has unanswered calls, or is still starting."""
        return bool(self.node.calls.of(self)) or not self.started.done()

    @property
    def connection(self) -> WorkerConnection | None:
        return self._connection

    def request_exit(self, why: str) -> None:
        """Tells the worker to exit after the running call."""
        with self._lock:
            self._send(pack_message(LeaveMessage(why)))

    def describe(self) -> str:
        """What the worker is doing, as a verb phrase (`is in stage ...`): from its beacon if it is on this host, else
        from its last heartbeat."""
        is_local = self.node.is_local
        if is_local and self.pid and processes.process_state(self.pid) in ("T", "t"):
            return "is stopped (SIGSTOP, or a debugger)"
        if not self.connected_once:
            return "has not connected yet"
        state = read_beacon(self._beacon) if is_local else None
        if state is not None and state.pid != self.pid:
            state = None
        stage, wait = self._stage_and_wait(state)
        activity = f"is in stage {stage}" if stage else "reports no stage"
        waits_for = f", waits for {wait}" if wait else ""
        silent_s = 0.0 if state is None or not state.beat_ns else (time.monotonic_ns() - state.beat_ns) / 1e9
        frozen = f", frozen: none of its threads has run for {silent_s:.0f} s" if silent_s > OVERDUE_CHECK_S else ""
        lost = "" if self._connection is not None else ", and its connection is down"
        return activity + waits_for + frozen + lost

    def _stage_and_wait(self, state: BeaconState | None) -> tuple[str, str]:
        """The worker's stage, and the wait of its main thread (of another thread if the main thread does not wait)."""
        if state is None:
            return (self._heartbeat.stage, self._heartbeat.wait) if self._heartbeat is not None else ("", "")
        shown = next((wait for wait in state.waits if wait.thread == state.pid), next(iter(state.waits), None))
        if shown is None or shown.why == WAITING_FOR_WORK:
            return state.stage, ""
        return state.stage, f"{shown.waits_for} ({shown.why})"

    # --- called by the RPC server's thread

    def handle_frame(self, connection: WorkerConnection, frame: bytearray | memoryview) -> None:
        """Handles a frame of the worker. Raises ValueError if it is malformed, or late."""
        message, payload = unpack_to_controller(frame)
        if self._connection is not connection and not isinstance(message, ResumeMessage):
            raise ValueError(f"{type(message).__name__} on a connection that is not the worker's current one")
        self.handle_message(connection, message, payload)

    def handle_message(self, connection: WorkerConnection, message: ToController, payload: memoryview) -> None:
        """Handles a message of the worker."""
        match message:
            case ResultMessage(id=number):
                self._settle_call(number, None, payload)
            case ResumeMessage(received=received, pid=pid):
                if self.pid not in (0, pid):
                    raise ValueError(f"process {pid} connected as {self.name}, whose pid is {self.pid}")
                self._resume(connection, received)
            case FailureMessage(id=number):
                error = RemoteError(
                    self.name, self.spec.rank, message.kind, message.message, message.traceback, message.code
                )
                self._settle_call(number, error, payload)
            case HeartbeatMessage():
                if self._heartbeat is None or self._heartbeat.progress_count != message.progress_count:
                    self.record_progress()
                self._heartbeat = message

    def record_progress(self) -> None:
        self.progress_count += 1
        self.last_progress_at = time.monotonic()

    def observe(self, value: object) -> None:
        """Records progress if `value` has changed: it is a measure such as transferred bytes of a frame, or CPU time
        during imports."""
        if value != self._observed:
            self._observed = value
            self.record_progress()

    def connection_lost(self, connection: WorkerConnection) -> None:
        """Handles a broken connection; the worker will reconnect."""
        with self._lock:
            connection.close()
            if self._connection is connection:
                self._connection = self.link = None
                self.node.calls.links += 1
        self._wake(self, connection)

    def acknowledge(self) -> None:
        """Acknowledges the results that no call has acknowledged yet."""
        if self._unacknowledged:
            with self._lock:
                arrived, self._unacknowledged = self._unacknowledged, []
                self._send(pack_message(AckMessage(arrived)))

    def mark_dead(self, exit_code: int | None, log_end: str = "") -> None:
        """Records that the worker ended, with the last lines of its log: all open calls fail. Idempotent."""
        with self._lock:
            if self._death is not None:
                return
            log_end = log_tail(self.log) if self.node.is_local else log_end
            lost = "" if exit_code is not None or self.node.is_local else self.node.why_lost(self.agent)
            self._death = WorkerDied(self.name, self.spec.rank, exit_code, log_end, lost)
            open_calls = self.node.calls.of(self)
            for call in open_calls:
                self.node.calls.take(call.number, self)
            callbacks, self._death_callbacks = self._death_callbacks, []
            if self._connection is not None:
                self.connection_lost(self._connection)
        self.started.fail(self._death)
        for call in open_calls:
            call.group.fail(self, self._death)
        for callback in callbacks:
            callback(self._death)

    def _resume(self, connection: WorkerConnection, received: int) -> None:
        with self._lock:
            if self._connection is not None and self._connection is not connection:
                self.connection_lost(self._connection)
            self._connection = connection
            if isinstance(connection, RelayedConnection):
                self.link, self.channel = connection.link, connection.channel
            else:
                self.link = None
            self.node.calls.links += 1
            self.connected_once = True
            for call in self.node.calls.of(self):
                if call.number > received:
                    self._send_call(call, [])
        self.record_progress()

    def settle_unknown(self, number: int, payload: memoryview) -> None:
        """Handles a result of no open call: that of the start, or one that has come before."""
        if number == START_CALL_ID:
            self.record_progress()
            self.started.settle(payload)

    def _settle_call(self, number: int, error: RemoteError | None, payload: memoryview) -> None:
        """Handles the outcome of a call that did not come with those of other workers."""
        with self._lock:
            call = self.node.calls.take(number, self)
            self._unacknowledged.append(number)
        if call is None:
            if error is None:
                self.settle_unknown(number, payload)
            elif number == START_CALL_ID:
                self.record_progress()
                self.started.fail(error)
            return
        if not call.group.concurrent:  # concurrent calls run in the I/O thread
            self.record_progress()
        if error is not None:
            call.group.fail(self, error)
        else:
            call.group.settle((self,), (payload,), time.monotonic())

    def _send(self, parts: Sequence[Buffer]) -> None:
        """The caller holds the lock."""
        connection = self._connection
        queue_message(
            connection, parts, lambda broken, _: self.connection_lost(broken), lambda: self._wake(self, connection)
        )


def worker_and_node(worker: Worker) -> str:
    """Human-readable name of a worker, with its node if known."""
    return f"{worker.spec.name} on {worker.node.info.name}" if isinstance(worker, RemoteWorker) else worker.spec.name


def spawn_worker_process(worker: RemoteWorker, environment: Mapping[str, str], note: str, device: str) -> "Future[int]":
    """Asks the agent of the worker's node to start the process. Returns a future of its pid, which is also stored in
    the handle."""
    node: ClusterNode = worker.node
    agent = worker.agent = node.agent
    if agent is None:
        raise AgentGone("start", f"{node.info.name} has no agent")
    preload = () if node.uses_cuda(device, environment) else worker.spec.preload
    python, folder = node.python_and_folder()
    argv = [python, "-P", "-m", "lockstep.cluster.rpc.worker_main"]  # a file in `folder` may be named as a module
    pid = agent.submit_spawn(
        worker.name, argv, log_path=worker.log, env=environment, cwd=folder, preload=preload, note=note,
        trusted=True,
    )  # fmt: skip
    pid.add_done_callback(lambda done: _set_pid(worker, done))  # runs before the handling of the worker's end
    return pid


def _set_pid(worker: RemoteWorker, done: "Future[int]") -> None:
    if done.exception() is None:
        worker.pid = done.result(timeout=0)
        worker.record_progress()  # the stall clock starts when the process starts
