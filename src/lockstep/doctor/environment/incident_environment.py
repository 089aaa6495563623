"""Findings about the environments recorded in an incident, written into its folder."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.doctor.environment.environment_lint import JobTraits, ProcessEnvironment, lint_environments
from lockstep.doctor.output.findings import Finding

log = logging.getLogger(__name__)

FINDINGS_FILE = "findings.json"
"""`{"environment": [{"id", "severity", "host", "seen", "why", "fix", "source"}]}`."""
_REPORTED = ("error", "warning", "note")


def incident_findings(folder: Path) -> list[Finding]:
    """From its `environment.json`, by host, and the versions in its `run.json`; empty where there is no environment.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is no JSON.
    """
    environments = _as_mapping(json.loads((folder / "environment.json").read_text(encoding="utf-8", errors="replace")))
    run = folder / "run.json"
    facts = _as_mapping(json.loads(run.read_text(encoding="utf-8", errors="replace"))) if run.is_file() else {}
    versions = {str(name): str(value) for name, value in _as_mapping(facts.get("versions")).items()}
    places = [
        ProcessEnvironment(str(host), {str(name): str(value) for name, value in _as_mapping(values).items()})
        for host, values in environments.items()
    ]
    job = JobTraits(several=len(environments) > 1)
    return [each for each in lint_environments(places, versions, job=job) if each.severity in _REPORTED]


def write_incident_findings(folder: Path) -> list[Finding]:
    """Writes them beside it and returns them. That this is impossible is told in the log only: an incident is worth
    more than what is said of it."""
    try:
        found = incident_findings(folder)
        text = json.dumps({"environment": [asdict(each) for each in found]}, indent=1)
        (folder / FINDINGS_FILE).write_text(text + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        log.warning("the environment of %s could not be looked at: %s", folder.name, error)
        return []
    return found


def newest_incident(paths: Iterable[str]) -> Path | None:
    """Of the incidents that are given, or that lie in a folder that is given, the one that was written last."""
    found = [
        file.parent
        for each in paths
        for pattern in ("environment.json", "*/environment.json")
        for file in Path(each).glob(pattern)
        if (file.parent / "verdict.json").is_file()
    ]
    return max(found, key=lambda folder: folder.name, default=None)


def incident_finding_lines(folder: Path) -> list[str]:
    """A line for each thing that is wrong with its environment, the worst first; empty where it cannot be read."""
    try:
        found = incident_findings(folder)
    except (OSError, ValueError):
        return []
    wrong = [each for each in found if each.severity in ("error", "warning")]
    return [f"{each.seen}. {each.why}" for each in sorted(wrong, key=lambda each: each.severity)]


def findings_sentence(found: Sequence[Finding]) -> str:
    """One line of what is wrong, empty where nothing is."""
    wrong = [each for each in found if each.severity in ("error", "warning")]
    if not wrong:
        return ""
    first = min(wrong, key=lambda each: each.severity != "error")
    more = f", and {len(wrong) - 1} more in {FINDINGS_FILE}" if len(wrong) > 1 else ""
    return f"{first.seen}{more}"


def _as_mapping(values: Any) -> Mapping[Any, Any]:
    return values if isinstance(values, Mapping) else {}
