"""The small process that a check starts on every host: it joins the head, tells what it sees, and does five things for
it: reach peers, measure to one, start and end ranks of the self-test, look at its host, leave. It says aloud whether it
has joined, what it waits for, and why it ends: a person may have started it."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.doctor.check import orders, peers
from lockstep.doctor.check.facts import Interface
from lockstep.doctor.check.network import gather_interfaces, own_address_towards
from lockstep.doctor.check.protocol import MAX_ORDER, RUN, Card, Message, hear, own, tell
from lockstep.doctor.check.ranks import Ranks
from lockstep.doctor.check.typed import WORDS
from lockstep.watch import waits, wire
from lockstep.watch.wire import Connection, ConnectionClosed, Refused, WireError

JOIN_S = 30.0
"""A head that does not answer for so long is not reached."""
TRY_S = 3.0
"""Of one try: a lost SYN is repeated after 1 s and 3 s (RFC 6298)."""
IDLE_S = 3600.0
"""A probe that hears nothing for so long leaves. (A head whose host is gone is noticed in seconds.)"""

Looks = Callable[[Mapping[str, Any]], Message]
"""What is looked at on the host itself when the head asks, as JSON."""
Say = Callable[[str], None]
_UNABLE = OSError, ValueError, LookupError, TypeError, ArithmeticError, AssertionError, RuntimeError
"""What an order may fail with; the head is told, and the probe goes on."""


def _silent(text: str) -> None:
    """For a probe that nobody looks at."""


class NotJoined(ConnectionError):
    """The head could not be reached from this host, or did not take the probe."""


class LetGo(ConnectionError):
    """The head has no use for this probe."""


def join(host: str, port: int, token: str, name: str, bound_s: float = JOIN_S, say: Say = _silent) -> Connection:
    """The connection with the head; one that does not listen yet is tried again.

    Raises:
        NotJoined: with the address that was given, the one of this host that was used, and what to look at.
    """
    until = time.monotonic() + bound_s
    told = ""
    while True:
        try:
            left = max(0.2, until - time.monotonic())
            return wire.connect(
                host, port, token=token, run=RUN, generation=0, name=name, timeout_s=min(TRY_S, left),
                max_frame=MAX_ORDER,
            )  # fmt: skip
        except Refused as error:
            raise NotJoined(f"{host}:{port} refuses this probe: {error.why[:WORDS]}") from error
        except ConnectionClosed as error:
            if time.monotonic() >= until:
                raise NotJoined(
                    f"{host}:{port}, the address that was given for the head, cannot be reached from {name} "
                    f"({own_address_towards(host) or 'no route'}): {error.why}. Check that the address is one that "
                    "this host can route to, and that no firewall is in between"
                ) from error
            if error.why != told:
                told = error.why
                left = max(0.0, until - time.monotonic())
                say(f"{host}:{port} cannot be reached ({told}); it is tried for {left:.0f} s more")
        waits.sleep(0.2, "the head does not listen yet")


def interfaces() -> list[Interface]:
    """Of this host."""
    return gather_interfaces(Path("/sys"))


def resolved(name: str, bound_s: float = 2.0) -> tuple[str, ...]:
    """The addresses of a name, none where it is not known in time."""
    found: list[str] = []

    def look() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(name, None)))

    looking = threading.Thread(target=look, name="resolve", daemon=True)
    looking.start()
    with contextlib.suppress(waits.WaitTimeout):
        waits.join(looking, whom=name, why="its addresses", timeout_s=bound_s, notice_after_s=None)
    return tuple(found)


def serve(
    host: str, port: int, token: str, name: str, address: str | None = None, look: Looks | None = None,
    bound_s: float = JOIN_S, say: Say = _silent,
) -> None:  # fmt: skip
    """Joins the head and does what it says, until it says to leave or is gone.

    Args:
        host, port: of the head, as they were given.
        address: by which others are to reach this host; the one of the route to the head when absent.
        bound_s: how long the head is tried.
        say: is given a line whenever there is something to know for whoever started this.

    Raises:
        NotJoined: the head could not be reached.
        LetGo: it has no use for this probe.
        OSError: this host does not have `address`.
    """
    if address is not None:
        address = _must_have(address)
    with join(host, port, token, name, bound_s, say) as head:
        Probe(head, host, token, name, address, look, say).serve()


class Probe:
    """One connection with the head."""

    def __init__(
        self, head: Connection, dialled: str, token: str, name: str, address: str | None, look: Looks | None,
        say: Say = _silent,
    ) -> None:  # fmt: skip
        self._head, self._dialled, self._token, self._name = head, dialled, token, name
        self._address = address or own_address_towards(head_address(head) or dialled)
        self._look, self._say = look, say
        self._answering: peers.Answering | None = None
        self._ranks = Ranks()

    def serve(self) -> None:
        """Returns when the head is done, or gone. Raises LetGo."""
        doing: dict[str, Callable[[Message], Message]] = {
            "card": self._card, "reach": self._reach, "rate": self._rate, "ranks": self._of_ranks,
            "look": self._looked,
        }  # fmt: skip
        try:
            tell(self._head, asdict(own()))
            self._say(
                f"joined the check of {self._dialled} as {self._name}; this waits for the others, and ends with it"
            )
            while (order := hear(self._head, IDLE_S)) is not None:
                act = doing.get(str(order.get("do")))
                if act is None:
                    self._leave(order)
                    return
                tell(self._head, _answer(act, order))
            self._say(f"the head has said nothing for {IDLE_S:.0f} s: this probe leaves")
        except WireError as error:
            self._say(f"the check has gone, and this probe with it: {error.why[:WORDS]}")
        finally:
            self._ranks.end()
            if self._answering is not None:
                self._answering.close()

    def _leave(self, order: Message) -> None:
        why = str(order.get("why") or "")[:WORDS]
        if why:
            raise LetGo(f"the head does not take this probe: {why}")
        self._say("the check has what it needs of this host; its report is on the head")

    def _card(self, order: Message) -> Message:
        asked = orders.ask_card(order)
        if self._answering is None:
            self._answering = peers.Answering(self._token, self._name, self._address, asked.ports, asked.kernels)
        hostname = socket.gethostname()
        return asdict(
            Card(
                self._name, hostname, self._address, dialled=self._dialled, interfaces=tuple(interfaces()),
                resolves_to=resolved(hostname), ports=self._answering.ports, taken=self._answering.taken,
            )
        )  # fmt: skip

    def _reach(self, order: Message) -> Message:
        asked = orders.reach(order)
        names = [name for name, _, _ in asked.hosts]
        targets = peers.targets_of(asked.hosts, names.index(self._name))
        found = peers.reach(targets, self._token, self._name, asked.dial_s, asked.bound_s, asked.lanes)
        return dict(peers.as_json(found, names))

    def _rate(self, order: Message) -> Message:
        asked = orders.rate(order)
        return dict(peers.rate(peers.Target(*asked.target), self._token, self._name, asked.seconds, asked.dial_s))

    def _of_ranks(self, order: Message) -> Message:
        what = order.get("what")
        if what == "start":
            return self._ranks.start(orders.start_ranks(order))
        if what == "results":
            return self._ranks.results(orders.await_ranks(order))
        self._ranks.end()
        return {}

    def _looked(self, order: Message) -> Message:
        return {} if self._look is None else self._look(order)


def _answer(act: Callable[[Message], Message], order: Message) -> Message:
    """What comes of an order, or why nothing does."""
    try:
        return act(order)
    except _UNABLE as error:
        return {"error": f"{type(error).__name__}: {error}"[:WORDS]}


def head_address(head: Connection) -> str:
    """Its numeric address, as this end is connected with it."""
    return ends(head)[1]


def ends(connection: Connection) -> tuple[str, str]:
    """Numeric addresses of this end and of the other; empty where the connection is gone."""
    with contextlib.suppress(OSError), contextlib.closing(socket.socket(fileno=os.dup(connection.fileno()))) as view:
        return str(view.getsockname()[0]), str(view.getpeername()[0])
    return "", ""


def _must_have(address: str) -> str:
    """The same as a number. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as trial:
        try:
            trial.bind((address, 0))
            return str(trial.getsockname()[0])
        except OSError as error:
            has = ", ".join(f"{own} ({each.name})" for each in interfaces() for own in each.plain)
            raise OSError(error.errno, f"this host has no address {address}: it has {has}") from error
