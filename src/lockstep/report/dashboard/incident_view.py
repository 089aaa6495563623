"""The incidents of a run with their evidence, and the files of their folders."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.base.folders import open_own_file
from lockstep.base.json_text import read_json
from lockstep.base.secrets import redact, redact_text, secret_values
from lockstep.ledger.run_incidents import Incident, environment_findings
from lockstep.watch.supervisor.incident import USUAL_FOLDER

MOST_FILES = 500
MOST_BYTES = 512 << 10
"""Of a file, from its beginning."""
_LEVELS = ("notice", "confirmed", "act")


def incidents_json(incidents: Sequence[Incident], folder: Path) -> list[dict[str, Any]]:
    """All incidents, oldest first, with the evidence in their folders. Times are seconds since the epoch."""
    return [_incident_json(each, folder) for each in incidents]


def incident_id(incident: Incident) -> str:
    """The id of an incident, which stays while it develops."""
    return hashlib.sha256(f"{incident.moments[0].at} {incident.moments[0].text}".encode()).hexdigest()[:12]


def incident_folder(incident: Incident, folder: Path) -> Path | None:
    """The folder of an incident in that of its run; None if it has none, or is not really there."""
    path = folder / incident.folder
    is_inside = path.parent == folder / USUAL_FOLDER and path.name not in ("", ".", "..")
    is_linked = path.is_symlink() or path.parent.is_symlink()
    return path if incident.folder and is_inside and path.is_dir() and not is_linked else None


def incident_files_of(path: Path) -> dict[str, Path]:
    """The files of an incident by their names relative to its folder, without links."""
    found: dict[str, Path] = {}
    for each in sorted(path.rglob("*")):
        if each.is_file() and not each.is_symlink() and not each.parent.is_symlink():
            found[each.relative_to(path).as_posix()] = each
        if len(found) >= MOST_FILES:
            break
    return found


def incident_file(path: Path) -> tuple[str, int]:
    """The beginning of a file as text without secrets, and the number of bytes left off. Raises OSError."""
    with os.fdopen(open_own_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        text = file.read(MOST_BYTES).decode("utf-8", "replace")
    return redact_text(text, secret_values(os.environ)), max(0, size - MOST_BYTES)


def _incident_json(incident: Incident, folder: Path) -> dict[str, Any]:
    path = incident_folder(incident, folder)
    verdict = _verdict(path) if path is not None else {}
    evidence = [str(each.get("text", "")) for each in verdict.get("evidence", ()) if isinstance(each, dict)]
    levels = [moment.what for moment in incident.moments if moment.what in _LEVELS]
    found = {
        "id": incident_id(incident),
        "time": incident.began,
        "ended": incident.ended,
        "kind": incident.what,
        "level": max(levels, key=_LEVELS.index, default="confirmed"),
        "text": str(verdict.get("explanation") or incident.moments[0].text),
        "culprits": [name for name in incident.workers.split(", ") if name],
        "evidence": [*evidence, *(environment_findings(path) if path is not None else ())],
        "fix": str(verdict.get("fix", "")),
        "outcome": incident.outcome,
        "recovery": incident.outcome_text,
        "moments": [{"time": each.at, "what": each.what, "text": each.text} for each in incident.moments],
        "files": list(incident_files_of(path)) if path is not None else [],
    }
    return dict(redact(found, secret_values(os.environ)))


def _verdict(path: Path) -> dict[str, Any]:
    file = path / "verdict.json"
    try:
        found = read_json(file) if file.is_file() and not file.is_symlink() else {}
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}
