"""The findings of checks, grouped into the sections of a report."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Severity = Literal["error", "warning", "note", "ok", "unchecked"]
"""`error`: a run will fail or hang. `warning`: a run may fail or hang, or will be slow. `note`: good to know. `ok`:
checked and right. `unchecked`: could not be checked; the text says why."""
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    id: str
    """Identifies the kind of finding, such as `shm-size`; the same on every host and in every version."""
    severity: Severity
    host: str
    """The host, or several joined by commas; "" if the finding concerns no particular host."""
    seen: str
    """What was found, with numbers."""
    why: str = ""
    """Why it matters."""
    fix: str = ""
    """The exact command or setting."""
    source: str = ""
    """The URL of documentation or source code."""
    measured: dict[str, Any] = field(default_factory=dict, hash=False)
    """Figures for programs, such as those that a run is compared with."""


@dataclass(frozen=True, slots=True)
class CheckSection:
    """The findings of one part of a check, and its duration."""

    name: str
    """A single word, for scripts."""
    title: str
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0


@dataclass(slots=True)
class CheckReport:
    """The sections of a check, in the order in which they ran."""

    sections: list[CheckSection] = field(default_factory=list)

    def add(self, name: str, title: str, findings: Iterable[Finding], seconds: float = 0.0) -> None:
        """Adds a section."""
        self.sections.append(CheckSection(name, title, tuple(findings), seconds))

    @property
    def findings(self) -> list[Finding]:
        """The findings of all sections."""
        return [finding for section in self.sections for finding in section.findings]

    @property
    def passed(self) -> bool:
        """Whether there is no error."""
        return all(finding.severity != "error" for finding in self.findings)

    def counts(self) -> dict[Severity, int]:
        """Number of findings of each severity."""
        severities = [finding.severity for finding in self.findings]
        return {severity: severities.count(severity) for severity in SEVERITIES}

    def json(self) -> dict[str, Any]:
        """Returns the report as JSON, in which a section is called a rung.

        The form is `{"passed", "counts": {severity: n}, "rungs": [{"name", "title", "seconds"}], "findings": [{"rung",
        "id", "severity", "host", "seen", "why", "fix", "source"}]}`; findings with figures also have "measured".
        """
        return {
            "passed": self.passed,
            "counts": self.counts(),
            "rungs": [
                {"name": each.name, "title": each.title, "seconds": round(each.seconds, 3)} for each in self.sections
            ],
            "findings": [
                {"rung": section.name, **_finding_json(found)}
                for section in self.sections
                for found in section.findings
            ],
        }


def _finding_json(found: Finding) -> dict[str, Any]:
    values = asdict(found)
    return values if found.measured else {name: value for name, value in values.items() if name != "measured"}


def guarded_findings(id: str, host: str, what: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Returns the findings of `check`; one of severity `unchecked` if it fails at the system or at parsing an answer.

    Args:
        what: The name of the check, for the message.
    """
    try:
        return list(check())
    except (OSError, ValueError, LookupError) as error:
        message = str(error) or type(error).__name__
        return [Finding(id, "unchecked", host, f"{what} could not be checked: {message}")]
