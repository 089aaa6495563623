"""Watches a job on several nodes: one supervisor connects to the agents of all nodes.

All nodes are given the address of the supervisor's node, as with torchrun's `--rdzv-endpoint`, and the same token, see
`run_token.shared_token`.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from lockstep.base import waits
from lockstep.base.transport.frames import Connection, HandshakeRefused, WireError
from lockstep.base.transport.run_token import TOKEN_VARIABLE, shared_token, token_path, with_tls
from lockstep.base.wait_state import WaitTimeout
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.supervisor.supervisor_client import SupervisorEvent, subscribe

DEFAULT_PORT = 29477
UNREACHABLE_AFTER_S = 60.0
"""After this long without a supervisor, a warning is printed."""
WATCH_GENERATION = 1
SAME_TOKEN = (
    f"Set {TOKEN_VARIABLE} to the same token on all nodes, or copy ~/.lockstep/{token_path().name} of one node to the "
    "others"
)


@dataclass(frozen=True, slots=True)
class SupervisorEndpoint:
    """The address at which all nodes find the supervisor, and the token."""

    host: str
    port: int
    token: str

    @staticmethod
    def read(text: str, tls: bool = False) -> "SupervisorEndpoint":
        """Parses `HOST:PORT` or `HOST`, and finds the token.

        Args:
            tls: whether the connections between the nodes use TLS.

        Raises:
            ValueError: the host is unknown, the port is invalid, or the token can be guessed.
            PermissionError: other users can read the file with the token.
        """
        host, _, port = text.rpartition(":") if ":" in text else (text, "", str(DEFAULT_PORT))
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"--supervisor {text}: expected HOST:PORT")
        try:
            address = socket.gethostbyname(host)
        except OSError as error:
            raise ValueError(f"--supervisor {text}: no host {host} ({error})") from error
        token = shared_token()
        return SupervisorEndpoint(address, int(port), with_tls(token) if tls else token)

    @property
    def run(self) -> str:
        """The name by which nodes ask for the supervisor. It says nothing about the token."""
        return f"watch-port-{self.port}"

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

    def close(self, timeout_s: float = 7.0, failed: bool = False) -> None:
        """Disconnects. `failed` has no effect: the supervisor, on another node, still judges the others."""
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
                refused = isinstance(error, HandshakeRefused)
                if not warned and (refused or time.monotonic() - connected_at > UNREACHABLE_AFTER_S):
                    warned = True
                    remedy = f". {SAME_TOKEN}" if isinstance(error, HandshakeRefused) and error.code == "token" else ""
                    self._on_trouble(
                        f"no supervisor at {supervisor.host}:{supervisor.port}: this node is not monitored "
                        f"({error}){remedy}"
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
