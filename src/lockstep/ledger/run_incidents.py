"""Lists the incidents of a run: reports, actions of recovery, and outcomes.

The ledger has separate events: `stall` events for the supervisor's reports, and `recovery` events for restarts. Events
about the same workers at the same time form one incident.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.base.json_text import read_json
from lockstep.base.text import count_noun, format_duration
from lockstep.config.roles import planned_name
from lockstep.ledger.sqlite_index import EventRow

STALL_EVENT = "stall"
"""The ledger's event kind for the supervisor's reports."""
RECOVERY_EVENT = "recovery"
"""The ledger's event kind for actions of recovery."""

Outcome = Literal["healed", "passed", "open", "gave up"]

_LATE_S = 5.0
"""The supervisor may report a failure this long after recovery, because an engine restarts in less than a second."""
_STALL_NOTICE_S = 10.0
"""A stall is reported within this time. During an older part of the wait, the process still made progress."""
_SEVERITIES = ("error", "warning", "note")
_CLOSING_ACTIONS = ("restarted", "gave up")
_SINGLE_WORKERS = ("engine-", "scorer-", "environment-", "courier-")
"""Workers that are restarted one by one."""


@dataclass(frozen=True, slots=True)
class IncidentMoment:
    """A report or an action."""

    at: float
    """Seconds since the epoch."""
    what: str
    """notice, confirmed, act, failed, fewer ranks, restarted, gave up, or over."""
    text: str


@dataclass(frozen=True, slots=True)
class Incident:
    """A failure, or a confirmed stall."""

    workers: str
    what: str
    """Kind of the verdict; without a verdict, how the process failed."""
    began: float
    """When it began, or when others began to wait for it, in seconds since the epoch."""
    ended: float | None
    outcome: Outcome
    """healed (by recovery), passed (by itself), open (no known end), or gave up."""
    moments: tuple[IncidentMoment, ...]
    """Oldest first."""
    folder: str
    """Folder of the incident, relative to the run's folder; empty if none was written."""

    @property
    def harmless(self) -> bool:
        """Whether the run continued unharmed."""
        return self.outcome in ("healed", "passed")

    @property
    def outcome_text(self) -> str:
        """How it ended, such as `healed after 5.2s`."""
        if self.ended is None:
            return {"open": "unresolved", "gave up": "the run gave up"}.get(self.outcome, self.outcome)
        return f"{self.outcome} after {format_duration(self.ended - self.began)}"

    def json(self) -> dict[str, Any]:
        """Returns the incident for `summary.json`. Times are seconds since `at` (UTC), when the incident began."""
        return {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.began)),
            "who": self.workers,
            "what": self.what,
            "outcome": self.outcome,
            "seconds": None if self.ended is None else round(self.ended - self.began, 3),
            "moments": [{"after_s": round(m.at - self.began, 3), "what": m.what, "text": m.text} for m in self.moments],
            "folder": self.folder or None,
        }


@dataclass(slots=True)
class _Stall:
    """The supervisor's reports about one stall."""

    generation: int
    reports: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def workers(self) -> list[str]:
        return list(dict.fromkeys(name for each in self.reports for name in each["who"]))

    @property
    def began(self) -> float:
        first = self.reports[0]
        return float(first["said_at"]) - min(float(first.get("waited_s", 0.0)), _STALL_NOTICE_S)

    @property
    def reported_at(self) -> float:
        return float(self.reports[0]["said_at"])

    @property
    def ended(self) -> float | None:
        last = self.reports[-1]
        return float(last["said_at"]) if last["change"] == "withdrawn" else None

    @property
    def confirmed(self) -> bool:
        return any(each["level"] != "notice" for each in self.reports)

    def moments(self) -> list[IncidentMoment]:
        found: list[IncidentMoment] = []
        for each in self.reports:
            what, text = str(each["level"]), str(each.get("done") or each["text"])
            if each["change"] != "withdrawn" and (not found or (found[-1].what, found[-1].text) != (what, text)):
                found.append(IncidentMoment(float(each["said_at"]), what, text))
        return found


@dataclass(slots=True)
class _Repair:
    """Recovery's actions after one failure of the trainer or of an engine."""

    generation: int
    key: str
    actions: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def workers(self) -> list[str]:
        return str(self.actions[0]["worker"]).split(", ")

    @property
    def began(self) -> float:
        first = self.actions[0]
        return float(first["at"]) - (float(first.get("seconds", 0.0)) if first["action"] != "failed" else 0.0)

    @property
    def closing(self) -> Mapping[str, Any] | None:
        return self.actions[-1] if self.actions[-1]["action"] in _CLOSING_ACTIONS else None

    @property
    def ended(self) -> float | None:
        return None if self.closing is None else float(self.closing["at"])

    def moments(self) -> list[IncidentMoment]:
        return [IncidentMoment(float(each["at"]), str(each["action"]), _action_text(each)) for each in self.actions]


def incidents_of(events: Sequence[EventRow]) -> list[Incident]:
    """Returns the incidents of all attempts, oldest first. A stall that was never confirmed is not an incident."""
    repairs = _repairs(events)
    stalls_of_repair: dict[int, list[_Stall]] = {index: [] for index in range(len(repairs))}
    without_repair = []
    for stall in _stalls(events):
        index = _repair_of(stall, repairs)
        if index is not None:
            stalls_of_repair[index].append(stall)
        elif stall.confirmed:
            without_repair.append(stall)
    found = [_incident_of_repair(repair, stalls_of_repair[index]) for index, repair in enumerate(repairs)]
    return sorted([*found, *map(_incident_of_stall, without_repair)], key=lambda each: each.began)


def incidents_summary(incidents: Sequence[Incident]) -> str:
    """Summarizes incidents, such as `2 incidents, all healed`; empty if there were none."""
    if not incidents:
        return ""
    bad = sum(not each.harmless for each in incidents)
    count = "an incident" if len(incidents) == 1 else f"{len(incidents)} incidents"
    if bad:
        return f"{count}, {bad} of them not healed" if len(incidents) > 1 else f"{count}, not healed"
    how = "healed" if all(each.outcome == "healed" for each in incidents) else "over"
    return f"{count}, {'all ' if len(incidents) > 1 else ''}{how}"


def _stalls(events: Sequence[EventRow]) -> list[_Stall]:
    found: dict[tuple[int, int], _Stall] = {}
    for event in events:
        if event.kind == STALL_EVENT:
            key = event.generation, int(event.fields["number"])
            found.setdefault(key, _Stall(event.generation)).reports.append(event.fields)
    return list(found.values())


def _repairs(events: Sequence[EventRow]) -> list[_Repair]:
    found: list[_Repair] = []
    open_repairs: dict[tuple[int, str], _Repair] = {}
    for event in events:
        if event.kind != RECOVERY_EVENT or event.fields.get("action") not in (
            "failed",
            "fewer ranks",
            *_CLOSING_ACTIONS,
        ):
            continue
        key = event.generation, _restart_unit(str(event.fields["worker"]))
        if key not in open_repairs:
            open_repairs[key] = _Repair(*key)
            found.append(open_repairs[key])
        open_repairs[key].actions.append(event.fields)
        if event.fields["action"] in _CLOSING_ACTIONS:
            del open_repairs[key]
    return found


def _restart_unit(worker: str) -> str:
    """Returns what is restarted together: a trained role, such as `policy`, for all its ranks, or an engine's name
    without restart numbers."""
    name = planned_name(worker.partition(",")[0])
    return name if name.startswith(_SINGLE_WORKERS) else name.rpartition("-")[0] or name


def _repair_of(stall: _Stall, repairs: Sequence[_Repair]) -> int | None:
    """Returns the index of the repair during the stall that concerns the same workers, preferably one that names
    them."""
    keys, workers = {_restart_unit(name) for name in stall.workers}, set(stall.workers)
    near = [
        (bool(workers & set(repair.workers)), -abs(repair.began - stall.reported_at), index)
        for index, repair in enumerate(repairs)
        if repair.generation == stall.generation
        and repair.key in keys
        and (repair.ended is None or stall.began <= repair.ended + _LATE_S)
        and (stall.ended is None or stall.ended >= repair.began)
    ]
    return max(near)[2] if near else None


def _incident_of_repair(repair: _Repair, stalls: Sequence[_Stall]) -> Incident:
    reported = [moment for stall in stalls for moment in stall.moments()]
    done = repair.moments()
    if any(
        each.what != "notice" and each.at <= done[0].at for each in reported
    ):  # recovery ended the stalled process, so its end is not news
        done = [each for each in done if each.what != "failed"] or done
    certain = [stall for stall in stalls if stall.confirmed] or stalls
    blamed = [(stall, names) for stall in certain if (names := _blamed_workers(stall, repair))]
    closing = repair.closing
    outcome: Outcome = "open" if closing is None else "gave up" if closing["action"] == "gave up" else "healed"
    return Incident(
        workers=", ".join(dict.fromkeys([*repair.workers, *(name for _, names in blamed for name in names)])),
        what=str(blamed[0][0].reports[-1]["verdict"]) if blamed else str(repair.actions[0].get("what", "failed")),
        began=min([repair.began, *(stall.began for stall in stalls)]),
        ended=repair.ended if outcome == "healed" else None,
        outcome=outcome,
        moments=tuple(sorted([*reported, *done], key=lambda each: each.at)),
        folder=_incident_folder(stalls),
    )


def _blamed_workers(stall: _Stall, repair: _Repair) -> list[str]:
    """The workers that a stall names, without replacements of those that failed: waiting for the start of a replacement
    is part of the repair."""
    failed = {planned_name(name) for name in repair.workers}
    return [name for name in stall.workers if name in repair.workers or planned_name(name) not in failed]


def _incident_of_stall(stall: _Stall) -> Incident:
    moments = stall.moments()
    if stall.ended is not None:
        moments.append(IncidentMoment(stall.ended, "over", "no process waits for it any more"))
    return Incident(
        ", ".join(stall.workers) or "unknown",
        str(stall.reports[-1]["verdict"]),
        stall.began,
        stall.ended,
        "open" if stall.ended is None else "passed",
        tuple(moments),
        _incident_folder([stall]),
    )


def environment_findings(folder: Path) -> list[str]:
    """Reads the findings about environment variables from an incident's `findings.json`, worst first. Empty without
    that file."""
    path = folder / "findings.json"
    try:
        entries = read_json(path)["environment"] if path.is_file() else []  # a pipe would block
        found = [(_SEVERITIES.index(each["severity"]), f"{each['seen']}. {each['why']}") for each in entries]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [text for _, text in sorted(found, key=lambda entry: entry[0])]


def _incident_folder(stalls: Sequence[_Stall]) -> str:
    """Returns the incident's folder relative to the run's folder, which may have been moved."""
    written = [each["incident"] for stall in stalls for each in stall.reports if each["incident"]]
    return f"incidents/{Path(written[0]).name}" if written else ""


def _action_text(fields: Mapping[str, Any]) -> str:
    match fields["action"]:
        case "failed":
            why = f" ({fields['why']})" if fields.get("why") else ""
            return f"{fields['worker']} {fields.get('what', 'failed')}{why}"
        case "gave up":
            return str(fields.get("reason") or fields.get("what", ""))
        case "fewer ranks":
            return f"training continues with ranks={fields['ranks']}"
    details = [f"in {float(fields.get('seconds', 0.0)):.1f} s"]
    if fields.get("requests"):
        details.append(f"{fields['requests']} requests re-issued")
    if "restored" in fields:
        again = fields.get("again", 0)
        details.append(f"state of {count_noun(fields['restored'], 'step')}")
        details += [f"{again} trained again"] if again else []
    return ", ".join(details)
