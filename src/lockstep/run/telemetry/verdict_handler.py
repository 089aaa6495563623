"""Handles the supervisor's verdicts: prints them, writes them to the ledger, hands confirmed ones to recovery."""

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.base.text import format_duration
from lockstep.doctor.environment import incident_environment
from lockstep.ledger.ledger import Ledger
from lockstep.report.live_console import LiveConsole
from lockstep.report.run_incidents import STALL_EVENT
from lockstep.watch.diagnosis.verdict import MIN_ACTION_CONFIDENCE
from lockstep.watch.supervisor.supervisor_client import SupervisorEvent

log = logging.getLogger(__name__)

USER_CODE_CONFIDENCE = 0.8
"""Who runs users' code is ended on proof by structure only: how long that may think is a setting of its own."""
USER_CODE_ROLES = ("reward", "environment")
"""Roles that run it."""

VerdictAction = Callable[[Sequence[str], str], Sequence[str]]


class VerdictHandler:
    """Hears the supervisor. Any thread may call `receive_message` and `subscribe`."""

    def __init__(self, console: LiveConsole, ledger: Ledger) -> None:
        self._console, self._ledger = console, ledger
        self._news: queue.SimpleQueue[SupervisorEvent] = queue.SimpleQueue()
        self._actors: list[VerdictAction] = []
        self._acted: set[int] = set()
        self._noted: set[str] = set()

    def subscribe(self, act: VerdictAction) -> None:
        """`act(workers, why)` is called, from any thread, with those whom a confirmed verdict names, once for each. It
        returns whom it has ended."""
        self._actors.append(act)

    def hear(self, said: SupervisorEvent) -> None:
        """Something is said."""
        self._tell(said)
        if self._actors and should_act_on(said) and said.number not in self._acted:
            self._acted.add(said.number)
            ended = [name for act in self._actors for name in act(said.who, f"{said.level}: {said.headline}")]
            if ended:
                # Of this recovery tells the person.
                self._news.put(replace(said, change="updated", level="act", done=f"{', '.join(ended)} ended"))
        self._note(said)

    def _note(self, said: SupervisorEvent) -> None:
        """What is odd about the environment of an incident's processes, told once; after all that is urgent."""
        if said.incident is None or said.incident in self._noted:
            return
        self._noted.add(said.incident)
        if odd := incident_environment.findings_sentence(
            incident_environment.write_incident_findings(Path(said.incident))
        ):
            self._console.warning(f"  environment: {odd}")

    def _tell(self, said: SupervisorEvent) -> None:
        self._news.put(said)
        for line in format_event(said, acted=said.number in self._acted):
            self._console.warning(line)
            log.info("%s", line)

    def flush(self) -> None:
        """Writes what was said into the ledger. From the run's thread, its only writer."""
        while not self._news.empty():
            said = self._news.get_nowait()
            self._ledger.event(
                STALL_EVENT, number=said.number, change=said.change, level=said.level, verdict=said.verdict["kind"],
                cause=said.verdict["class"], who=list(said.who), text=said.headline, since_s=round(said.since_s, 3),
                said_at=said.wall, waited_s=seconds_waited(said), incident=said.incident, done=said.done,
            )  # fmt: skip


def format_event(said: SupervisorEvent, acted: bool = False) -> list[str]:
    """Up to two lines for a person; `acted`: who it names was handed to recovery."""
    if said.change == "withdrawn":
        who, kind = ", ".join(said.who) or "it", said.verdict["kind"]
        if kind == "dead":  # it does not go on: its successor does, of which recovery tells
            return []
        return [f"{'over' if acted else 'goes on'}: {who} ({kind}), after {format_duration(said.since_s)}"]
    if said.done:
        return [f"{said.level}: {said.done}"]
    found = [f"{said.level}: {said.headline}"]
    if said.incident is not None:
        found.append(f"  incident: {said.incident}")
    return found


def seconds_waited(said: SupervisorEvent) -> float:
    """Since when nobody but those who are named was waited for; nobody waits for long for who just died."""
    since = [float(link["since_s"]) for link in said.verdict["waiting"] if link["since_s"] is not None]
    return min(since, default=0.0) if said.verdict["kind"] != "dead" else 0.0


def should_act_on(said: SupervisorEvent) -> bool:
    """Whether recovery is to know whom it names, and to end them where they live."""
    verdict = said.verdict
    sure = (
        USER_CODE_CONFIDENCE
        if any(each["role"] in USER_CODE_ROLES for each in verdict["culprits"])
        else MIN_ACTION_CONFIDENCE
    )
    proven = said.level == "confirmed" and said.change != "withdrawn" and float(verdict["confidence"]) >= sure
    return proven and bool(said.who)
