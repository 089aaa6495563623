"""The head of a check: it starts a probe on every host, waits for them to join, and reports within seconds which hosts
did not.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self, TypeVar

from lockstep.base import waits
from lockstep.base.transport.auth_handshake import Listener
from lockstep.base.transport.frames import Connection, WireError
from lockstep.base.wait_state import WaitTimeout
from lockstep.doctor.check.facts.host_facts import parser_of
from lockstep.doctor.check.probe import peer_connections, probe_protocol
from lockstep.doctor.check.probe.host_probe import connection_addresses, resolve_host
from lockstep.doctor.check.probe.probe_protocol import (
    CHECK_RUN,
    MAX_MESSAGE_BYTES,
    TOKEN_VARIABLE,
    ProbeInfo,
    ProbeLauncher,
    ProbeMessage,
    ProtocolVersion,
    own_protocol_version,
    receive_message,
    request_all,
    send_message,
)


def join_command(head: str, port: int, name: str) -> str:
    """The command that starts a probe on a host. The probe reads the token from its environment or a prompt."""
    where = f"[{head}]:{port}" if ":" in head else f"{head}:{port}"
    return f"lockstep check --join {where} --name {name}"


class ManualLauncher:
    """Prints the commands with which the user starts the probes.

    Args:
        show: prints a line for the user.
        show_token: whether to print the token, which is not necessary if the user has set it in the environment.
    """

    def __init__(self, hosts: Sequence[str], show: Callable[[str], None], show_token: bool) -> None:
        self._hosts, self._show, self._show_token = tuple(hosts), show, show_token

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._hosts

    @property
    def addresses(self) -> Mapping[str, str]:
        return {}

    def start(self, head: str, port: int, token: str) -> None:
        for name in self._hosts:
            self._show(f"on {name}, run: {join_command(head, port, name)}")
        if self._hosts and self._show_token:
            self._show(f"each command prompts for this token (or reads it from {TOKEN_VARIABLE}): {token}")

    def failed(self) -> Mapping[str, str]:
        return {}

    def stop(self) -> None:
        return None


class CombinedLauncher:
    """Starts the probes of several launchers."""

    def __init__(self, launchers: Sequence[ProbeLauncher]) -> None:
        self.parts = tuple(launchers)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(host for each in self.parts for host in each.hosts)

    @property
    def addresses(self) -> Mapping[str, str]:
        return {host: address for each in self.parts for host, address in each.addresses.items()}

    def start(self, head: str, port: int, token: str) -> None:
        for each in self.parts:
            each.start(head, port, token)

    def failed(self) -> Mapping[str, str]:
        return {host: why for each in self.parts for host, why in each.failed().items()}

    def stop(self) -> None:
        for each in self.parts:
            each.stop()


T = TypeVar("T")

NAMED_HOSTS_S = 5.0
"""Interval at which missing hosts are reported."""
HOST_LOOKUP_S = 1.5
"""Delay before missing hosts are looked up, which takes up to 3.4 s: 2 s for the name, 0.7 s for each of two ports."""
GREETING_S = 3.0
PROBE_INFO_S = 6.0
DIAL_BACK_S = 2.0
_parse_protocol_version = parser_of(ProtocolVersion)


@dataclass(frozen=True, slots=True)
class MissingHost:
    """A host whose probe has not joined."""

    name: str
    head_address: str
    """Address of the head that the host's probe was given."""
    failed: str = ""
    """Why the probe failed, according to the launcher; empty if it did not."""
    resolves_to: tuple[str, ...] = ()
    response: str = ""
    """How the host's address responds: `answers`, `silent`, or an error; empty without an address."""
    looked_up: bool = True
    """Whether addresses and response have been looked up."""


@dataclass(frozen=True, slots=True)
class ProbeRendezvous:
    """Which hosts joined, which are missing, and which of them the head can reach."""

    head: str
    """Address of the head that all probes were given."""
    port: int
    joined: dict[str, ProbeInfo]
    missing: tuple[MissingHost, ...]
    dial_back_errors: dict[str, str]
    """By host, why the head could not connect to its probe; empty if it could."""
    lost: dict[str, str]
    """Hosts that joined and then did not answer, with the reason."""
    duplicates: tuple[str, ...]
    """Names under which several probes joined; only the first one was accepted."""
    unexpected: tuple[str, ...]
    """Names of probes that this check did not expect."""
    took_s: float
    other_versions: Mapping[str, str] = field(default_factory=dict)
    """By host, why its probe was refused: the versions of the probe and the head."""


class CheckHead:
    """Listens for probes on one address, and sends them orders.

    The port is bound before it is announced, so that no other process can take it in between.

    Raises:
        OSError: this host does not have `address`, or no port is free.
    """

    def __init__(self, token: str, address: str, port: int = 0) -> None:
        self._listener = Listener(
            token, CHECK_RUN, 0, "head", address, (port, port), max_frame=MAX_MESSAGE_BYTES, handshake_s=5.0
        )
        self.address, self.port, self.token = self._listener.host, self._listener.port, token
        self.members: dict[str, Connection] = {}
        self._came_from: dict[str, str] = {}
        self._joining: list[tuple[Connection, float]] = []
        self._other_versions: dict[str, str] = {}
        self._duplicates: list[str] = []
        self._unexpected: list[str] = []

    def gather(
        self,
        launcher: ProbeLauncher,
        bound_s: float = NAMED_HOSTS_S,
        ports: Sequence[int] = (),
        kernels: int = 3,
        report: Callable[[Sequence[MissingHost]], None] | None = None,
        given: str | None = None,
    ) -> ProbeRendezvous:
        """Starts the probes, and waits until all have joined or the time limit is reached.

        Args:
            bound_s: time limit for all probes to join.
            ports: ports of the run, which every probe binds.
            kernels: number of ports from the kernel's range that every probe also binds.
            report: called with the missing hosts after `NAMED_HOSTS_S`, and again after each further `NAMED_HOSTS_S`.
            given: address of the head that the probes are given, if it differs from the listening address.
        """
        began = time.monotonic()
        given = given or self.address
        launcher.start(given, self.port, self.token)
        expected = list(dict.fromkeys(launcher.hosts))
        search: MissingHostSearch | None = None
        reported = began
        while (now := time.monotonic()) - began < bound_s:
            absent = self._missing_names(expected)
            if set(absent) <= set(launcher.failed()):
                break
            self._accept(0.1, expected)
            if search is None and now - began >= HOST_LOOKUP_S:
                search = MissingHostSearch(absent, f"{given}:{self.port}", launcher.addresses)
            if report is not None and search is not None and now - reported >= NAMED_HOSTS_S:
                reported = now
                report(search.found(self._missing_names(expected), launcher.failed()))
        named_s = time.monotonic() - began
        absent = self._missing_names(expected)
        search = search or MissingHostSearch(absent, f"{given}:{self.port}", launcher.addresses)
        search.await_all()
        missing = search.found(absent, launcher.failed())
        joined, lost = self._request_info(ports, kernels)
        return ProbeRendezvous(
            given, self.port, joined, missing, self._dial_back(joined), lost, tuple(self._duplicates),
            tuple(self._unexpected), named_s, dict(self._other_versions),
        )  # fmt: skip

    def ask(
        self,
        orders: Mapping[str, Mapping[str, object]],
        bound_s: float,
        why: str,
        read: Callable[[str, ProbeMessage], T],
    ) -> tuple[dict[str, T], dict[str, str]]:
        """Sends orders and returns the answers, and the reasons for missing answers.

        A probe that does not answer is dismissed.
        """
        answered, lost = request_all(self.members, orders, bound_s, why, read)
        for name in lost:
            _dismiss(self.members.pop(name), lost[name])
        return answered, lost

    def close(self) -> None:
        """Dismisses the probes."""
        for connection in [*self.members.values(), *(connection for connection, _ in self._joining)]:
            _dismiss(connection)
        self.members.clear()
        self._joining.clear()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _missing_names(self, expected: Sequence[str]) -> list[str]:
        return [name for name in expected if name not in self.members and name not in self._other_versions]

    def _accept(self, seconds: float, expected: Sequence[str]) -> None:
        """Accepts connections of authenticated probes, and greets probes that have sent their version."""
        connection = self._listener.accept(seconds)
        if connection is not None:
            self._joining.append((connection, time.monotonic() + GREETING_S))
        greeted, self._joining = self._joining, []
        for connection, until in greeted:
            try:
                greeting = receive_message(connection, 0.0)
                if greeting is None and time.monotonic() < until:
                    self._joining.append((connection, until))
                    continue
                theirs = _parse_protocol_version(greeting or {})
            except WireError:
                continue  # disconnected; it is reported as missing
            except ValueError:
                theirs = ProtocolVersion(0, "unknown")
            self._greet(connection, theirs, expected)

    def _greet(self, connection: Connection, theirs: ProtocolVersion, expected: Sequence[str]) -> None:
        """Makes an expected probe of the same protocol version a member; refuses others."""
        name, why = connection.peer.name, ""
        if name not in expected:
            self._unexpected.append(name)
            why = f"this check does not expect host {name}"
        elif name in self.members:
            self._duplicates.append(name)
            why = f"another probe of {name} has already joined"
        elif theirs.protocol != own_protocol_version().protocol:
            self._other_versions[name] = f"its probe runs {theirs}, the head runs {own_protocol_version()}"
            why = f"the head runs {own_protocol_version()}, this probe runs {theirs}"
        if why:
            _dismiss(connection, why)
            return
        self._other_versions.pop(name, None)
        self.members[name] = connection
        self._came_from[name] = connection_addresses(connection)[1]

    def _request_info(self, ports: Sequence[int], kernels: int) -> tuple[dict[str, ProbeInfo], dict[str, str]]:
        order = {"do": "card", "ports": list(ports), "kernels": kernels}
        probes, lost = self.ask(
            dict.fromkeys(self.members, order),
            PROBE_INFO_S,
            "information about each host",
            probe_protocol.read_probe_info,
        )
        return {name: replace(probes[name], came_from=self._came_from[name]) for name in sorted(probes)}, lost

    def _dial_back(self, joined: Mapping[str, ProbeInfo]) -> dict[str, str]:
        """Tries to connect to each probe; returns why that failed, by host."""
        targets = []
        for name, info in joined.items():
            label, port = next(iter(info.ports.items()), ("", 0))
            if port:
                targets.append(peer_connections.PeerPort(name, info.address, port, label))
        found = (
            peer_connections.dial_all(targets, self.token, "head", DIAL_BACK_S, 2 * DIAL_BACK_S, 64) if targets else []
        )
        return {one.peer: one.why for one in found}


class MissingHostSearch:
    """Looks up addresses of missing hosts and whether they respond, in parallel and in the background.

    Args:
        given: address of the head that their probes were given.
        known: addresses of hosts whose names may not resolve.
    """

    def __init__(self, absent: Sequence[str], given: str, known: Mapping[str, str]) -> None:
        self._given, self._known = given, known
        self._found: dict[str, MissingHost] = {}
        self._threads = [threading.Thread(target=self._look_up, args=(name,), daemon=True) for name in absent]
        for thread in self._threads:
            thread.start()

    def await_all(self) -> None:
        """Waits until all lookups are done, within a time limit."""
        for thread in self._threads:
            with contextlib.suppress(WaitTimeout, WireError):
                waits.join(
                    thread, waits_for="a missing host", why="whether it responds", timeout_s=4.0, notice_after_s=None
                )

    def found(self, absent: Sequence[str], failed: Mapping[str, str]) -> tuple[MissingHost, ...]:
        """The results so far.

        Args:
            failed: by host, why its probe failed, according to the launcher.
        """
        known = dict(self._found)
        return tuple(
            replace(known.get(name, MissingHost(name, self._given, looked_up=False)), failed=failed.get(name, ""))
            for name in absent
        )

    def _look_up(self, name: str) -> None:
        addresses = (self._known[name],) if name in self._known else resolve_host(name, 2.0)
        response = peer_connections.host_responds(addresses[0], bound_s=0.7) if addresses else ""
        self._found[name] = MissingHost(name, self._given, "", addresses, response)


def _dismiss(connection: Connection, why: str = "") -> None:
    with connection, contextlib.suppress(WireError):
        send_message(connection, {"do": "leave", "why": why}, timeout_s=0.5)
