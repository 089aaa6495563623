"""Watches a job on several nodes: one supervisor connects to the agents of all nodes.

All nodes are given the address of the supervisor's node, as with torchrun's `--rdzv-endpoint`, and the same token in
`LOCKSTEP_TOKEN`.
"""

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lockstep.base import waits
from lockstep.base.transport.frames import Connection, WireError
from lockstep.base.wait_state import WaitTimeout
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.supervisor.supervisor_client import SupervisorEvent, subscribe

TOKEN_VARIABLE = "LOCKSTEP_TOKEN"
DEFAULT_PORT = 29477
UNREACHABLE_AFTER_S = 60.0
"""After this long without a supervisor, a warning is printed."""
WATCH_GENERATION = 1


@dataclass(frozen=True, slots=True)
class SupervisorEndpoint:
    """The address at which all nodes find the supervisor, and the token."""

    host: str
    port: int
    token: str

    @staticmethod
    def read(text: str) -> "SupervisorEndpoint":
        """Parses `HOST:PORT` or `HOST`, and reads the token from the environment.

        Raises:
            ValueError: the host is unknown, the port is invalid, or no token is set.
        """
        host, _, port = text.rpartition(":") if ":" in text else (text, "", str(DEFAULT_PORT))
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"--supervisor {text}: expected HOST:PORT")
        if len(token) < 16:
            raise ValueError(
                f"--supervisor {text}: set {TOKEN_VARIABLE} on all nodes to the same 16 or more secret characters"
            )
        try:
            return SupervisorEndpoint(socket.gethostbyname(host), int(port), token)
        except OSError as error:
            raise ValueError(f"--supervisor {text}: no host {host} ({error})") from error

    @property
    def run(self) -> str:
        """The supervisor's run id, which every node derives from port and token."""
        return f"watch-{hashlib.sha256(f'{self.port} {self.token}'.encode()).hexdigest()[:12]}"

    def is_local(self) -> bool:
        """Whether the address belongs to this node and the port is still free."""
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((self.host, self.port))
            except OSError:
                return False
            return True

    def local_address(self) -> str:
        """The address at which the supervisor's node reaches this one."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((self.host, self.port))  # sends nothing
            return str(route.getsockname()[0])


class RemoteSupervisorClient:
    """Registers this node's agent with the supervisor on another node and receives the supervisor's events, in a
    background thread. It reconnects after each disconnection; the watched command never depends on it.

    `on_event` and `on_trouble` are called in that thread.
    """

    def __init__(
        self, endpoint: SupervisorEndpoint, agent: ServiceAddress, name: str, on_event: Callable[[SupervisorEvent],
        None],
        on_trouble: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._endpoint, self._agent, self._name = endpoint, agent, name
        self._on_event, self._on_trouble = on_event, on_trouble
        self._received: set[tuple[int, float]] = set()
        """Numbers and times of the received frames; a restarted supervisor numbers its frames from 1 again."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._stay_connected, name="joined", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 7.0) -> None:
        self._closing.set()
        with contextlib.suppress(WaitTimeout):
            waits.join(self._thread, waits_for="joined", why="its thread ends", timeout_s=timeout_s)

    def _stay_connected(self) -> None:
        supervisor = ServiceAddress(self._endpoint.run, WATCH_GENERATION, self._endpoint.host, self._endpoint.port, 0)
        connected_at, warned = time.monotonic(), False
        while not self._closing.is_set():
            try:
                with subscribe(supervisor, self._endpoint.token, self._name) as connection:
                    self._listen(connection)
                    connected_at, warned = time.monotonic(), False
            except WireError as error:
                if not warned and time.monotonic() - connected_at > UNREACHABLE_AFTER_S:
                    warned = True
                    self._on_trouble(
                        f"no supervisor at {supervisor.host}:{supervisor.port}: this node is not monitored ({error})"
                    )
            self._closing.wait(1.0)

    def _listen(self, connection: Connection) -> None:
        connection.send(json.dumps({"id": "join", "op": "join", "agent": asdict(self._agent)}).encode())
        while not self._closing.is_set():
            frame = connection.recv(0.5)
            message = {} if frame is None else json.loads(frame)
            if "told" in message and (key := (int(message["told"]), float(message["wall"]))) not in self._received:
                self._received.add(key)
                self._on_event(SupervisorEvent.parse(message))
