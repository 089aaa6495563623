"""Rendezvous: the head listens on one address, the probes of all hosts join it, and who did not is named in seconds."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter

from lockstep.doctor.check import peers
from lockstep.doctor.check.facts import Interface
from lockstep.doctor.check.probe import ends, resolved
from lockstep.doctor.check.protocol import MAX_ORDER, RUN, Card, Launcher, Message, ask_all
from lockstep.watch import waits
from lockstep.watch.wire import Connection, Listener, WireError

NAMED_S = 5.0
"""Who has not joined is named after so long."""
CARDS_S = 6.0
BACK_S = 2.0
_MEMBERS = {
    "name", "hostname", "address", "came_from", "dialled", "interfaces", "resolves_to", "ports", "taken",
}  # fmt: skip

_INTERFACES: TypeAdapter[tuple[Interface, ...]] = TypeAdapter(tuple[Interface, ...])


@dataclass(frozen=True, slots=True)
class Missing:
    """A host whose probe did not join."""

    name: str
    given: str
    """The head's address that it was given."""
    failed: str = ""
    """What the launcher knows of its probe."""
    resolves_to: tuple[str, ...] = ()
    there: str = ""
    """Whether a host answers at its address: `answers`, `silent`, or an error; empty where it has no address."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Who came, who did not, and how they reach each other's first address."""

    head: str
    """Its address, as it was given to all."""
    port: int
    joined: dict[str, Card]
    missing: tuple[Missing, ...]
    back: dict[str, str]
    """By host, why the head could not dial the address that its probe has; empty where it could."""
    lost: dict[str, str]
    """Hosts that joined and then did not answer, and why."""
    twice: tuple[str, ...]
    """Names under which more than one probe came; the first counts."""
    strangers: tuple[str, ...]
    """Names under which probes came that nobody expects."""
    took_s: float


class Head:
    """Listens for probes, on `address` alone.

    The port is bound when this is made and given to the probes afterwards, so that nobody else can take it in between.

    Raises:
        OSError: this host does not have `address`, or the port is taken.
    """

    def __init__(self, token: str, address: str, port: int = 0) -> None:
        self._listener = Listener(token, RUN, 0, "head", address, (port, port), max_frame=MAX_ORDER, handshake_s=5.0)
        self.address, self.port, self.token = self._listener.host, self._listener.port, token
        self.members: dict[str, Connection] = {}
        self._came_from: dict[str, str] = {}
        self._twice: list[str] = []
        self._strangers: list[str] = []

    def gather(
        self,
        launcher: Launcher,
        bound_s: float = NAMED_S,
        ports: Sequence[int] = (),
        kernels: int = 3,
        tell: Callable[[Sequence[str]], None] | None = None,
        given: str | None = None,
    ) -> Meeting:
        """Starts the probes, and waits until all have joined or the bound.

        Args:
            bound_s: how long to wait for all; more than the usual where people start the probes.
            ports: that the run will use, which every probe binds.
            kernels: how many ports of the kernel's own range every probe binds as well.
            tell: is given the names of those that are missing, after `NAMED_S` and every `NAMED_S` from then on.
            given: the address that probes are given for the head, where it is another than the one it listens on.
        """
        began = time.monotonic()
        given = given or self.address
        launcher.start(given, self.port, self.token)
        expected = list(dict.fromkeys(launcher.hosts))
        told = began
        while time.monotonic() - began < bound_s:
            absent = [name for name in expected if name not in self.members]
            if set(absent) <= set(launcher.failed()):
                break
            self._take(0.1, expected)
            if tell is not None and time.monotonic() - told >= NAMED_S:
                told = time.monotonic()
                tell(absent)
        absent = [name for name in expected if name not in self.members]
        named_s = time.monotonic() - began
        failed = launcher.failed()
        missing = _look_for(absent, f"{given}:{self.port}", failed, launcher.addresses)
        joined, lost = self._cards(ports, kernels)
        return Meeting(
            given, self.port, joined, missing, self._back(joined), lost, tuple(self._twice), tuple(self._strangers),
            named_s,
        )  # fmt: skip

    def ask(
        self, orders: Mapping[str, Mapping[str, object]], bound_s: float, why: str
    ) -> tuple[dict[str, Message], dict[str, str]]:
        """What those probes answer, and why others did not; they are members no longer."""
        answers, lost = ask_all(self.members, orders, bound_s, why)
        for name in lost:
            self.members.pop(name).close()
        return answers, lost

    def close(self) -> None:
        """Has the probes leave."""
        for connection in self.members.values():
            connection.close()
        self.members.clear()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, seconds: float, expected: Sequence[str]) -> None:
        connection = self._listener.accept(seconds)
        if connection is None:
            return
        name = connection.peer.name
        if name not in expected:
            self._strangers.append(name)
        elif name in self.members:
            self._twice.append(name)
        else:
            self.members[name] = connection
            self._came_from[name] = ends(connection)[1]
            return
        connection.close()

    def _cards(self, ports: Sequence[int], kernels: int) -> tuple[dict[str, Card], dict[str, str]]:
        order = {"do": "card", "ports": list(ports), "kernels": kernels}
        answers, lost = self.ask(dict.fromkeys(self.members, order), CARDS_S, "what they see")
        cards = {}
        for name, answer in answers.items():
            fields = {key: value for key, value in answer.items() if key in _MEMBERS}
            card = Card(**fields)
            cards[name] = replace(
                card,
                came_from=self._came_from[name],
                interfaces=_INTERFACES.validate_python(card.interfaces),
                resolves_to=tuple(card.resolves_to),
            )
        return dict(sorted(cards.items())), lost

    def _back(self, joined: Mapping[str, Card]) -> dict[str, str]:
        """Whether the address that each probe has can be dialled from here."""
        targets = []
        for name, card in joined.items():
            label, port = next(iter(card.ports.items()), ("", 0))
            if port:
                targets.append(peers.Target(name, card.address, port, label))
        found = peers.reach(targets, self.token, "head", BACK_S, 2 * BACK_S, 64) if targets else []
        return {one.peer: one.why for one in found}


def _look_for(
    absent: Sequence[str], given: str, failed: Mapping[str, str], known: Mapping[str, str]
) -> tuple[Missing, ...]:
    """What can be found out about hosts that did not come, all at once and in two to four seconds."""
    found: dict[str, Missing] = {}

    def look(name: str) -> None:
        addresses = (known[name],) if name in known else resolved(name, 2.0)
        there = peers.host_answers(addresses[0], bound_s=0.7) if addresses else ""
        found[name] = Missing(name, given, failed.get(name, ""), addresses, there)

    threads = [threading.Thread(target=look, args=(name,), daemon=True) for name in absent[:64]]
    for thread in threads:
        thread.start()
    for thread in threads:
        with contextlib.suppress(waits.WaitTimeout, WireError):
            waits.join(thread, whom="a missing host", why="is it there", timeout_s=4.0, notice_after_s=None)
    return tuple(found.get(name, Missing(name, given, failed.get(name, ""))) for name in absent)
