"""Connections between probes: a probe listens on its ports, dials its peers' ports, and measures round trip and
bandwidth.
"""

import contextlib
import errno
import socket
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.base import waits
from lockstep.base.transport import auth_handshake
from lockstep.base.transport.auth_handshake import Listener
from lockstep.base.transport.frames import Connection, HandshakeRefused, WireError
from lockstep.base.wait_state import WaitTimeout
from lockstep.doctor.check.facts.host_facts import MAX_TEXT
from lockstep.doctor.check.probe.probe_protocol import CHECK_RUN, DialResult
from lockstep.doctor.check.probe.round_robin import peers_in_order, ports_of_pair

PINGS = 3
KERNEL_PORT_PREFIX = "kernel-"
"""Prefix of the labels of ports in the range from which the kernel assigns ephemeral ports."""
CHUNK_BYTES = 1 << 20
"""Bytes of a frame in bandwidth measurements."""
_ANSWER_S = 30.0
_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_PORT_RANGE = 32768, 60999
_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class PeerPort:
    """A port of a peer."""

    peer: str
    address: str
    port: int
    label: str


class PeerListener:
    """Listens for the other probes of a check on several ports, and answers them in threads.

    The ports stay bound, so that no other process can take them during the check.

    Args:
        named: ports that the run will use.
        kernel_ports: number of further ports, spread over the kernel's range of ephemeral ports.
    """

    def __init__(self, token: str, name: str, address: str, named: Sequence[int], kernel_ports: int) -> None:
        self.ports: dict[str, int] = {}
        self.taken: dict[str, str] = {}
        self._token, self._name, self._address = token, name, address
        self._listeners: list[Listener] = []
        self._stop = threading.Event()
        for port in named:
            try:
                self._listen(str(port), port)
            except OSError as error:
                self.taken[str(port)] = error.strerror or str(error)
        for number in range(kernel_ports):
            self._listen_in_range(number, kernel_ports)

    def close(self) -> None:
        """Releases the ports. Idempotent."""
        self._stop.set()
        for listener in self._listeners:
            listener.close()

    def _listen(self, label: str, port: int) -> None:
        ports = (port, port)
        listener = Listener(
            self._token, CHECK_RUN, 0, self._name, self._address, ports, max_frame=4 * CHUNK_BYTES, handshake_s=5.0
        )
        self._listeners.append(listener)
        self.ports[label] = listener.port
        threading.Thread(target=self._accept, args=(listener,), name=f"port {listener.port}", daemon=True).start()

    def _listen_in_range(self, number: int, of: int) -> None:
        low, high = port_range()
        step = (high - low) // of
        first = low + number * step + zlib.crc32(self._name.encode()) % max(step, 1)
        for attempt in range(_ATTEMPTS):
            with contextlib.suppress(OSError):
                self._listen(f"{KERNEL_PORT_PREFIX}{number}", low + (first - low + attempt) % (high - low + 1))
                return
        self._listen(f"{KERNEL_PORT_PREFIX}{number}", 0)

    def _accept(self, listener: Listener) -> None:
        while not self._stop.is_set():
            try:
                connection = listener.accept(0.5)
            except (OSError, ValueError):
                return  # closed by `close`
            if connection is not None:
                threading.Thread(target=_answer_peer, args=(connection,), name="peer", daemon=True).start()


def port_range() -> tuple[int, int]:
    """The range from which this host's kernel assigns ephemeral ports."""
    try:
        low, high = (int(word) for word in _PORT_RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        return _DEFAULT_PORT_RANGE
    return low, high


def _answer_peer(connection: Connection) -> None:
    """Echoes small frames and counts the bytes of large ones; answers `end` with that count."""
    received = 0
    with connection, contextlib.suppress(WireError):
        while (frame := connection.recv(_ANSWER_S)) is not None:
            if frame == b"end":
                connection.send(str(received).encode(), timeout_s=5.0)
            elif len(frame) < 1024:
                connection.send(frame, timeout_s=5.0)
            else:
                received += len(frame)


def dial(target: PeerPort, token: str, name: str, dial_s: float) -> DialResult:
    """Connects, authenticates both sides, and exchanges some small frames."""
    try:
        with _connect(target, token, name, dial_s) as connection:
            best = min(_ping(connection, dial_s) for _ in range(PINGS))
    except (WireError, WaitTimeout, OSError) as error:
        kind, why = _dial_failure(error)
        return DialResult(target.peer, target.label, target.port, why=why, kind=kind)
    return DialResult(target.peer, target.label, target.port, rtt_ms=round(1e3 * best, 4))


def _connect(target: PeerPort, token: str, name: str, dial_s: float) -> Connection:
    return auth_handshake.connect(
        target.address, target.port, token=token, run=CHECK_RUN, generation=0, name=name, timeout_s=dial_s,
        max_frame=4 * CHUNK_BYTES,
    )  # fmt: skip


def _ping(connection: Connection, bound_s: float) -> float:
    began = time.monotonic()
    connection.send(b"ping", timeout_s=bound_s)
    if connection.recv(bound_s) is None:
        raise TimeoutError(f"no answer within {bound_s:g} s")
    return time.monotonic() - began


def _dial_failure(error: OSError) -> tuple[str, str]:
    why = (error.why if isinstance(error, WireError) else str(error))[:MAX_TEXT]
    if isinstance(error, HandshakeRefused):
        return "stranger", why
    lower = why.lower()
    if "refused" in lower:
        return "refused", why
    if "timed out" in lower or "no answer" in lower:
        return "silent", why
    if "no route" in lower or "unreachable" in lower:
        return "no_route", why
    return "broke", why


def dial_all(
    targets: Sequence[PeerPort], token: str, name: str, dial_s: float, bound_s: float, lanes: int
) -> list[DialResult]:
    """Dials all targets in order, `lanes` of them at once, so that a dial that hangs does not delay the others.

    Dials that hung are repeated in the remaining time. A dial without a result at the time limit counts as silent.
    """
    until = time.monotonic() + bound_s
    pool = ThreadPoolExecutor(lanes, thread_name_prefix="dial")
    try:
        found = _finished_dials([(t, pool.submit(dial, t, token, name, dial_s)) for t in targets], until)
        hung = [target for target, one in zip(targets, found, strict=True) if one.kind in ("silent", "broke")]
        left = until - time.monotonic()
        if hung and left > 0.2:
            repeat_s = min(dial_s, 0.8 * left / -(-len(hung) // lanes))
            repeated = _finished_dials([(t, pool.submit(dial, t, token, name, repeat_s)) for t in hung], until)
            succeeded = {(one.peer, one.label): one for one in repeated if not one.why}
            found = [succeeded.get((one.peer, one.label), one) for one in found]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return found


def _finished_dials(pending: Sequence[tuple[PeerPort, "Future[DialResult]"]], until: float) -> list[DialResult]:
    found = []
    for target, future in pending:
        left = max(0.0, until - time.monotonic())
        try:
            found.append(waits.future(future, waits_for=target.peer, why="dial", timeout_s=left, notice_after_s=None))
        except WaitTimeout:
            found.append(DialResult(target.peer, target.label, target.port, why="no answer in time", kind="silent"))
    return found


def measure_rate(target: PeerPort, token: str, name: str, seconds: float, dial_s: float) -> dict[str, object]:
    """Measures the megabytes (1e6 bytes) per second that the peer receives on one connection.

    Returns `mb_per_s`, or `why` the measurement failed.
    """
    payload = bytes(CHUNK_BYTES)
    try:
        with _connect(target, token, name, dial_s) as connection:
            _ping(connection, dial_s)
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                connection.send(payload, timeout_s=max(dial_s, seconds))
            connection.send(b"end", timeout_s=dial_s)
            bound_s = dial_s + seconds
            counted = connection.recv(bound_s)
            took = time.monotonic() - began
            received = int(bytes(counted or b"-1")[:20])
    except (WireError, OSError) as error:
        return {"why": _dial_failure(error)[1]}
    except ValueError:
        received = -1
    if received < 0:
        return {"why": "the peer did not report what it received"}
    return {"mb_per_s": round(received / took / 1e6, 1)}


def dial_results_json(found: Sequence[DialResult], names: Sequence[str]) -> dict[str, object]:
    """Converts results to the answer to the head: `ms`, the round trip to each of `names` (0: none), and `failed`."""
    best: dict[str, float] = {}
    for one in found:
        if not one.why:
            best[one.peer] = min(one.rtt_ms, best.get(one.peer, one.rtt_ms))
    return {"ms": [best.get(name, 0) for name in names], "failed": [asdict(one) for one in found if one.why]}


def ports_to_dial_on(hosts: Sequence[tuple[str, str, Mapping[str, int]]], number: int) -> list[PeerPort]:
    """The ports that a host dials, in the order of the round-robin schedule.

    Args:
        hosts: name, address, and ports by label, of all hosts.
        number: index of the dialling host.
    """
    found = []
    for other in peers_in_order(len(hosts), number):
        peer, address, ports = hosts[other]
        labels = sorted(ports, key=lambda label: (label.startswith(KERNEL_PORT_PREFIX), label))
        named = sum(not label.startswith(KERNEL_PORT_PREFIX) for label in labels)
        for k in ports_of_pair(number, other, len(hosts), named, len(labels) - named):
            found.append(PeerPort(peer, address, ports[labels[k]], labels[k]))
    return found


def host_responds(address: str, ports: Sequence[int] = (22, 1), bound_s: float = 1.0) -> str:
    """How a host without a probe responds: `answers` (it accepts or refuses connections), `silent`, or the error."""
    result = "silent"
    for port in ports:
        try:
            code = _connect_errno(address, port, bound_s)
        except (OSError, WaitTimeout) as error:
            result = "silent" if isinstance(error, TimeoutError) else error.strerror or str(error)
            continue
        if code in (0, errno.ECONNREFUSED):
            return "answers"
        if code in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            result = "no route to it"
    return result


def _connect_errno(address: str, port: int, bound_s: float) -> int:
    """The error code of a connection attempt; 0 if something listens on the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as trial:
        trial.setblocking(False)
        code = trial.connect_ex((address, port))
        if code != errno.EINPROGRESS:
            return code
        waits.writable(
            trial, waits_for=address, why="whether the host responds", timeout_s=bound_s, notice_after_s=None
        )
        return trial.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
