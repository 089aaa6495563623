"""The process that a check starts on every host: it joins the head of the check, reports facts about its host, dials
other probes, and runs the ranks of the self-test.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from lockstep.base import waits
from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection, ConnectionClosed, HandshakeRefused, WireError
from lockstep.base.wait_state import WaitTimeout
from lockstep.doctor.check.facts.host_facts import MAX_TEXT, HostInterface
from lockstep.doctor.check.facts.network_facts import gather_interfaces, local_address_towards
from lockstep.doctor.check.probe import peer_connections, probe_protocol
from lockstep.doctor.check.probe.probe_protocol import (
    CHECK_RUN,
    MAX_MESSAGE_BYTES,
    AwaitRanksOrder,
    ProbeInfo,
    ProbeMessage,
    StartRanksOrder,
    own_protocol_version,
    receive_message,
    send_message,
)

_STORE_PORT_S = 60.0
_MAX_ERROR_TEXT = 2000
_MAX_OUTPUT = 64 << 20
"""Maximum number of bytes of a self-test's output that are read."""


class SelfTestProcess:
    """Runs the process of the self-test's ranks, at most one at a time.

    Its output goes to unnamed files, so that no file remains however this process ends. The ranks end when their
    standard input is closed, which this process holds open.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def start(self, order: StartRanksOrder) -> dict[str, Any]:
        """Starts the ranks. Returns the `port` of the store if this host serves it; -1 if the ranks failed to start."""
        self.end()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        environment = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
        given = {str(name): value for name, value in order.environment.items()}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lockstep.doctor.check.probe.selftest"],
            env={"OMP_NUM_THREADS": "1", **environment, **given, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdin=subprocess.PIPE, stdout=self._output, stderr=self._errors, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(order.spec.json()).encode() + b"\n")
            self._process.stdin.flush()
        return {"port": self._port() if order.spec.serve else 0}

    def results(self, order: AwaitRanksOrder) -> dict[str, Any]:
        """Waits until all ranks have ended, or ends them at the time limit, and returns the results.

        `lines` are the objects that the ranks printed, `ended` is the exit code, `errors` the end of standard error.
        """
        code: int | None = None
        if self._process is not None:
            with contextlib.suppress(WaitTimeout):
                code = waits.process(
                    self._process,
                    waits_for="self-test",
                    why="its results",
                    timeout_s=order.bound_s,
                    notice_after_s=None,
                )
        answer = {"lines": self._lines(), "ended": code, "errors": _read_tail(self._errors)}
        self.end()
        return answer

    def end(self) -> None:
        """Kills the remaining ranks. Idempotent."""
        process, self._process = self._process, None
        files, self._output, self._errors = (self._output, self._errors), None, None
        if process is not None:
            self._kill(process)
        for file in files:
            if file is not None:
                file.close()

    def _kill(self, process: "subprocess.Popen[bytes]") -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        with contextlib.suppress(WaitTimeout):
            waits.process(process, waits_for="self-test", why="killed", timeout_s=5.0, notice_after_s=None)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _port(self) -> int:
        def reported_port() -> int | None:
            for line in self._lines():
                if "port" in line:
                    return int(line["port"])
            return -1 if self._process is None or self._process.poll() is not None else None

        try:
            return waits.poll(
                reported_port, kind="rendezvous", waits_for="self-test", why="the port of its store",
                timeout_s=_STORE_PORT_S,
                notice_after_s=None,
            )  # fmt: skip
        except WaitTimeout:
            return -1

    def _lines(self) -> list[dict[str, Any]]:
        found = []
        for raw in _read_all(self._output).splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(raw)
                if isinstance(line, dict):
                    found.append(line)
        return found


def _read_all(file: IO[bytes] | None) -> bytes:
    """Reads the file without moving the position at which the process writes, because both share it."""
    return b"" if file is None else os.pread(file.fileno(), _MAX_OUTPUT, 0)


def _read_tail(file: IO[bytes] | None) -> str:
    return _read_all(file)[-_MAX_ERROR_TEXT:].decode(errors="replace")


JOIN_TIMEOUT_S = 30.0
"""A head that does not answer for this long is unreachable."""
TRY_S = 3.0
"""Time limit of one attempt: a lost SYN is repeated after 1 s and 3 s (RFC 6298)."""
IDLE_S = 3600.0
"""A probe that gets no order for this long ends. It notices within seconds if it loses the head's host."""

FactsGatherer = Callable[[Mapping[str, Any]], ProbeMessage]
"""Gathers the facts about this host that an order of the head asks for, as plain data."""
ShowText = Callable[[str], None]
_ORDER_ERRORS = OSError, ValueError, LookupError, TypeError, ArithmeticError, AssertionError, RuntimeError
"""Errors that a probe reports to the head when it cannot carry out an order; the probe continues."""


def _show_nothing(text: str) -> None:
    """Ignores the text: the default for a probe that a program started."""


class ProbeNotJoined(ConnectionError):
    """The head cannot be reached from this host, or refuses the probe."""


class ProbeDismissed(ConnectionError):
    """The head has dismissed this probe."""


def join_head(
    host: str, port: int, token: str, name: str, bound_s: float = JOIN_TIMEOUT_S, show: ShowText = _show_nothing
) -> Connection:
    """Connects to the head; retries while the head does not listen yet.

    Raises:
        ProbeNotJoined: the head cannot be reached or refuses this probe. The text says what to check.
    """
    until = time.monotonic() + bound_s
    reason = ""
    while True:
        try:
            left = max(0.2, until - time.monotonic())
            return auth_handshake.connect(
                host, port, token=token, run=CHECK_RUN, generation=0, name=name, timeout_s=min(TRY_S, left),
                max_frame=MAX_MESSAGE_BYTES,
            )  # fmt: skip
        except HandshakeRefused as error:
            raise ProbeNotJoined(f"{host}:{port} refuses this probe: {error.why[:MAX_TEXT]}") from error
        except ConnectionClosed as error:
            if time.monotonic() >= until:
                raise ProbeNotJoined(
                    f"{host}:{port}, the address given for the head, cannot be reached from {name} "
                    f"({local_address_towards(host) or 'no route'}): {error.why}. Check that this host has a route to "
                    "the address, and that no firewall blocks it"
                ) from error
            if error.why != reason:
                reason = error.why
                left = max(0.0, until - time.monotonic())
                show(f"{host}:{port} cannot be reached ({reason}); trying for {left:.0f} s more")
        waits.sleep(0.2, "the head does not listen yet")


def host_interfaces() -> list[HostInterface]:
    """Interfaces of this host."""
    return gather_interfaces(Path("/sys"))


def resolve_host(name: str, bound_s: float = 2.0) -> tuple[str, ...]:
    """The addresses of a host name; empty if it does not resolve in time."""
    found: list[str] = []

    def resolve() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(name, None)))

    resolver = threading.Thread(target=resolve, name="resolve", daemon=True)
    resolver.start()
    with contextlib.suppress(WaitTimeout):
        waits.join(resolver, waits_for=name, why="its addresses", timeout_s=bound_s, notice_after_s=None)
    return tuple(found)


def serve_probe(
    host: str, port: int, token: str, name: str, address: str | None = None, gather_facts: FactsGatherer | None = None,
    bound_s: float = JOIN_TIMEOUT_S, show: ShowText = _show_nothing,
) -> None:  # fmt: skip
    """Joins the head and carries out its orders until the head dismisses this probe or the connection is lost.

    Args:
        host, port: address of the head, as given to this probe.
        address: address at which other hosts reach this one; by default the one on the route to the head.
        gather_facts: carries out the head's orders to gather facts.
        bound_s: how long to try to reach the head.
        show: shows a line to the person who started the probe.

    Raises:
        ProbeNotJoined: the head cannot be reached.
        ProbeDismissed: the head refused this probe.
        OSError: this host does not have `address`.
    """
    if address is not None:
        address = _require_own_address(address)
    with join_head(host, port, token, name, bound_s, show) as head:
        HostProbe(head, host, token, name, address, gather_facts, show).serve()


class HostProbe:
    """Carries out the orders of one head."""

    def __init__(
        self, head: Connection, given_address: str, token: str, name: str, address: str | None,
        gather_facts: FactsGatherer | None,
        show: ShowText = _show_nothing,
    ) -> None:  # fmt: skip
        self._head, self._given_address, self._token, self._name = head, given_address, token, name
        self._address = address or local_address_towards(head_address(head) or given_address)
        self._facts_gatherer, self._show = gather_facts, show
        self._peer_listener: peer_connections.PeerListener | None = None
        self._ranks = SelfTestProcess()

    def serve(self) -> None:
        """Carries out orders until the head is done or the connection is lost. Raises ProbeDismissed."""
        handlers: dict[str, Callable[[ProbeMessage], ProbeMessage]] = {
            "card": self._report_host, "reach": self._dial_peers, "rate": self._measure_rate,
            "ranks": self._control_ranks, "look": self._gather_facts,
        }  # fmt: skip
        try:
            send_message(self._head, asdict(own_protocol_version()))
            self._show(f"joined the check at {self._given_address} as {self._name}; this probe ends with the check")
            while (order := receive_message(self._head, IDLE_S)) is not None:
                handler = handlers.get(str(order.get("do")))
                if handler is None:
                    self._end(order)
                    return
                send_message(self._head, _carry_out(handler, order))
            self._show(f"no order from the head for {IDLE_S:.0f} s: this probe ends")
        except WireError as error:
            self._show(f"lost the connection to the check, so this probe ends: {error.why[:MAX_TEXT]}")
        finally:
            self._ranks.end()
            if self._peer_listener is not None:
                self._peer_listener.close()

    def _end(self, order: ProbeMessage) -> None:
        why = str(order.get("why") or "")[:MAX_TEXT]
        if why:
            raise ProbeDismissed(f"the head refused this probe: {why}")
        self._show("the check of this host is complete; the report is where the check was started")

    def _report_host(self, order: ProbeMessage) -> ProbeMessage:
        request = probe_protocol.parse_card_order(order)
        if self._peer_listener is None:
            self._peer_listener = peer_connections.PeerListener(
                self._token, self._name, self._address, request.ports, request.kernels
            )
        hostname = socket.gethostname()
        return asdict(
            ProbeInfo(
                self._name, hostname, self._address, dialled=self._given_address, interfaces=tuple(host_interfaces()),
                resolves_to=resolve_host(hostname), ports=self._peer_listener.ports, taken=self._peer_listener.taken,
            )
        )  # fmt: skip

    def _dial_peers(self, order: ProbeMessage) -> ProbeMessage:
        request = probe_protocol.parse_reach_order(order)
        names = [name for name, _, _ in request.hosts]
        targets = peer_connections.ports_to_dial_on(request.hosts, names.index(self._name))
        found = peer_connections.dial_all(
            targets, self._token, self._name, request.dial_s, request.bound_s, request.lanes
        )
        return dict(peer_connections.dial_results_json(found, names))

    def _measure_rate(self, order: ProbeMessage) -> ProbeMessage:
        request = probe_protocol.parse_rate_order(order)
        return dict(
            peer_connections.measure_rate(
                peer_connections.PeerPort(*request.target), self._token, self._name, request.seconds, request.dial_s
            )
        )

    def _control_ranks(self, order: ProbeMessage) -> ProbeMessage:
        what = order.get("what")
        if what == "start":
            return self._ranks.start(probe_protocol.parse_start_ranks(order))
        if what == "results":
            return self._ranks.results(probe_protocol.parse_await_ranks(order))
        self._ranks.end()
        return {}

    def _gather_facts(self, order: ProbeMessage) -> ProbeMessage:
        return {} if self._facts_gatherer is None else self._facts_gatherer(order)


def _carry_out(handler: Callable[[ProbeMessage], ProbeMessage], order: ProbeMessage) -> ProbeMessage:
    """Returns the answer to an order, or the error that prevented it."""
    try:
        return handler(order)
    except _ORDER_ERRORS as error:
        return {"error": f"{type(error).__name__}: {error}"[:MAX_TEXT]}


def head_address(head: Connection) -> str:
    """The numeric address of the head on this connection."""
    return connection_addresses(head)[1]


def connection_addresses(connection: Connection) -> tuple[str, str]:
    """Numeric addresses of this end and of the other end; empty if the connection is lost."""
    with contextlib.suppress(OSError), contextlib.closing(socket.socket(fileno=os.dup(connection.fileno()))) as view:
        return str(view.getsockname()[0]), str(view.getpeername()[0])
    return "", ""


def _require_own_address(address: str) -> str:
    """Converts an address to its numeric form. Raises OSError if this host does not have it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as trial:
        try:
            trial.bind((address, 0))
            return str(trial.getsockname()[0])
        except OSError as error:
            has = ", ".join(f"{own} ({each.name})" for each in host_interfaces() for own in each.plain)
            raise OSError(error.errno, f"this host has no address {address}: it has {has}") from error
