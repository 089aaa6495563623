"""Findings of checks, grouped in sections of one report."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Severity = Literal["error", "warning", "note", "ok", "unchecked"]
"""`error`: a run will fail or hang. `warning`: it may, or will be slow. `note`: good to know. `ok`: checked and right.
`unchecked`: could not be checked, and why."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    id: str
    """Identifies the kind of finding, such as `shm-size`; the same on every host and in every version."""
    severity: Severity
    host: str
    """The host, or several joined by commas; empty if it is about no particular host."""
    seen: str
    """What was found, with its numbers."""
    why: str = ""
    """Why it matters."""
    fix: str = ""
    """The exact command or setting."""
    source: str = ""
    """URL of documentation or source code."""


@dataclass(frozen=True, slots=True)
class CheckSection:
    """The findings of one part of a check, and its duration."""

    name: str
    """One word, for scripts."""
    title: str
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0


@dataclass(slots=True)
class CheckReport:
    """All sections, in the order in which they ran."""

    rungs: list[CheckSection] = field(default_factory=list)

    def add(self, name: str, title: str, findings: Iterable[Finding], seconds: float = 0.0) -> None:
        """Adds a section."""
        self.rungs.append(CheckSection(name, title, tuple(findings), seconds))

    @property
    def findings(self) -> list[Finding]:
        """Findings of all sections."""
        return [finding for rung in self.rungs for finding in rung.findings]

    @property
    def passed(self) -> bool:
        """Whether there is no error."""
        return all(finding.severity != "error" for finding in self.findings)

    def counts(self) -> dict[Severity, int]:
        """Number of findings of each severity."""
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
    """The findings of `look`; one `unchecked` finding if the system refuses or its answer cannot be parsed."""
    try:
        return list(look())
    except (OSError, ValueError, LookupError) as error:
        message = str(error) or type(error).__name__
        return [Finding(id, "unchecked", host, f"{what} could not be checked: {message}")]
