"""The worker's I/O thread: keeps a connection to the controller, and ends the process when the controller is gone.

The thread never waits for the main thread. While the worker has work, it sends a heartbeat each second. If the
controller has been gone for longer than the grace period, the process exits: in order if the main thread responds, else
by `os._exit`. If another controller takes over the run before that, the worker connects to it and drops all calls of
the first.
"""

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from lockstep.base import waits
from lockstep.base.folders import run_shm_dir
from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection, HandshakeRefused, WireError
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.rpc.codec import Payload
from lockstep.cluster.rpc.rpc_messages import (
    START_CALL_ID,
    AckMessage,
    CallMessage,
    FailureMessage,
    HeartbeatMessage,
    LeaveMessage,
    ResultMessage,
    ResumeMessage,
    call_id_base,
    pack_message,
    queue_message,
    unpack_to_worker,
)
from lockstep.cluster.rpc.service_runner import ServiceRunner
from lockstep.watch.agent.service_discovery import RELAY_FILE, Leader, ServiceAddress
from lockstep.watch.beacon.writer import current_beacon
from lockstep.watch.procfs.processes import is_alive

HEARTBEAT_S = 1.0
SIGNAL_RETRY_S = 0.1
"""Interval at which a signal is sent again if the main thread has not handled it."""
CLOSE_LIMIT_S = 2.0
"""Time for an orphan's main thread to close the service before the process exits regardless."""
MIN_CONNECTION_S = 1.0
"""A connection that ends sooner than this is treated as not accepted."""
AVOID_RELAY_S = 10.0
"""How long a worker does without a relay that has not served it; each further time it is twice as long."""
MAX_AVOID_RELAY_S = 600.0
RELAY_CONNECT_S = 2.0
"""How long a worker tries to connect to a relay, which may be on a host that it cannot reach."""
ORPHANED_EXIT_CODE = 75
"""Exit code of a worker whose controller is gone."""
UNREACHABLE_EXIT_CODE = 70
"""Exit code of a worker whose I/O thread has ended: a bug (EX_SOFTWARE of sysexits.h)."""


class ControllerConnection:
    """The connection to the controller, maintained by a thread of its own.

    Args:
        run, name: run id, and name of this worker.
        leader: the current controller.
    """

    def __init__(self, run: str, name: str, token: str, leader: Leader) -> None:
        self._run_id, self._name, self._token, self._leader = run, name, token, leader
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._relay: ServiceAddress | None = None
        """The relay through which the connection leads; None for one with the controller itself."""
        self._avoided: ServiceAddress | None = None
        """A relay that has not served this worker."""
        self._avoid_s = self._avoid_until = 0.0
        self._received = START_CALL_ID
        self._kept: dict[int, tuple[bytes, Payload | bytearray]] = {}
        self._lost_since = self._leader_gone_since = self._connected_at = time.monotonic()
        self._refused = ""
        self._orphan_since: float | None = None
        self._connect_at = self._heartbeat_at = 0.0
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._watched: Connection | None = None
        self._main = threading.main_thread()
        self._finished_at: float | None = None
        self._unhandled_since: float | None = None
        self._service: ServiceRunner | None = None

    def start(self, service: ServiceRunner) -> None:
        """Starts the I/O thread. Only the main thread may call it."""
        self._service = service
        signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="lockstep-uplink", daemon=True).start()

    def answer(self, message: ResultMessage | FailureMessage, payload: Payload = b"") -> None:
        """Keeps a result until it is acknowledged, and sends it if possible. Any thread may call; never blocks."""
        parts = pack_message(message, payload)
        with self._lock:
            if START_CALL_ID < message.id <= call_id_base(self._leader.generation):
                return  # the controller that sent the call is gone
            self._kept[message.id] = parts
            self._send(*parts)

    def signal_handled(self) -> None:
        """Notes that the main thread has handled its signal."""
        self._unhandled_since = None

    def finished(self) -> None:
        """Notes that the main thread has finished, so that the process must exit soon."""
        self._finished_at = time.monotonic()
        self._wake()

    def flush(self, seconds: float) -> None:
        """Gives the last results a little time to be sent."""

        def written() -> bool | None:
            connection = self._connection
            return True if connection is None or not connection.pending else None

        with contextlib.suppress(WaitTimeout):
            waits.poll(
                written, kind="send", waits_for="controller", why="the last results", every_s=0.005, timeout_s=seconds,
            )  # fmt: skip

    def _run(self) -> None:
        try:
            self._stay_connected()
        finally:  # without this thread, nobody can reach this worker, and it would wait for ever
            if self._finished_at is None:
                _write_log_line(f"exiting: the I/O thread ended unexpectedly\n{traceback.format_exc()}")
                os._exit(UNREACHABLE_EXIT_CODE)

    def _stay_connected(self) -> NoReturn:
        while True:
            if self._connection is None or time.monotonic() >= self._heartbeat_at:
                self._follow_leader()
                self._follow_relay()
            if self._connection is None and time.monotonic() >= self._connect_at:
                self._connect()
            self._check_lease()
            self._repeat_signal()
            self._send_heartbeat()
            self._select()

    def _select(self) -> None:
        """Waits for data to read or write, at most until the next heartbeat, reconnect or lease check."""
        self._watch()
        connection = self._connection
        if connection is None:
            timeout = max(0.0, min(self._connect_at - time.monotonic(), 0.1))
        else:
            timeout = max(0.0, min(self._heartbeat_at - time.monotonic(), HEARTBEAT_S))
        if self._unhandled_since is not None:
            timeout = min(timeout, SIGNAL_RETRY_S)
        ready = {key.fileobj for key, _ in self._selector.select(timeout)}
        if self._wake_in in ready:
            with contextlib.suppress(BlockingIOError):
                if signal.SIGTERM in self._wake_in.recv(4096) and self._unhandled_since is None:
                    self._unhandled_since = time.monotonic()
        if connection is not None and connection in ready:
            self._exchange(connection)

    def _watch(self) -> None:
        """Makes the selector watch the connection. The main thread may close it at any moment, when a result cannot be
        sent."""
        connection = self._connection
        if connection is not self._watched:
            if self._watched is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(self._watched)
            self._watched = None
        if connection is None:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.pending else 0)
        try:
            (self._selector.register if self._watched is None else self._selector.modify)(connection, events)
        except (KeyError, ValueError, OSError) as error:
            self._drop(connection, f"the connection cannot be watched ({error})")
        self._watched = connection

    def _exchange(self, connection: Connection) -> None:
        try:
            connection.flush()
            while (frame := connection.recv(0)) is not None:
                self._handle(frame)
        except (WireError, ValueError) as error:
            self._drop(connection, str(error))

    def _handle(self, frame: bytearray) -> None:
        message, payload = unpack_to_worker(frame)
        match message:
            case CallMessage(id=number):
                self._acknowledged(message.arrived)
                if number > self._received and self._service is not None:
                    self._received = number
                    self._service.deliver(message, payload)
            case AckMessage(ids=ids):
                self._acknowledged(ids)
            case LeaveMessage(why=why):
                if self._service is not None:
                    self._service.leave(why)

    def _acknowledged(self, ids: Sequence[int]) -> None:
        with self._lock:
            for number in ids:
                self._kept.pop(number, None)

    def _follow_leader(self) -> None:
        """Switches to a later controller if there is one and this process is not exiting."""
        leader = Leader.read(self._run_id)
        if leader is None or leader.generation <= self._leader.generation:
            return
        if self._service is None or self._service.leaving:
            return
        _write_log_line(f"the controller of generation {leader.generation} has taken over the run")
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._leader, self._refused = leader, ""
            self._kept.clear()
            self._lost_since = self._leader_gone_since = time.monotonic()
            self._connect_at = 0.0
        self._service.renew()

    def _connect(self) -> None:
        relay = self._published_relay()
        if relay is not None and not self._avoids(relay):
            self._connect_to(relay)
            return
        try:
            connection = self._dial(self._leader.host, self._leader.port, 5.0)
        except WireError as error:
            if isinstance(error, HandshakeRefused) and error.proven:
                self._refused = error.why
            self._connect_later()
            return
        self._use(connection, None)

    def _connect_to(self, relay: ServiceAddress) -> None:
        """Connects to a relay. If that fails, the worker avoids it, and keeps the connection that it has."""
        try:
            connection = self._dial(relay.host, relay.port, RELAY_CONNECT_S)
        except WireError as error:
            _write_log_line(f"{error}; doing without the call relay")
            self._avoid(relay)
            return
        self._use(connection, relay)

    def _dial(self, host: str, port: int, timeout_s: float) -> Connection:
        return auth_handshake.connect(
            host, port, token=self._token, run=self._run_id, generation=self._leader.generation, name=self._name,
            timeout_s=timeout_s,
        )  # fmt: skip

    def _use(self, connection: Connection, relay: ServiceAddress | None) -> None:
        """Uses a new connection in place of the one before it. What is on its way there is sent again."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection, self._relay, self._connected_at = connection, relay, time.monotonic()
            self._send(*pack_message(ResumeMessage(self._received, os.getpid())))
            for parts in list(self._kept.values()):
                self._send(*parts)
        self._orphan_since = None

    def _published_relay(self) -> ServiceAddress | None:
        """The call relay that serves this node's workers for the current controller."""
        try:
            relay = ServiceAddress.parse((run_shm_dir(self._run_id) / RELAY_FILE).read_bytes())
        except (OSError, ValueError):
            return None
        return relay if relay.generation == self._leader.generation else None

    def _follow_relay(self) -> None:
        """Connects to the node's relay if there is one now, and leaves one that is there no more: with its host it may
        have ended without closing its connections."""
        connection, relay = self._connection, self._published_relay()
        if connection is None or relay == self._relay:
            return
        if self._relay is not None:
            self._drop(connection, "the call relay was given up")
        elif relay is not None and not connection.pending and not self._avoids(relay):
            self._connect_to(relay)

    def _avoids(self, relay: ServiceAddress) -> bool:
        return relay == self._avoided and time.monotonic() < self._avoid_until

    def _avoid(self, relay: ServiceAddress) -> None:
        """Does without a relay for a while, because it has not served this worker."""
        self._avoid_s = min(2 * self._avoid_s, MAX_AVOID_RELAY_S) if relay == self._avoided else AVOID_RELAY_S
        self._avoided, self._avoid_until = relay, time.monotonic() + self._avoid_s

    def _connect_later(self) -> None:
        now = time.monotonic()
        self._connect_at = now + min(1.0, 0.05 + 0.2 * (now - self._lost_since))

    def _send(self, *parts: bytes | bytearray | memoryview) -> None:
        """The caller holds the lock."""
        queue_message(self._connection, parts, self._drop, self._wake)

    def _drop(self, connection: Connection, why: str) -> None:
        with self._lock:
            if self._connection is not connection:
                return
            connection.close()
            self._connection = None
            early = time.monotonic() - self._connected_at < MIN_CONNECTION_S
            if early and self._relay is not None:
                self._avoid(self._relay)
            if early and self._relay is None:
                self._connect_later()
            else:
                self._lost_since = self._leader_gone_since = time.monotonic()
                self._connect_at = 0.0
        self._wake()
        _write_log_line(f"{why}; reconnecting")

    def _send_heartbeat(self) -> None:
        now = time.monotonic()
        if now < self._heartbeat_at:
            return
        self._heartbeat_at = now + HEARTBEAT_S - time.time() % HEARTBEAT_S  # of all workers at the same time
        beacon = current_beacon()
        beacon.beat()
        if self._connection is not None and self._service is not None and self._service.busy:
            stage, wait = describe_service(self._service)
            with self._lock:
                self._send(*pack_message(HeartbeatMessage(beacon.progress_count, stage, wait)))

    def _check_lease(self) -> None:
        """Ends the process if the controller has been gone for too long."""
        now = time.monotonic()
        if self._finished_at is not None and now - self._finished_at > 5.0:
            _write_log_line("still running 5 s after the service closed (a non-daemon thread?); exiting")
            os._exit(0)
        if self._connection is not None:
            return
        leader = self._leader
        leader_alive = leader.pid is None or is_alive(leader.pid, leader.start_ticks)
        if leader_alive:
            self._leader_gone_since = now
        limit_s = max(leader.orphan_grace_s, leader.reconnect_s) if leader_alive else leader.orphan_grace_s
        waited_s = now - (self._lost_since if leader_alive else self._leader_gone_since)
        if self._refused:
            self._exit_orphaned(f"the controller refuses this worker: {self._refused}")
        elif waited_s >= limit_s:
            how = "has not accepted a connection" if leader_alive else "has been gone"
            self._exit_orphaned(f"the controller {how} for {waited_s:.1f} s")

    def _repeat_signal(self) -> None:
        """Sends a signal again that arrived just before the main thread blocked: Python has recorded it, but it does
        not wake the thread, whose wait may be unbounded."""
        if self._unhandled_since is None or self._finished_at is not None or self._main.ident is None:
            return
        if time.monotonic() - self._unhandled_since >= SIGNAL_RETRY_S:
            self._unhandled_since = time.monotonic()
            signal.pthread_kill(self._main.ident, signal.SIGTERM)

    def _exit_orphaned(self, why: str) -> None:
        now = time.monotonic()
        if self._orphan_since is None:
            self._orphan_since = now
            _write_log_line(f"exiting: {why}")
            if self._service is not None:
                self._service.leave(why)
            if self._main.is_alive() and self._main.ident is not None:
                signal.pthread_kill(self._main.ident, signal.SIGTERM)
        elif now - self._orphan_since > CLOSE_LIMIT_S:
            _write_log_line(f"the main thread did not return within {CLOSE_LIMIT_S:g} s; exiting without it")
            os._exit(ORPHANED_EXIT_CODE)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.send(b"\0")

    @property
    def orphaned(self) -> bool:
        return self._orphan_since is not None


def describe_service(service: ServiceRunner) -> tuple[str, str]:
    """The worker's stage, and what its main thread waits for, as text."""
    beacon = current_beacon()
    wait = beacon.innermost_wait(os.getpid())
    return beacon.stage_name or service.running, f"{wait.waits_for} ({wait.why})" if wait is not None else ""


def _write_log_line(text: str) -> None:
    """Writes to the log without taking a lock, which a stuck thread could hold."""
    stamp = time.strftime("%H:%M:%S")
    with contextlib.suppress(OSError):
        os.write(2, f"{stamp} controller connection: {text}\n".encode())
