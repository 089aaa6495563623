"""Findings of checks, grouped in sections of one report."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Severity = Literal["error", "warning", "note", "ok", "unchecked"]
"""`error`: a run will fail or hang. `warning`: it may, or will be slow. `write_incident_findings`: good to know.
`ok`: looked at and right. `unchecked`: could not be looked at, and why."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    id: str
    """Of the kind of finding, such as `shm-size`; the same on every host and in every version."""
    severity: Severity
    host: str
    """Where; several joined by commas, empty where it is about no host in particular."""
    seen: str
    """What was found, with its numbers."""
    why: str = ""
    """Why it matters."""
    fix: str = ""
    """The exact command or setting."""
    source: str = ""
    """URL of the documentation or source that says so."""


@dataclass(frozen=True, slots=True)
class CheckSection:
    """What one part of a check said, and how long it took."""

    name: str
    """A word, for scripts."""
    title: str
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0


@dataclass(slots=True)
class CheckReport:
    """All rungs, in the order in which they were climbed."""

    rungs: list[CheckSection] = field(default_factory=list)

    def add(self, name: str, title: str, findings: Iterable[Finding], seconds: float = 0.0) -> None:
        """One rung more."""
        self.rungs.append(CheckSection(name, title, tuple(findings), seconds))

    @property
    def findings(self) -> list[Finding]:
        """Of all rungs."""
        return [finding for rung in self.rungs for finding in rung.findings]

    @property
    def passed(self) -> bool:
        """Whether there is no error."""
        return all(finding.severity != "error" for finding in self.findings)

    def counts(self) -> dict[Severity, int]:
        """How many findings there are of each severity."""
        severities = [finding.severity for finding in self.findings]
        return {severity: severities.count(severity) for severity in SEVERITIES}

    def json(self) -> dict[str, Any]:
        """`{"passed", "counts": {severity: n}, "rungs": [{"name", "title", "seconds"}], "findings": [{"rung", "id",
        "severity", "host", "seen", "why", "fix", "source"}]}`."""
        return {
            "passed": self.passed,
            "counts": self.counts(),
            "rungs": [{"name": r.name, "title": r.title, "seconds": round(r.seconds, 3)} for r in self.rungs],
            "findings": [{"rung": rung.name, **asdict(found)} for rung in self.rungs for found in rung.findings],
        }


def guarded_findings(id: str, host: str, what: str, look: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What `look` finds; where the system refuses, or says what is not understood, that this could not be checked."""
    try:
        return list(look())
    except (OSError, ValueError, LookupError) as error:
        said = str(error) or type(error).__name__
        return [Finding(id, "unchecked", host, f"{what} could not be checked: {said}")]
