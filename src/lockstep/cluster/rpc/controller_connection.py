"""The worker's I/O thread: one reconnecting connection to the controller, and the lease on it.

It never waits for the main thread. While the worker has work it sends a pulse each second; when the controller is
gone for longer than the grace, the process leaves, in order if the main thread can, else by `os._exit`. When another
controller has the run by then, it goes over to that one: nothing that the first one asked for is done any more.
"""

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Sequence

from lockstep.base import waits
from lockstep.base.bounded_wait import WaitTimeout
from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection, HandshakeRefused, WireError
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
from lockstep.watch.agent.service_discovery import Leader
from lockstep.watch.beacon import writer
from lockstep.watch.procfs.processes import is_alive

HEARTBEAT_S = 1.0
SIGNAL_RETRY_S = 0.1
"""How often a signal that the main thread has not heard is sent to it again."""
CLOSE_LIMIT_S = 2.0
"""An orphan's main thread gets this long to close the service before the process ends anyhow."""
MIN_CONNECTION_S = 1.0
"""Who ends a connection this soon has not taken it."""
ORPHANED_EXIT_CODE = 75
"""Exit code of a worker whose controller is gone."""


class ControllerConnection:
    """The connection to the controller, kept up by a thread of its own.

    Args:
        run, name: of the worker that dials.
        leader: who its controller is, and on whose behalf it lives.
    """

    def __init__(self, run: str, name: str, token: str, leader: Leader) -> None:
        self._run_id, self._name, self._token, self._leader = run, name, token, leader
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._received = START_CALL_ID
        self._kept: dict[int, tuple[bytes, Payload | bytearray]] = {}
        self._lost_at = self._alone_at = self._dialled_at = time.monotonic()
        self._refused = ""
        self._orphan_since: float | None = None
        self._dial_at = self._pulse_at = 0.0
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._watched: Connection | None = None
        self._main = threading.main_thread()
        self._finished_at: float | None = None
        self._unheard_at: float | None = None
        self._service: ServiceRunner | None = None

    def start(self, service: ServiceRunner) -> None:
        """From the main thread."""
        self._service = service
        signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._run, name="lockstep-uplink", daemon=True).start()

    def answer(self, message: ResultMessage | FailureMessage, payload: Payload = b"") -> None:
        """Keeps an answer until it is acknowledged, and sends it if it can. From any thread; never blocks."""
        parts = pack_message(message, payload)
        with self._lock:
            if START_CALL_ID < message.id <= call_id_base(self._leader.generation):
                return  # nobody is there any more who asked for it
            self._kept[message.id] = parts
            self._send(*parts)

    def heard(self) -> None:
        """The main thread runs its signal handler."""
        self._unheard_at = None

    def finished(self) -> None:
        """The main thread is through; from here on the process may not linger."""
        self._finished_at = time.monotonic()
        self._wake()

    def flush(self, seconds: float) -> None:
        """Gives the last answers a little time to leave."""

        def written() -> bool | None:
            connection = self._connection
            return True if connection is None or not connection.pending else None

        with contextlib.suppress(WaitTimeout):
            waits.poll(
                written, kind="send", waits_for="controller", why="the last answers", every_s=0.005, timeout_s=seconds,
            )  # fmt: skip

    def _run(self) -> None:
        while True:
            if self._connection is None or time.monotonic() >= self._pulse_at:
                self._follow()
            if self._connection is None and time.monotonic() >= self._dial_at:
                self._dial()
            self._watch_lease()
            self._repeat_signal()
            self._pulse()
            self._look()

    def _look(self) -> None:
        """Waits for something to read or write, at most until the next pulse, dial or lease check."""
        connection = self._connection
        if connection is not self._watched:
            if self._watched is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(self._watched)
            self._watched = connection
            if connection is not None:
                self._selector.register(connection, selectors.EVENT_READ)
        if connection is None:
            timeout = max(0.0, min(self._dial_at - time.monotonic(), 0.1))
        else:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.pending else 0)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.modify(connection, events)
            timeout = max(0.0, min(self._pulse_at - time.monotonic(), HEARTBEAT_S))
        if self._unheard_at is not None:
            timeout = min(timeout, SIGNAL_RETRY_S)
        ready = {key.fileobj for key, _ in self._selector.select(timeout)}
        if self._wake_in in ready:
            with contextlib.suppress(BlockingIOError):
                if signal.SIGTERM in self._wake_in.recv(4096) and self._unheard_at is None:
                    self._unheard_at = time.monotonic()
        if connection is not None and connection in ready:
            self._exchange(connection)

    def _exchange(self, connection: Connection) -> None:
        try:
            connection.flush()
            while (frame := connection.recv(0)) is not None:
                self._take(frame)
        except (WireError, ValueError) as error:
            self._lose(connection, str(error))

    def _take(self, frame: bytearray) -> None:
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

    def _follow(self) -> None:
        """Goes over to a later controller, where there is one and this process does not leave already."""
        leader = Leader.read(self._run_id)
        if leader is None or leader.generation <= self._leader.generation:
            return
        if self._service is None or self._service.leaving:
            return
        _write_log_line(f"generation {leader.generation} has the run now")
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._leader, self._refused = leader, ""
            self._kept.clear()
            self._lost_at = self._alone_at = time.monotonic()
            self._dial_at = 0.0
        self._service.renew()

    def _dial(self) -> None:
        here = self._leader
        try:
            connection = auth_handshake.connect(
                here.host, here.port, token=self._token, run=self._run_id, generation=here.generation,
                name=self._name, timeout_s=5.0,
            )  # fmt: skip
        except WireError as error:
            if isinstance(error, HandshakeRefused) and error.code != "protocol":
                self._refused = error.why
            self._dial_later()
            return
        with self._lock:
            self._connection, self._dialled_at = connection, time.monotonic()
            self._send(*pack_message(ResumeMessage(self._received, os.getpid())))
            for parts in list(self._kept.values()):
                self._send(*parts)
        self._orphan_since = None

    def _dial_later(self) -> None:
        now = time.monotonic()
        self._dial_at = now + min(1.0, 0.05 + 0.2 * (now - self._lost_at))

    def _send(self, *parts: bytes | bytearray | memoryview) -> None:
        """Needs the lock."""
        queue_message(self._connection, parts, self._lose, self._wake)

    def _lose(self, connection: Connection, why: str) -> None:
        with self._lock:
            if self._connection is not connection:
                return
            connection.close()
            self._connection = None
            if time.monotonic() - self._dialled_at < MIN_CONNECTION_S:
                self._dial_later()
            else:
                self._lost_at = self._alone_at = time.monotonic()
                self._dial_at = 0.0
        self._wake()
        _write_log_line(f"{why}; dialling again")

    def _pulse(self) -> None:
        now = time.monotonic()
        if now < self._pulse_at:
            return
        self._pulse_at = now + HEARTBEAT_S
        here = writer.current_beacon()
        here.beat()
        if self._connection is not None and self._service is not None and self._service.busy:
            stage, wait = describe_service(self._service)
            with self._lock:
                self._send(*pack_message(HeartbeatMessage(here.moves, stage, wait)))

    def _watch_lease(self) -> None:
        """Leaves when nobody is there to work for. Returns otherwise."""
        now = time.monotonic()
        if self._finished_at is not None and now - self._finished_at > 5.0:
            _write_log_line("did not end within 5 s after its service closed (a thread that is no daemon?); leaving")
            os._exit(0)
        if self._connection is not None:
            return
        leader = self._leader
        lives = leader.pid is None or is_alive(leader.pid, leader.start_ticks)
        if lives:
            self._alone_at = now
        patience = max(leader.orphan_grace_s, leader.reconnect_s) if lives else leader.orphan_grace_s
        alone = now - (self._lost_at if lives else self._alone_at)
        if self._refused:
            self._orphaned(f"the controller refuses it: {self._refused}")
        elif alone >= patience:
            how = "does not take the connection back" if lives else "is gone"
            self._orphaned(f"the controller {how} since {alone:.1f} s")

    def _repeat_signal(self) -> None:
        """A signal that comes just before the main thread blocks is noted, but does not wake it: it would be heard at
        the end of a wait that may have no end."""
        if self._unheard_at is None or self._finished_at is not None or self._main.ident is None:
            return
        if time.monotonic() - self._unheard_at >= SIGNAL_RETRY_S:
            self._unheard_at = time.monotonic()
            signal.pthread_kill(self._main.ident, signal.SIGTERM)

    def _orphaned(self, why: str) -> None:
        now = time.monotonic()
        if self._orphan_since is None:
            self._orphan_since = now
            _write_log_line(f"leaving: {why}")
            if self._service is not None:
                self._service.leave(why)
            if self._main.is_alive() and self._main.ident is not None:
                signal.pthread_kill(self._main.ident, signal.SIGTERM)
        elif now - self._orphan_since > CLOSE_LIMIT_S:
            _write_log_line(f"its main thread did not come back within {CLOSE_LIMIT_S:g} s; leaving without it")
            os._exit(ORPHANED_EXIT_CODE)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.send(b"\0")

    @property
    def orphaned(self) -> bool:
        return self._orphan_since is not None


def describe_service(service: ServiceRunner) -> tuple[str, str]:
    """The worker's stage and the wait of its main thread, for people."""
    here = writer.current_beacon()
    wait = here.waiting(os.getpid())
    return here.stage_name or service.running, f"{wait.waits_for} ({wait.why})" if wait is not None else ""


def _write_log_line(text: str) -> None:
    """Into the log, without any lock that a stuck thread could hold."""
    stamp = time.strftime("%H:%M:%S")
    with contextlib.suppress(OSError):
        os.write(2, f"{stamp} uplink: {text}\n".encode())
