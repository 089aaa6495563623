"""Protocol between the head of a check and the probes on the hosts: JSON objects, one per frame of an authenticated
connection.

A probe first sends its `ProtocolVersion`, which has the same form in every version, and then answers orders. Both sides
validate what they receive. The head drops a probe that sends an invalid message; the check continues without it.
"""

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import Field

from lockstep import __version__
from lockstep.base import waits
from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.base.transport.frames import Connection, WireError
from lockstep.base.wait_state import WaitTimeout
from lockstep.doctor.check.facts.host_facts import (
    MAX_TEXT,
    HostInterface,
    NonNegative,
    NumericAddress,
    PortNumber,
    PortText,
    ShortText,
    interface_with_address,
    parser_of,
)

TOKEN_VARIABLE = "LOCKSTEP_CHECK_TOKEN"
"""Variable from which a probe reads its token: command-line arguments are visible to every user of a host."""
CHECK_RUN = "check"
PROTOCOL_VERSION = 1
"""Incremented with every change of the messages that follow the greeting."""
MAX_MESSAGE_BYTES = 16 << 20
"""Maximum number of bytes of a message: a table of a thousand hosts has some hundred kilobytes."""

ProbeMessage = dict[str, Any]
T = TypeVar("T")


class ProbeLauncher(Protocol):
    """Starts one probe per host."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of all hosts that get a probe."""

    @property
    def addresses(self) -> Mapping[str, str]:
        """Known addresses of hosts whose names may not resolve."""

    def start(self, head: str, port: int, token: str) -> None:
        """Starts `lockstep check --join HEAD:PORT --name HOST` on every host, with the token in its environment.

        Returns without waiting for the probes.
        """

    def failed(self) -> Mapping[str, str]:
        """By host, why its probe could not be started or has ended, with the probe's message if there is one."""

    def stop(self) -> None:
        """Ends the remaining probes. Idempotent."""


@dataclass(frozen=True, slots=True)
class ProbeInfo:
    """What a probe reports about its host when it joins."""

    name: ShortText
    """Name of the host according to the launcher or the person who started the probe."""
    hostname: ShortText
    address: NumericAddress
    """Address at which other hosts reach this one: that of its connection with the head, or a given one."""
    came_from: ShortText = ""
    """This host's address as the head sees it; it differs from `address` if addresses are translated on the way."""
    dialled: ShortText = ""
    """The address of the head that the probe was given."""
    interfaces: tuple[HostInterface, ...] = ()
    resolves_to: tuple[ShortText, ...] = ()
    """Addresses to which the host's own name resolves on that host."""
    ports: Mapping[ShortText, PortNumber] = field(default_factory=dict)
    """Ports on which it listens for peers, by label: `29500`, or `kernel-0`, .. for ports of the kernel's range."""
    taken: Mapping[PortText, str] = field(default_factory=dict)
    """By requested port, why the probe could not bind it."""

    @property
    def interface(self) -> str:
        """Name of the interface that has `address`; empty if none has it."""
        return interface_with_address(self.interfaces, self.address)


@dataclass(frozen=True, slots=True)
class ProtocolVersion:
    """The first message of a probe."""

    protocol: int
    lockstep: str
    """Version of the package."""

    def __str__(self) -> str:
        return f"lockstep {self.lockstep[:40]} (protocol {str(self.protocol)[:20]})"


def own_protocol_version() -> ProtocolVersion:
    """The protocol version of this process."""
    return ProtocolVersion(PROTOCOL_VERSION, __version__)


def new_token() -> str:
    """A random token, short enough to be typed."""
    return secrets.token_hex(16)


def send_message(connection: Connection, message: Mapping[str, Any], timeout_s: float = 5.0) -> None:
    """Sends a message. Raises WireError."""
    connection.send(json.dumps(message).encode(), timeout_s=timeout_s)


def receive_message(connection: Connection, timeout_s: float) -> ProbeMessage | None:
    """The next message; None if none arrives in time.

    Raises:
        WireError: the connection is lost, or the message is invalid.
    """
    frame = connection.recv(timeout_s)
    if frame is None:
        return None
    try:
        message = parse_json(frame, connection.peer.name)
    except MalformedJson:
        message = None
    if isinstance(message, dict):
        return message
    connection.close()
    raise WireError(connection.peer.name, "it sent an invalid message")


def request_all(
    connections: Mapping[str, Connection],
    orders: Mapping[str, Mapping[str, Any]],
    bound_s: float,
    why: str,
    read: Callable[[str, ProbeMessage], T],
) -> tuple[dict[str, T], dict[str, str]]:
    """Sends an order on each connection and waits for all answers in parallel.

    Args:
        read: parses the answer of a host, or raises ValueError.

    Returns:
        The answers, and the reasons for missing or invalid answers, by host.
    """
    answers: dict[str, T] = {}
    lost: dict[str, str] = {}
    encoded: dict[int, bytes] = {}
    for name, order in orders.items():
        try:
            data = encoded.setdefault(id(order), b"") or json.dumps(order).encode()
            encoded[id(order)] = data
            connections[name].send(data, timeout_s=5.0)
        except WireError as error:
            lost[name] = error.why

    def all_answered() -> bool | None:
        for name in [name for name in orders if name not in answers and name not in lost]:
            try:
                answer = receive_message(connections[name], 0.0)
                if answer is not None:
                    answers[name] = _parse_answer(name, answer, read)
            except WireError as error:
                lost[name] = error.why
            except ValueError as error:
                lost[name] = str(error)
        return True if len(answers) + len(lost) == len(orders) else None

    try:
        waits.poll(
            all_answered, kind="probe", waits_for=f"{len(orders)} probes", why=why, every_s=0.005, timeout_s=bound_s,
            notice_after_s=None,
        )  # fmt: skip
    except WaitTimeout:
        lost |= {name: f"no answer within {bound_s:g} s" for name in orders if name not in answers | lost}
    return answers, lost


def _parse_answer(name: str, answer: ProbeMessage, read: Callable[[str, ProbeMessage], T]) -> T:
    error_text = answer.get("error")
    if isinstance(error_text, str):
        raise ValueError(f"it failed: {error_text[:MAX_TEXT]}")
    try:
        return read(name, answer)
    except ValueError as error:
        raise ValueError(f"its answer is invalid: {error}") from None


@dataclass(frozen=True, slots=True)
class DialResult:
    """The result of dialling one port."""

    peer: str
    label: str
    port: int
    rtt_ms: float = 0.0
    """Shortest round trip of some small frames; 0 if the port was not reached."""
    why: str = ""
    """Why the port was not reached; empty if it was."""
    kind: str = ""
    """`refused`, `silent`, `no_route`, `stranger` (another program listens there) or `broke`; empty if reached."""


@dataclass(frozen=True, slots=True)
class ReachAnswer:
    """Answer to `reach`: which peers a host reaches."""

    ms: list[NonNegative]
    """Round trip to each host of the table; 0 if not reached."""
    failed: list[DialResult]


@dataclass(frozen=True, slots=True)
class RateAnswer:
    """Answer to `rate`: bandwidth to one peer."""

    mb_per_s: NonNegative | None = None
    why: str = ""
    """Why there is no result; empty if there is one."""


@dataclass(frozen=True, slots=True)
class StartRanksAnswer:
    """Answer to `ranks`, `start`."""

    port: Annotated[int, Field(ge=-1, lt=1 << 16)] = 0
    """Port of the store if the host serves it; -1 if it failed to start."""


@dataclass(frozen=True, slots=True)
class SelfTestLine:
    """A line of a self-test rank: its progress, its error, or a measurement."""

    rank: int = -1
    at: str | None = None
    failed: str | None = None
    communicator: str = ""
    operation: str = ""
    ok: bool = False
    ms: NonNegative = 0.0
    mb_per_s: NonNegative = 0.0
    pair: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class AwaitRanksAnswer:
    """Answer to `ranks`, `results`: the lines of all ranks of a host."""

    lines: list[SelfTestLine] = field(default_factory=list)
    ended: int | None = None
    errors: str = ""

    @property
    def last(self) -> str:
        """The last line of standard error."""
        return next(reversed(self.errors.strip().splitlines()), "")[:MAX_TEXT]


_parse_probe_info, _parse_reach_answer, _parse_rate_answer, _parse_start_ranks_answer, _parse_await_ranks_answer = (
    parser_of(ProbeInfo), parser_of(ReachAnswer), parser_of(RateAnswer), parser_of(StartRanksAnswer),
    parser_of(AwaitRanksAnswer),
)  # fmt: skip


def read_probe_info(name: str, answer: ProbeMessage) -> ProbeInfo:
    """Parses the answer to `card`."""
    return replace(_parse_probe_info(answer), name=name)


def reach_answer_reader(hosts: Sequence[str]) -> Callable[[str, ProbeMessage], ReachAnswer]:
    """Returns a parser of answers to `reach` for a table of these hosts."""
    known = set(hosts)

    def read(name: str, answer: ProbeMessage) -> ReachAnswer:
        found = _parse_reach_answer(answer)
        if len(found.ms) != len(hosts):
            raise ValueError(f"ms: {len(found.ms)} round trips for {len(hosts)} hosts")
        if strange := next((one.peer for one in found.failed if one.peer not in known), None):
            raise ValueError(f"failed: unknown host {strange[:80]}")
        return replace(found, failed=[replace(one, why=one.why[:MAX_TEXT]) for one in found.failed])

    return read


def read_rate_answer(name: str, answer: ProbeMessage) -> RateAnswer:
    """Parses the answer to `rate`."""
    return _parse_rate_answer(answer)


def read_start_ranks_answer(name: str, answer: ProbeMessage) -> StartRanksAnswer:
    """Parses the answer to `ranks`, `start`."""
    return _parse_start_ranks_answer(answer)


def await_ranks_answer_reader(
    ranks: Mapping[str, Collection[int]], world: int
) -> Callable[[str, ProbeMessage], AwaitRanksAnswer]:
    """Returns a parser of answers to `ranks`, `results`.

    Args:
        ranks: the ranks of each host, out of `world` ranks.
    """

    def read(name: str, answer: ProbeMessage) -> AwaitRanksAnswer:
        found = _parse_await_ranks_answer(answer)
        lines = [line for line in found.lines if line.rank >= 0]
        for line in lines:
            if line.rank not in ranks[name] or any(not 0 <= rank < world for rank in line.pair or ()):
                raise ValueError(f"lines: rank {line.rank} (with {line.pair}) does not belong to this host")
        return replace(found, lines=lines)

    return read


RankVariable = Literal[
    "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME",
]  # fmt: skip
"""Variables that a head may set for ranks. Others are refused, because some of NCCL's variables name libraries to load
and files to write."""
MAX_TEST_BYTES = 256 << 20
"""Maximum bytes of one collective."""
MAX_TEST_RANKS = 256
"""Maximum ranks on one host."""
MAX_ORDER_SECONDS = 600.0

OrderSeconds = Annotated[float, Field(ge=0, le=MAX_ORDER_SECONDS)]
ShortSeconds = Annotated[float, Field(ge=0, le=60)]


@dataclass(frozen=True, slots=True)
class CardOrder:
    """Order `card`: report the host's name and addresses, and bind ports."""

    ports: Annotated[list[PortNumber], Field(max_length=4096)]
    kernels: Annotated[int, Field(ge=0, le=64)] = 3


@dataclass(frozen=True, slots=True)
class ReachOrder:
    """Order `reach`: dial peers, authenticate, and exchange some small frames."""

    hosts: list[tuple[ShortText, NumericAddress, Mapping[ShortText, PortNumber]]]
    dial_s: ShortSeconds
    bound_s: ShortSeconds
    lanes: Annotated[int, Field(gt=0, le=256)]


@dataclass(frozen=True, slots=True)
class RateOrder:
    """Order `rate`: measure the bandwidth to one peer on one connection."""

    target: tuple[ShortText, NumericAddress, PortNumber, ShortText]
    seconds: Annotated[float, Field(gt=0, le=10)]
    dial_s: ShortSeconds


@dataclass(frozen=True, slots=True)
class TaskCommunicator:
    """A communicator of the self-test, with its members as rank numbers."""

    name: ShortText
    backend: Literal["nccl", "gloo"]
    members: list[Annotated[int, Field(ge=0)]]
    operations: list[Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]]


@dataclass(frozen=True, slots=True)
class SelfTestTask:
    """The task of the self-test's ranks on one host; see `selftest`."""

    world: Annotated[int, Field(gt=0)]
    ranks: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_TEST_RANKS)]
    host: NumericAddress
    port: Annotated[int, Field(ge=0, lt=1 << 16)]
    address: NumericAddress
    device: Literal["cpu", "cuda"]
    bytes: Annotated[int, Field(gt=0, le=MAX_TEST_BYTES)]
    bound_s: OrderSeconds
    communicators: list[TaskCommunicator]
    serve: bool = False

    def json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StartRanksOrder:
    """Order `ranks`, `start`."""

    spec: SelfTestTask
    environment: Mapping[RankVariable, ShortText]


@dataclass(frozen=True, slots=True)
class AwaitRanksOrder:
    """Order `ranks`, `results`."""

    bound_s: OrderSeconds


parse_card_order, parse_reach_order, parse_rate_order = (
    parser_of(CardOrder),
    parser_of(ReachOrder),
    parser_of(RateOrder),
)
parse_start_ranks, parse_await_ranks = parser_of(StartRanksOrder), parser_of(AwaitRanksOrder)
