"""What the supervisor confirmed in a run, as the report lists it; what it only noticed is among the events."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.ledger import EventRow
from lockstep.report.top import duration


@dataclass(frozen=True, slots=True)
class Stall:
    at: str
    kind: str
    text: str
    lasted: str
    """Empty while nobody knows."""
    folder: str
    """Within the run's; empty where none was written."""


def stalls_of(events: Sequence[EventRow]) -> list[Stall]:
    """One for each stall or death that was confirmed, and how long it lasted."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for event in events:
        if event.kind != "stall":
            continue
        key, fields = (event.generation, event.fields["number"]), event.fields
        if fields["change"] == "withdrawn":
            if key in found:
                found[key]["lasted"] = duration(fields["since_s"])
        elif fields["level"] != "notice":
            found[key] = {"at": fields["said_at"], "lasted": ""} | found.get(key, {}) | fields
    return [
        Stall(_clock(each["at"]), each["verdict"], each["text"], each["lasted"], _folder(each["incident"]))
        for each in found.values()
    ]


def _folder(path: str | None) -> str:
    """Within the run's folder, which may have been moved since."""
    return f"incidents/{Path(path).name}" if path else ""


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
