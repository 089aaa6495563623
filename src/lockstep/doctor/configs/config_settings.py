"""Settings read from config files, each with its location, and findings about them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.doctor.output.findings import Finding, Severity


class ConfigNotReadable(ValueError):
    """A file cannot be read as a config."""

    def __init__(self, file: str, line: int, problem: str) -> None:
        self.file, self.line, self.problem = file, line, problem
        super().__init__(f"{file}:{line}: {problem}" if line else f"{file}: {problem}")


@dataclass(frozen=True, slots=True)
class ConfigLocation:
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


NO_LOCATION = ConfigLocation("", 0)
UNKNOWN_VALUE: Any = type("Unknown", (), {"__repr__": lambda self: "?", "__bool__": lambda self: False})()
"""A value that is set but not known, such as a variable of another shell or the output of a command."""


@dataclass(frozen=True, slots=True)
class ConfigSetting:
    """One option."""

    name: str
    value: Any
    """A string, a number, a list of these, None or `UNKNOWN_VALUE`."""
    place: ConfigLocation
    forced: bool = False
    """Hydra's `+key=value`: the key need not exist."""
    removed: bool = False
    """Hydra's `~key`."""


_TRUE, _FALSE = ("true", "yes", "1", "on", "y", "t"), ("false", "no", "0", "off", "n", "f")


@dataclass(slots=True)
class ConfigSettings:
    """Settings, of which later ones replace earlier ones, and defaults."""

    given: dict[str, ConfigSetting] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def add(self, setting: ConfigSetting) -> None:
        """Adds a setting, which replaces an earlier one of the same name."""
        self.given.pop(setting.name, None)
        self.given[setting.name] = setting

    def __iter__(self) -> Iterator[ConfigSetting]:
        return iter(self.given.values())

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def place(self, *names: str) -> ConfigLocation:
        """Location of the first of `names` that is set."""
        return next((self.given[name].place for name in names if name in self.given), NO_LOCATION)

    def get(self, name: str) -> Any:
        """The set value or the default; None without either."""
        return self.given[name].value if name in self.given else self.defaults.get(name)

    def set(self, name: str) -> bool:
        """Whether there is a known, non-null value."""
        return self.get(name) not in (None, UNKNOWN_VALUE, "null", "None", "")

    def whole(self, name: str) -> int | None:
        """None if not set, not known or not an integer."""
        value = self.number(name)
        return int(value) if value is not None and value == int(value) else None

    def number(self, name: str) -> float | None:
        """None if not set, not known or not a number."""
        value = self.get(name)
        if isinstance(value, bool) or value is UNKNOWN_VALUE or isinstance(value, list | dict) or value is None:
            return None
        try:
            number = float(str(value).replace("_", ""))
        except ValueError:
            return None
        return number if abs(number) < 1e18 else None

    def flag(self, name: str) -> bool | None:
        """None if not known."""
        value = self.get(name)
        if value is UNKNOWN_VALUE:
            return None
        text = str(value).lower()
        return True if text in _TRUE else False if text in _FALSE or value in (None, "") else None

    def text(self, name: str) -> str | None:
        """None if not set or not known."""
        value = self.get(name)
        return (
            str(value)
            if value not in (None, UNKNOWN_VALUE, "null", "None") and not isinstance(value, list | dict)
            else None
        )


@dataclass(slots=True)
class ConfigFindings:
    """Collects findings, each with the location that it is about."""

    findings: list[Finding] = field(default_factory=list)

    def add(
        self,
        id: str,
        severity: Severity,
        seen: str,
        why: str = "",
        fix: str = "",
        source: str = "",
        at: ConfigLocation | None = None,
    ) -> None:
        """Adds a finding."""
        place = f"{at}: " if at is not None and at.file else ""
        self.findings.append(Finding(id, severity, "", f"{place}{seen}", why, fix, source))

    def error(
        self, id: str, seen: str, why: str = "", fix: str = "", source: str = "", at: ConfigLocation | None = None
    ) -> None:
        """Adds an error: the run will not start, will fail or will hang."""
        self.add(id, "error", seen, why, fix, source, at)

    def warn(
        self, id: str, seen: str, why: str = "", fix: str = "", source: str = "", at: ConfigLocation | None = None
    ) -> None:
        """Adds a warning: the run may fail, or a setting has an unexpected effect."""
        self.add(id, "warning", seen, why, fix, source, at)

    def note(
        self, id: str, seen: str, why: str = "", fix: str = "", source: str = "", at: ConfigLocation | None = None
    ) -> None:
        """Adds a note."""
        self.add(id, "note", seen, why, fix, source, at)

    def unchecked(self, id: str, seen: str, fix: str = "", at: ConfigLocation | None = None) -> None:
        """Adds a finding about something that cannot be judged from the given files."""
        self.add(id, "unchecked", seen, fix=fix, at=at)

    def divides(
        self,
        id: str,
        whole: int | None,
        part: int | None,
        seen: str,
        why: str,
        fix: str,
        source: str,
        at: ConfigLocation,
    ) -> bool:
        """Adds an error unless `part` divides `whole` or one of them is not known."""
        if whole is None or part is None or part <= 0 or whole % part == 0:
            return True
        self.error(id, seen, why, fix, source, at)
        return False


def first_location(settings: ConfigSettings, *names: str) -> ConfigLocation:
    """Location of the first of `names` that is set."""
    return settings.place(*names)
