"""What the supervisor says of a run: on the console at once, in the ledger from the run's thread, to those who act."""

import logging
import queue
from collections.abc import Callable, Sequence

from lockstep.ledger.ledger import Ledger
from lockstep.report.console import Console
from lockstep.report.incidents import STALL
from lockstep.report.top import duration
from lockstep.watch.supervisor_client import Said

log = logging.getLogger(__name__)

SURE = 0.8
"""Nobody is restarted on less."""

Act = Callable[[Sequence[str], str], None]


class Stalls:
    """Hears the supervisor. Any thread may call `hear` and `subscribe`."""

    def __init__(self, console: Console, ledger: Ledger) -> None:
        self._console, self._ledger = console, ledger
        self._news: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self._actors: list[Act] = []
        self._acted: set[int] = set()

    def subscribe(self, act: Act) -> None:
        """`act(workers, why)` is called, from any thread, with those whom a confirmed verdict names, once for each."""
        self._actors.append(act)

    def hear(self, said: Said) -> None:
        """Something is said."""
        self._news.put(said)
        for line in lines(said, acted=said.number in self._acted):
            self._console.warning(line)
            log.info("%s", line)
        if self._actors and to_act_on(said) and said.number not in self._acted:
            self._acted.add(said.number)
            for act in self._actors:
                act(list(said.who), f"{said.level}: {said.headline}")

    def flush(self) -> None:
        """Writes what was said into the ledger. From the run's thread, its only writer."""
        while not self._news.empty():
            said = self._news.get_nowait()
            self._ledger.event(
                STALL, number=said.number, change=said.change, level=said.level, verdict=said.verdict["kind"],
                cause=said.verdict["class"], who=list(said.who), text=said.headline, since_s=round(said.since_s, 3),
                said_at=said.wall, waited_s=waited_s(said), incident=said.incident,
            )  # fmt: skip


def lines(said: Said, acted: bool = False) -> list[str]:
    """Up to two lines for a person; `acted`: who it names was handed to recovery."""
    if said.change == "withdrawn":
        who, kind = ", ".join(said.who) or "it", said.verdict["kind"]
        if kind == "dead":  # it does not go on: its successor does, of which recovery tells
            return []
        return [f"{'over' if acted else 'goes on'}: {who} ({kind}), after {duration(said.since_s)}"]
    found = [f"{said.level}: {said.headline}"]
    if said.incident is not None:
        found.append(f"  incident: {said.incident}")
    return found


def waited_s(said: Said) -> float:
    """Since when nobody but those who are named was waited for; nobody waits for long for who just died."""
    since = [float(link["since_s"]) for link in said.verdict["waiting"] if link["since_s"] is not None]
    return min(since, default=0.0) if said.verdict["kind"] != "dead" else 0.0


def to_act_on(said: Said) -> bool:
    """Whether whom it names is to be restarted: not who died, whose end speaks for itself."""
    verdict = said.verdict
    proven = said.level == "confirmed" and said.change != "withdrawn" and float(verdict["confidence"]) >= SURE
    return proven and bool(said.who) and verdict["kind"] != "dead"
