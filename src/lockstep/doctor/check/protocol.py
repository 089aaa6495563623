"""What a check's head and the probes on hosts say to each other: JSON objects, one per frame of an authenticated
connection (`lockstep.watch.wire`).

A probe begins with which protocol it speaks (`Speaks`, the same in every version) and then answers orders, of which
there are five. What comes from the other side is data until a function of this room has made something of known type
of it (`typed`): who says what is not understood is lost by name, and nobody else is."""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from lockstep import __version__
from lockstep.doctor.check.facts import Interface
from lockstep.doctor.check.interfaces import owner
from lockstep.doctor.check.typed import WORDS, Address, Digits, Port, Word
from lockstep.watch import waits
from lockstep.watch.wire import Connection, WireError

TOKEN_VARIABLE = "LOCKSTEP_CHECK_TOKEN"
"""Where a probe finds the token: never in its arguments, which every user of its host can read."""
RUN = "check"
PROTOCOL = 1
"""One more with every change of what is said after the greeting."""
MAX_ORDER = 16 << 20
"""Bytes of a message: a table of a thousand hosts has some hundred kilobytes."""

Message = dict[str, Any]
T = TypeVar("T")


class Launcher(Protocol):
    """Starts one probe per host, where the check itself is not."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of all hosts that are to have one."""

    @property
    def addresses(self) -> Mapping[str, str]:
        """Of hosts, where the launcher knows them and their names may lead nowhere."""

    def start(self, head: str, port: int, token: str) -> None:
        """Has every host start `lockstep check --join HEAD:PORT --name HOST`, with the token in its environment.
        Returns at once."""

    def failed(self) -> Mapping[str, str]:
        """By host, why its probe could not be started or has ended, in the probe's own last words where it has any."""

    def stop(self) -> None:
        """Ends what is left of them. Idempotent."""


@dataclass(frozen=True, slots=True)
class Card:
    """What a probe says of its host when it joins."""

    name: Word
    """As the launcher or the person who started it calls the host."""
    hostname: Word
    address: Address
    """Of its end of the connection with the head, or the one it was told to use: by this, others are to reach it."""
    came_from: Word = ""
    """Of the same end as the head sees it; another one where something between translates addresses."""
    dialled: Word = ""
    """The head's address as it was given to the probe."""
    interfaces: tuple[Interface, ...] = ()
    resolves_to: tuple[Word, ...] = ()
    """What its own name resolves to there."""
    ports: Mapping[Word, Port] = field(default_factory=dict)
    """On which it listens for its peers, by what was asked for: `29500`, or `kernel-0`, .. of the kernel's range."""
    taken: Mapping[Digits, str] = field(default_factory=dict)
    """Of the named ports, those that it could not have, and why."""

    @property
    def interface(self) -> str:
        """Name of the interface that has its address, empty where none has."""
        return owner(self.interfaces, self.address)


@dataclass(frozen=True, slots=True)
class Speaks:
    """What a probe says of itself before anything else."""

    protocol: int
    lockstep: str
    """The version of the package."""

    def __str__(self) -> str:
        return f"lockstep {self.lockstep[:40]} (protocol {str(self.protocol)[:20]})"


def own() -> Speaks:
    """Of this process."""
    return Speaks(PROTOCOL, __version__)


def new_token() -> str:
    """Some words' worth of randomness, short enough to be typed."""
    return secrets.token_hex(16)


def tell(connection: Connection, message: Mapping[str, Any], timeout_s: float = 5.0) -> None:
    """Raises WireError."""
    connection.send(json.dumps(message).encode(), timeout_s=timeout_s)


def hear(connection: Connection, timeout_s: float) -> Message | None:
    """The next message, None where there is none in time.

    Raises:
        WireError: the connection is gone, or what came is no message.
    """
    frame = connection.recv(timeout_s)
    if frame is None:
        return None
    try:
        message = json.loads(bytes(frame))
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict):
        return message
    connection.close()
    raise WireError(connection.peer.name, "it sent what is no message")


def ask_all(
    connections: Mapping[str, Connection],
    orders: Mapping[str, Mapping[str, Any]],
    bound_s: float,
    why: str,
    read: Callable[[str, Message], T],
) -> tuple[dict[str, T], dict[str, str]]:
    """Sends each its order and waits for all answers at once: those that came, and why others did not.

    Args:
        read: what an answer of that name is, or ValueError. An answer with `error` says why there is none.
    """
    answers: dict[str, T] = {}
    lost: dict[str, str] = {}
    written: dict[int, bytes] = {}
    for name, order in orders.items():
        try:
            data = written.setdefault(id(order), b"") or json.dumps(order).encode()
            written[id(order)] = data
            connections[name].send(data, timeout_s=5.0)
        except WireError as error:
            lost[name] = error.why

    def all_there() -> bool | None:
        for name in [name for name in orders if name not in answers and name not in lost]:
            try:
                answer = hear(connections[name], 0.0)
                if answer is not None:
                    answers[name] = _understood(name, answer, read)
            except WireError as error:
                lost[name] = error.why
            except ValueError as error:
                lost[name] = str(error)
        return True if len(answers) + len(lost) == len(orders) else None

    try:
        waits.poll(
            all_there, kind="probe", whom=f"{len(orders)} probes", why=why, every_s=0.005, timeout_s=bound_s,
            notice_after_s=None,
        )  # fmt: skip
    except waits.WaitTimeout:
        lost |= {name: f"no answer within {bound_s:g} s" for name in orders if name not in answers | lost}
    return answers, lost


def _understood(name: str, answer: Message, read: Callable[[str, Message], T]) -> T:
    unable = answer.get("error")
    if isinstance(unable, str):
        raise ValueError(f"it could not: {unable[:WORDS]}")
    try:
        return read(name, answer)
    except ValueError as error:
        raise ValueError(f"what it says is not understood: {error}") from None
