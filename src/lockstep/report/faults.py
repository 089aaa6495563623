"""What failed in a run and what recovery did about it, on a line of time."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.ledger import EventRow

RECOVERY = "recovery"
"""The ledger's event of everything that recovery does."""
_LEAST = 0.4
"""Percent of the line that a mark takes at least, to be seen."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure that was healed, or not."""

    at: str
    left: float
    """Percent of the line, from the begin of the run."""
    width: float
    what: str
    done: str
    healed: bool


def faults_of(events: Sequence[EventRow]) -> list[Fault]:
    """Of all attempts at the run, oldest first."""
    found = [event for event in events if event.kind == RECOVERY and event.fields.get("action") in _TOLD]
    if not found:
        return []
    begin, end = events[0].at, max(event.at for event in events)
    whole = max(end - begin, 1e-9)
    return [_fault(event.fields, begin, whole) for event in found]


_TOLD = ("restarted", "fewer ranks", "gave up")


def _fault(fields: Mapping[str, Any], begin: float, whole: float) -> Fault:
    at, seconds = float(fields["at"]), float(fields.get("seconds", 0.0))
    width = max(_LEAST, 100 * seconds / whole)
    left = min(max(0.0, 100 * (at - seconds - begin) / whole), 100 - width)
    step = f" in step {fields['step'] + 1}" if "step" in fields else ""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at - seconds))
    what = f"{fields['worker']} {fields.get('what', 'failed')}{step}"
    return Fault(clock, left, width, what, _done(fields, seconds), fields["action"] != "gave up")


def _done(fields: Mapping[str, Any], seconds: float) -> str:
    match fields["action"]:
        case "gave up":
            return str(fields.get("reason", ""))
        case "fewer ranks":
            return f"training goes on with ranks={fields['ranks']}"
    details = []
    if fields.get("requests"):
        details.append(f"{fields['requests']} requests re-issued")
    if "restored" in fields:
        again = fields.get("again", 0)
        details.append(f"state of {fields['restored']} steps" + (f", {again} trained again" if again else ""))
    return f"restarted in {seconds:.1f} s" + "".join(f", {each}" for each in details)
