"""The controller's I/O thread: accepts connections from workers and reads their messages."""

import contextlib
import itertools
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable

from lockstep.base import waits
from lockstep.base.network import PortRange
from lockstep.base.text import count_noun
from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection, FrameRefused, WireError
from lockstep.cluster.rpc.relayed_connection import CallRelayLink, ExpectedRelay, RelayedConnection
from lockstep.cluster.rpc.remote_worker import RemoteWorker
from lockstep.cluster.rpc.rpc_messages import LeaveMessage, WorkerConnection, call_id_base, pack_message

log = logging.getLogger(__name__)

TICK_S = 0.5
LAST_RESULTS_S = 2.0
"""How long the results of a worker that has ended may be on their way through a relay."""
_GIVEN_UP = "the controller gave this worker up while it was unreachable"


class RpcServer:
    """One listener and one thread for all workers of a run. The thread calls `tick` twice a second."""

    def __init__(
        self,
        token: str,
        run: str,
        generation: int,
        tick: Callable[[], None],
        host: str = "127.0.0.1",
        ports: PortRange | None = None,
    ) -> None:
        self._listener = auth_handshake.Listener(token, run, generation, name="controller", host=host, ports=ports)
        self._tick = tick
        self.call_ids = itertools.count(call_id_base(generation) + 1)
        """Ids for the calls of all workers, of which those of one message have the same."""
        self._workers: dict[str, RemoteWorker] = {}
        self._given_up: set[str] = set()
        """Names of workers that were declared dead while unreachable, and may still run."""
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._connections: set[Connection] = set()
        self._writing: set[Connection] = set()
        """Connections that the selector watches for room to write."""
        self._changed: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        """Connections that have data left to write, or are closed; so that not all connections need checking."""
        self._relays: dict[str, ExpectedRelay] = {}
        """The call relays that may connect, by name."""
        self._links: dict[Connection, CallRelayLink] = {}
        """The connections of call relays."""
        self._ends: list[tuple[float, RemoteWorker, Callable[[], None]]] = []
        """Workers that have ended, whose last results may still come through a relay; until when, and what to do
        then."""
        self._closed = False
        self.refused_frames = 0
        """Frames that no worker of the run sent: changed, added or repeated on the way."""
        self._thread = threading.Thread(target=self._run, name="lockstep-hub", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.host, self._listener.port

    @property
    def workers(self) -> list[RemoteWorker]:
        return list(self._workers.values())

    def add(self, worker: RemoteWorker) -> None:
        self._workers[worker.name] = worker

    def remove(self, worker: RemoteWorker) -> None:
        if self._workers.get(worker.name) is worker:
            self._workers.pop(worker.name, None)  # two threads may stop a worker

    def add_relay(self, name: str, relay: ExpectedRelay) -> None:
        """Lets a call relay connect."""
        self._relays[name] = relay

    def remove_relay(self, name: str) -> None:
        """Refuses the relay from now on: it has ended, or will be killed."""
        self._relays.pop(name, None)

    def give_up(self, worker: RemoteWorker) -> None:
        """Declares a worker dead whose node is unreachable. Its calls fail, and if it reconnects, it is rejected. Runs
        in the server's thread."""
        self._given_up.add(worker.name)
        worker.mark_dead(None)

    def worker_ended(self, name: str, pid: int, exit_code: int | None, log_end: str = "") -> None:
        """Handles the end of a worker: reads its last results, then its open calls fail. Any thread may call.

        Args:
            log_end: the last lines of the worker's log.
        """

        def mark_dead() -> None:
            worker = self._workers.get(name)
            if worker is None or worker.pid != pid:
                return
            if isinstance(worker.connection, Connection):
                self._exchange(worker.connection)
            elif worker.connection is not None:
                due = time.monotonic() + LAST_RESULTS_S
                self._ends.append((due, worker, lambda: worker.mark_dead(exit_code, log_end)))
                return
            worker.mark_dead(exit_code, log_end)

        self._jobs.put(mark_dead)
        self.wake()

    def connection_changed(self, worker: RemoteWorker, connection: WorkerConnection | None) -> None:
        """Makes the thread handle a connection that has data left to write, or is closed. Any thread may call."""
        if isinstance(connection, Connection):
            self._changed.put(connection)
        self.wake()

    def _link_changed(self, connection: Connection) -> None:
        self._changed.put(connection)
        self.wake()

    def wake(self) -> None:
        """Wakes the server's thread, which then runs its queued jobs."""
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_out.send(b"\0")

    def close(self) -> None:
        """Stops the thread, the listener and all connections. Idempotent."""
        self._closed = True
        self.wake()
        if threading.current_thread() is not self._thread:
            waits.join(self._thread, waits_for="RPC server", why="its thread ends", timeout_s=10.0)

    def _run(self) -> None:
        try:
            due = 0.0
            while not self._closed:
                self._watch_writes()
                for key, _ in self._selector.select(TICK_S):
                    self._serve(key.fileobj)
                while not self._jobs.empty():
                    self._jobs.get_nowait()()
                self._end_workers()
                if time.monotonic() >= due:
                    due = time.monotonic() + TICK_S
                    self._tick()
                    self._check_relays()
                    for worker in self.workers:
                        worker.acknowledge()
                    for link in self._links.values():
                        link.acknowledge()
        finally:
            if not self._closed:
                log.critical("the RPC server's thread ended unexpectedly; all calls fail")
            for worker in self.workers:
                worker.mark_dead(None)
            for connection in list(self._connections):
                connection.close()
            self._listener.close()
            self._selector.close()

    def _serve(self, source: object) -> None:
        if source is self._listener:
            while (connection := self._listener.accept(0)) is not None:
                self._accept(connection)
        elif source is self._wake_in:
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)
        elif isinstance(source, Connection):
            self._exchange(source)

    def _accept(self, connection: Connection) -> None:
        self._watch_writes()  # a closed connection may have had the same descriptor
        name = connection.peer.name
        worker = self._workers.get(name)
        relay = self._relays.get(name)  # any thread may remove it
        if relay is not None:
            self._end_links(name)
            self._links[connection] = CallRelayLink(connection, self._link_changed, relay)
        elif worker is None or worker.dead:
            self._reject(name, connection)
            return
        self._connections.add(connection)
        try:
            self._selector.register(connection, selectors.EVENT_READ)
        except KeyError:  # another thread has closed the one with this descriptor, and is about to report it
            closed = self._selector.get_map()[connection.fileno()].fileobj
            assert isinstance(closed, Connection)
            self._drop(closed)
            self._selector.register(connection, selectors.EVENT_READ)

    def _reject(self, name: str, connection: WorkerConnection) -> None:
        """Rejects an unknown worker. A worker that was given up while unreachable has been replaced, and must exit."""
        log.warning("unknown worker %s connected%s", name, " (it was given up)" if name in self._given_up else "")
        if name in self._given_up:
            with contextlib.suppress(WireError):  # a few bytes, which fit an empty socket buffer
                connection.queue(*pack_message(LeaveMessage(_GIVEN_UP)))
                connection.flush()
        connection.close()

    def _watch_writes(self) -> None:
        """Makes the selector watch connections that have data left to write; drops closed connections."""
        while not self._changed.empty():
            connection = self._changed.get_nowait()
            if connection.closed:
                self._drop(connection)
            elif connection in self._connections:
                self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Updates the events for which the selector watches a connection."""
        if connection.pending == (connection in self._writing):
            return
        (self._writing.add if connection.pending else self._writing.discard)(connection)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection in self._writing else 0)
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.modify(connection, events)

    def _drop(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._writing.discard(connection)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        link = self._links.pop(connection, None)
        if link is not None:
            link.expected.listens(None)
            for relayed, behind in list(link.channels.values()):
                behind.connection_lost(relayed)
            return
        worker = self._workers.get(connection.peer.name)
        if worker is not None:
            worker.connection_lost(connection)

    def _exchange(self, connection: Connection) -> None:
        """Reads all messages that have arrived, and writes what fits."""
        worker, link = self._workers.get(connection.peer.name), self._links.get(connection)
        try:
            for frame in connection.frames():
                if link is not None:
                    link.heartbeat.received()
                    link.handle_frame(frame, self._accept_relayed)
                elif worker is not None:
                    worker.handle_frame(connection, frame)
                else:
                    break
            connection.flush()
            self._watch(connection)
        except (WireError, ValueError) as error:
            if isinstance(error, FrameRefused):
                self.refused_frames += 1
                refused = count_noun(self.refused_frames, "frame")
                log.warning("%s refused in this run; the worker connects anew", refused)
            log.debug("%s: %s", connection.peer.name, error)
            self._drop(connection)
            connection.close()

    # --- relays

    def _accept_relayed(self, link: CallRelayLink, number: int, name: str) -> None:
        worker = self._workers.get(name)
        if worker is None or worker.dead:
            self._reject(name, RelayedConnection(link, number))
            return
        try:
            link.open(number, worker)
        except ValueError as error:
            log.info("%s", error)
            RelayedConnection(link, number).close()

    def _end_links(self, name: str) -> None:
        """Ends the connections of a relay that has connected anew. One of them may be open at this end only, and that
        it is silent must not be taken for silence of the relay."""
        for connection in [each for each in self._links if each.peer.name == name]:
            self._drop(connection)
            connection.close()

    def _check_relays(self) -> None:
        """Gives up relays that are silent."""
        for connection, link in list(self._links.items()):
            if link.is_silent():
                expected = self._relays.pop(connection.peer.name, None)
                self._drop(connection)
                connection.close()
                if expected is not None:
                    expected.silent()

    def _end_workers(self) -> None:
        """Marks workers dead whose last results have come through a relay."""
        for end in list(self._ends):
            due, worker, mark_dead = end
            if worker.connection is None or time.monotonic() >= due:
                self._ends.remove(end)
                mark_dead()
