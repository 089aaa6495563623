"""Checks the environments that were recorded in an incident, and writes the findings into its folder."""

import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lockstep.base.folders import check_shared_folder, make_private_dir, open_file
from lockstep.base.json_text import read_json
from lockstep.doctor.environment.environment_lint import JobTraits, ProcessEnvironment, lint_environments
from lockstep.doctor.output.findings import Finding

log = logging.getLogger(__name__)

FINDINGS_FILE = "findings.json"
"""`{"environment": [{"id", "severity", "host", "seen", "why", "fix", "source"}]}`."""
_REPORTED = ("error", "warning", "note")


def incident_findings(folder: Path) -> list[Finding]:
    """Checks the environments in `environment.json`, with the versions of libraries in `run.json`.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is not JSON.
    """
    environments = _as_mapping(read_json(folder / "environment.json"))
    run = folder / "run.json"
    facts = _as_mapping(read_json(run)) if run.is_file() else {}
    versions = {str(name): str(value) for name, value in _as_mapping(facts.get("versions")).items()}
    processes = [
        ProcessEnvironment(str(host), {str(name): str(value) for name, value in _as_mapping(values).items()})
        for host, values in environments.items()
    ]
    job = JobTraits(multi_host=len(environments) > 1)
    return [each for each in lint_environments(processes, versions, job=job) if each.severity in _REPORTED]


def write_incident_findings(folder: Path) -> list[Finding]:
    """Writes the findings into the folder of the incident and returns them.

    A failure is only logged, because the incident must be kept anyway.
    """
    try:
        found = incident_findings(folder)
        text = json.dumps({"environment": [asdict(each) for each in found]}, indent=1)
        check_shared_folder(folder.parent, "remove it")
        # The folder exists: this checks that it is no link and belongs to the user.
        make_private_dir(folder, "remove it")
        with os.fdopen(open_file(folder / FINDINGS_FILE, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as file:
            file.write(text + "\n")
    except (OSError, ValueError) as error:
        log.warning("the environment of %s could not be checked: %s", folder.name, error)
        return []
    return found


def newest_incident(paths: Iterable[str]) -> Path | None:
    """Returns the newest of the given incidents and of the incidents in the given folders; None if there is none."""
    found = [
        file.parent
        for each in paths
        for pattern in ("environment.json", "*/environment.json")
        for file in Path(each).glob(pattern)
        if (file.parent / "verdict.json").is_file()
    ]
    return max(found, key=lambda folder: folder.name, default=None)


def incident_finding_lines(folder: Path) -> list[str]:
    """Describes each problem of the incident's environment in a line, errors first; empty if it cannot be read."""
    try:
        found = incident_findings(folder)
    except (OSError, ValueError):
        return []
    problems = [each for each in found if each.severity in ("error", "warning")]
    return [f"{each.seen}. {each.why}" for each in sorted(problems, key=lambda each: each.severity != "error")]


def findings_sentence(found: Sequence[Finding]) -> str:
    """Describes the worst problem in one line, with the number of others; "" if there is none."""
    problems = [each for each in found if each.severity in ("error", "warning")]
    if not problems:
        return ""
    first = min(problems, key=lambda each: each.severity != "error")
    more = f", and {len(problems) - 1} more in {FINDINGS_FILE}" if len(problems) > 1 else ""
    return f"{first.seen}{more}"


def _as_mapping(values: Any) -> Mapping[Any, Any]:
    return values if isinstance(values, Mapping) else {}
