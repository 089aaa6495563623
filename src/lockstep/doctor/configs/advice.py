"""Findings about settings: where they stand, in one form."""

from dataclasses import dataclass, field

from lockstep.doctor.configs.settings import Place, Settings
from lockstep.doctor.finding import Finding, Severity


@dataclass(slots=True)
class Advice:
    """Findings as they are made, each beginning with the place in the file that it is about."""

    findings: list[Finding] = field(default_factory=list)

    def say(
        self,
        id: str,
        severity: Severity,
        seen: str,
        why: str = "",
        fix: str = "",
        source: str = "",
        at: Place | None = None,
    ) -> None:
        """One more."""
        place = f"{at}: " if at is not None and at.file else ""
        self.findings.append(Finding(id, severity, "", f"{place}{seen}", why, fix, source))

    def error(
        self, id: str, seen: str, why: str = "", fix: str = "", source: str = "", at: Place | None = None
    ) -> None:
        """The run will not start, will fail or will hang."""
        self.say(id, "error", seen, why, fix, source, at)

    def warn(self, id: str, seen: str, why: str = "", fix: str = "", source: str = "", at: Place | None = None) -> None:
        """It may, or does something else than it looks."""
        self.say(id, "warning", seen, why, fix, source, at)

    def note(self, id: str, seen: str, why: str = "", fix: str = "", source: str = "", at: Place | None = None) -> None:
        """Good to know."""
        self.say(id, "note", seen, why, fix, source, at)

    def unchecked(self, id: str, seen: str, fix: str = "", at: Place | None = None) -> None:
        """Something that what was given does not tell."""
        self.say(id, "unchecked", seen, fix=fix, at=at)

    def divides(
        self, id: str, whole: int | None, part: int | None, seen: str, why: str, fix: str, source: str, at: Place
    ) -> bool:
        """An error unless `part` divides `whole`, or one of them is not known."""
        if whole is None or part is None or part <= 0 or whole % part == 0:
            return True
        self.error(id, seen, why, fix, source, at)
        return False


def first(settings: Settings, *names: str) -> Place:
    """Where the first of `names` that is set stands."""
    return settings.place(*names)
