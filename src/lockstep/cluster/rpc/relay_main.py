"""`python -m lockstep.cluster.rpc.relay_main`: the call relay of a node or several, a process that an agent starts.

It tells the controller where it listens, whose agents show it to the workers. These connect to it instead of the
controller, to which it keeps one connection for all of them. It listens on loopback if it serves one node only, else at
the address of its node; and with the run's token, like every process of a run. While the controller is not reachable,
it does not listen and has no connections.
"""

import contextlib
import logging
import os
import selectors
import sys
import time
from pathlib import Path

from lockstep.base import waits
from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection, WireError
from lockstep.base.transport.run_token import TOKEN_VARIABLE
from lockstep.cluster.rpc.call_relay import CallRelay
from lockstep.cluster.rpc.rpc_messages import MANIFEST_VARIABLE, WorkerManifest
from lockstep.watch.agent.service_discovery import Leader, ServiceAddress
from lockstep.watch.beacon.writer import close_beacon, current_beacon, open_beacon

log = logging.getLogger(__name__)

ALIVE_S = 1.0
"""How often the relay reports that it is alive, and looks whether the run has another controller."""
RECONNECT_PAUSE_S = 0.2


class RelayProcess:
    """Connects to the run's controller, and serves workers while the connection lasts. Raises KeyError for a manifest
    that does not say where to listen."""

    def __init__(self, manifest: WorkerManifest, token: str) -> None:
        self._manifest, self._token = manifest, token
        host, ports = manifest.arguments["host"], manifest.arguments["ports"]
        self._where = str(host), None if ports is None else (int(ports[0]), int(ports[1]))

    def run(self) -> None:
        """Returns when a later controller has the run, whose relays it starts itself. The agent ends this process when
        no controller can come back."""
        while (leader := self._leader()) is not None:
            try:
                controller = auth_handshake.connect(
                    leader.host, leader.port, token=self._token, run=self._manifest.run, generation=leader.generation,
                    name=self._manifest.name, timeout_s=5.0,
                )  # fmt: skip
            except WireError as error:
                log.info("%s", error)
                waits.sleep(RECONNECT_PAUSE_S, "the controller")
                continue
            with controller:
                self._serve(controller)
            waits.sleep(RECONNECT_PAUSE_S, "the controller")

    def _leader(self) -> Leader | None:
        """The controller that started this relay, unless another one has taken over the run."""
        leader = Leader.read(self._manifest.run)
        return leader if leader is not None and leader.generation == self._manifest.generation else None

    def _serve(self, controller: Connection) -> None:
        run, generation = self._manifest.run, self._manifest.generation
        with auth_handshake.Listener(self._token, run, generation, self._manifest.name, *self._where) as listener:
            address = ServiceAddress(run, generation, listener.host, listener.port, os.getpid())
            session = _Session(controller, listener, address)
            try:
                while self._leader() is not None:
                    session.serve(ALIVE_S)
            except (WireError, ValueError) as error:
                log.warning("%s; the workers connect to the controller themselves", error)
            finally:
                session.close()


class _Session:
    """One connection to the controller, and those of the workers meanwhile."""

    def __init__(self, controller: Connection, listener: auth_handshake.Listener, address: ServiceAddress) -> None:
        self._controller, self._listener = controller, listener
        self._relay = CallRelay(lambda parts: controller.queue(*parts))
        self._relay.listens(address)
        self._workers = selectors.EpollSelector()
        self._writing: set[int] = set()
        """Channels whose connections the selector watches for room to write."""
        self._selector = selectors.EpollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(controller, selectors.EVENT_READ)
        self._selector.register(self._workers, selectors.EVENT_READ)
        self._full = False
        """Whether the controller accepts no data: then nothing is read from workers, whose results stay with them."""
        self._connections: dict[int, Connection] = {}

    def serve(self, seconds: float) -> None:
        """Relays for so long, then reports that this process is alive. Raises WireError if the controller's connection
        breaks, ValueError for a malformed frame."""
        until = time.monotonic() + seconds
        self._write()
        while (now := time.monotonic()) < until:
            for key, _ in self._selector.select(max(0.0, min(until, self._relay.due) - now)):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._controller:
                    for frame in self._controller.frames():
                        self._relay.from_controller(frame)
                elif not self._full:
                    self._exchange()
            if time.monotonic() >= self._relay.due:
                self._relay.flush()
            self._write()
        self._relay.report()
        current_beacon().beat()
        self._write()

    def close(self) -> None:
        """Closes the connections of all workers, which then connect to the controller."""
        self._relay.close_all()
        self._workers.close()
        self._selector.close()

    def _accept(self) -> None:
        self._drop_closed()  # a closed connection may have had the same descriptor
        while (connection := self._listener.accept(0)) is not None:
            channel = self._relay.open(connection.peer.name, connection)
            self._connections[channel] = connection
            self._workers.register(connection, selectors.EVENT_READ, channel)

    def _drop_closed(self) -> None:
        for channel in [channel for channel, each in self._connections.items() if each.closed]:
            with contextlib.suppress(KeyError):
                self._workers.unregister(self._connections.pop(channel))

    def _exchange(self) -> None:
        """Reads what workers have sent, and writes what their connections accept."""
        for key, events in self._workers.select(0):
            channel, connection = key.data, self._connections[key.data]
            try:
                if events & selectors.EVENT_WRITE:
                    self._relay.write(channel)
                if events & selectors.EVENT_READ and not connection.closed:
                    for frame in connection.frames():
                        self._relay.from_worker(channel, frame)
            except (WireError, ValueError) as error:
                log.info("%s: %s", connection.peer.name, error)
                self._relay.close(channel)

    def _write(self) -> None:
        """Writes to the controller, and watches the connections that have data left to write."""
        full = not self._controller.flush()
        if full != self._full:
            self._full = full
            write = selectors.EVENT_WRITE if full else 0
            self._selector.modify(self._controller, selectors.EVENT_READ | write)
            if full:
                self._selector.unregister(self._workers)
            else:
                self._selector.register(self._workers, selectors.EVENT_READ)
        self._drop_closed()
        for channel in self._writing ^ self._relay.blocked:
            if channel in self._connections:
                write = selectors.EVENT_WRITE if channel in self._relay.blocked else 0
                self._workers.modify(self._connections[channel], selectors.EVENT_READ | write, channel)
        self._writing = set(self._relay.blocked)


def main() -> int:
    """Relays until the run has another controller; returns the exit code."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname).1s %(message)s")
    manifest = WorkerManifest.read(Path(os.environ[MANIFEST_VARIABLE]))
    token = os.environ.pop(TOKEN_VARIABLE)
    open_beacon(manifest.run, manifest.name, manifest.role, manifest.rank).stage("relay")
    RelayProcess(manifest, token).run()
    close_beacon()
    return 0


if __name__ == "__main__":
    sys.exit(main())
