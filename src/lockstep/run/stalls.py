"""What the supervisor says of a run: on the console at once, in the ledger from the run's thread, to those who act."""

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.doctor.environment import incidents
from lockstep.ledger.ledger import Ledger
from lockstep.report.console import Console
from lockstep.report.incidents import STALL
from lockstep.report.top import duration
from lockstep.watch.supervisor_client import Said
from lockstep.watch.verdict import SURE

log = logging.getLogger(__name__)

PROVEN = 0.8
"""Who runs users' code is ended on proof by structure only: how long that may think is a setting of its own."""
USERS = ("reward", "environment")
"""Roles that run it."""

Act = Callable[[Sequence[str], str], Sequence[str]]


class Stalls:
    """Hears the supervisor. Any thread may call `hear` and `subscribe`."""

    def __init__(self, console: Console, ledger: Ledger) -> None:
        self._console, self._ledger = console, ledger
        self._news: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._actors: list[Act] = []
        self._acted: set[int] = set()
        self._noted: set[str] = set()

    def subscribe(self, act: Act) -> None:
        """`act(workers, why)` is called, from any thread, with those whom a confirmed verdict names, once for each. It
        returns whom it has ended."""
        self._actors.append(act)

    def hear(self, said: Said) -> None:
        """Something is said."""
        self._tell(said)
        if self._actors and to_act_on(said) and said.number not in self._acted:
            self._acted.add(said.number)
            ended = [name for act in self._actors for name in act(said.who, f"{said.level}: {said.headline}")]
            if ended:
                # Of this recovery tells the person.
                self._news.put(replace(said, change="updated", level="act", done=f"{', '.join(ended)} ended"))
        self._note(said)

    def _note(self, said: Said) -> None:
        """What is odd about the environment of an incident's processes, told once; after all that is urgent."""
        if said.incident is None or said.incident in self._noted:
            return
        self._noted.add(said.incident)
        if odd := incidents.in_words(incidents.note(Path(said.incident))):
            self._console.warning(f"  environment: {odd}")

    def _tell(self, said: Said) -> None:
        self._news.put(said)
        for line in lines(said, acted=said.number in self._acted):
            self._console.warning(line)
            log.info("%s", line)

    def flush(self) -> None:
        """Writes what was said into the ledger. From the run's thread, its only writer."""
        while not self._news.empty():
            said = self._news.get_nowait()
            self._ledger.event(
                STALL, number=said.number, change=said.change, level=said.level, verdict=said.verdict["kind"],
                cause=said.verdict["class"], who=list(said.who), text=said.headline, since_s=round(said.since_s, 3),
                said_at=said.wall, waited_s=waited_s(said), incident=said.incident, done=said.done,
            )  # fmt: skip


def lines(said: Said, acted: bool = False) -> list[str]:
    """Up to two lines for a person; `acted`: who it names was handed to recovery."""
    if said.change == "withdrawn":
        who, kind = ", ".join(said.who) or "it", said.verdict["kind"]
        if kind == "dead":  # it does not go on: its successor does, of which recovery tells
            return []
        return [f"{'over' if acted else 'goes on'}: {who} ({kind}), after {duration(said.since_s)}"]
    if said.done:
        return [f"{said.level}: {said.done}"]
    found = [f"{said.level}: {said.headline}"]
    if said.incident is not None:
        found.append(f"  incident: {said.incident}")
    return found


def waited_s(said: Said) -> float:
    """Since when nobody but those who are named was waited for; nobody waits for long for who just died."""
    since = [float(link["since_s"]) for link in said.verdict["waiting"] if link["since_s"] is not None]
    return min(since, default=0.0) if said.verdict["kind"] != "dead" else 0.0


def to_act_on(said: Said) -> bool:
    """Whether recovery is to know whom it names, and to end them where they live."""
    verdict = said.verdict
    sure = PROVEN if any(each["role"] in USERS for each in verdict["culprits"]) else SURE
    proven = said.level == "confirmed" and said.change != "withdrawn" and float(verdict["confidence"]) >= sure
    return proven and bool(said.who)
