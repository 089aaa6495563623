"""Handles the supervisor's verdicts: prints them, writes them to the ledger, passes confirmed ones to recovery."""

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.base.text import format_duration
from lockstep.doctor.environment import incident_environment
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.run_incidents import STALL_EVENT
from lockstep.report.live_console import RunConsole
from lockstep.watch.diagnosis.verdict import MIN_ACTION_CONFIDENCE
from lockstep.watch.supervisor.supervisor_client import SupervisorEvent

log = logging.getLogger(__name__)

USER_CODE_CONFIDENCE = 0.8
"""Processes that run users' code are killed only at this higher confidence: `reward.timeout_s` or
`rollout.environment.timeout_s` already limits how long a call may take."""
USER_CODE_ROLES = ("reward", "environment")

VerdictAction = Callable[[Sequence[str], str], Sequence[str]]
"""Kills the named workers because of a verdict; returns those that it killed."""


class VerdictHandler:
    """Handles the events of the supervisor. Any thread may call `handle` and `subscribe`."""

    def __init__(self, console: RunConsole, ledger: Ledger) -> None:
        self._console, self._ledger = console, ledger
        self._events: queue.SimpleQueue[SupervisorEvent] = queue.SimpleQueue()
        """Events that are not in the ledger yet."""
        self._actions: list[VerdictAction] = []
        self._acted_on: set[int] = set()
        self._noted: set[str] = set()

    def subscribe(self, act: VerdictAction) -> None:
        """Registers `act(culprits, why)`, which is called once for each confirmed verdict, from any thread."""
        self._actions.append(act)

    def handle(self, event: SupervisorEvent) -> None:
        """Prints an event, acts on it if it is a confirmed verdict, and keeps it for the ledger."""
        self._report(event)
        if self._actions and should_act_on(event) and event.number not in self._acted_on:
            self._acted_on.add(event.number)
            why = f"{event.level}: {event.headline}"
            killed = [name for act in self._actions for name in act(event.who, why)]
            if killed:
                # Only for the ledger: recovery reports the restart on the console.
                self._events.put(replace(event, change="updated", level="act", done=f"killed {', '.join(killed)}"))
        self._report_environment(event)

    def _report_environment(self, event: SupervisorEvent) -> None:
        """Prints problems in the environment of an incident's processes, once for each incident."""
        if event.incident is None or event.incident in self._noted:
            return
        self._noted.add(event.incident)
        findings = incident_environment.write_incident_findings(Path(event.incident))
        if problems := incident_environment.findings_sentence(findings):
            self._console.warning(f"  environment: {problems}")

    def _report(self, event: SupervisorEvent) -> None:
        self._events.put(event)
        for line in format_event(event, acted_on=event.number in self._acted_on):
            self._console.warning(line)
            log.info("%s", line)

    def flush(self) -> None:
        """Writes the events into the ledger. Only the run's thread may call it: no other thread may write there."""
        while not self._events.empty():
            event = self._events.get_nowait()
            self._ledger.record_event(
                STALL_EVENT, number=event.number, change=event.change, level=event.level, verdict=event.verdict["kind"],
                cause=event.verdict["class"], who=list(event.who), text=event.headline,
                since_s=round(event.since_s, 3), said_at=event.wall, waited_s=seconds_waited(event),
                incident=event.incident, done=event.done,
            )  # fmt: skip


def format_event(event: SupervisorEvent, acted_on: bool = False) -> list[str]:
    """Returns up to two lines for the console.

    Args:
        acted_on: whether recovery has killed processes because of the verdict.
    """
    if event.change == "withdrawn":
        culprits, kind = ", ".join(event.who) or "unknown process", event.verdict["kind"]
        if kind == "dead":  # recovery reports the restarted worker
            return []
        outcome = "recovered" if acted_on else "resumed"
        return [f"{outcome}: {culprits} ({kind}), after {format_duration(event.since_s)}"]
    if event.done:
        return [f"{event.level}: {event.done}"]
    found = [f"{event.level}: {event.headline}"]
    if event.incident is not None:
        found.append(f"  incident: {event.incident}")
    return found


def seconds_waited(event: SupervisorEvent) -> float:
    """How long other processes have waited for the culprits; 0 for a culprit that died."""
    since = [float(link["since_s"]) for link in event.verdict["waiting"] if link["since_s"] is not None]
    return min(since, default=0.0) if event.verdict["kind"] != "dead" else 0.0


def should_act_on(event: SupervisorEvent) -> bool:
    """Whether the verdict is certain enough to kill its culprits."""
    verdict = event.verdict
    runs_user_code = any(culprit["role"] in USER_CODE_ROLES for culprit in verdict["culprits"])
    needed = USER_CODE_CONFIDENCE if runs_user_code else MIN_ACTION_CONFIDENCE
    proven = event.level == "confirmed" and event.change != "withdrawn" and float(verdict["confidence"]) >= needed
    return proven and bool(event.who)
