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
    """The value of one option, and where it is set."""

    name: str
    value: Any
    """A string, a number, a list of these, None or `UNKNOWN_VALUE`."""
    location: ConfigLocation
    forced: bool = False
    """Whether it was added with Hydra's `+key=value`, so that the key need not exist."""
    removed: bool = False
    """Whether it was removed with Hydra's `~key`."""


_TRUE, _FALSE = ("true", "yes", "1", "on", "y", "t"), ("false", "no", "0", "off", "n", "f")


@dataclass(slots=True)
class ConfigSettings:
    """The given settings, of which later ones replace earlier ones, and the defaults of the others."""

    given: dict[str, ConfigSetting] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def add(self, setting: ConfigSetting) -> None:
        """Adds a setting; it replaces an earlier one of the same name."""
        self.given.pop(setting.name, None)
        self.given[setting.name] = setting

    def __iter__(self) -> Iterator[ConfigSetting]:
        return iter(self.given.values())

    def __contains__(self, name: str) -> bool:
        """Whether the option is given; a default does not count."""
        return name in self.given

    def location_of(self, *names: str) -> ConfigLocation:
        """Location of the first of `names` that is given."""
        return next((self.given[name].location for name in names if name in self.given), NO_LOCATION)

    def get(self, name: str) -> Any:
        """The given value or the default; None without either."""
        return self.given[name].value if name in self.given else self.defaults.get(name)

    def has_value(self, name: str) -> bool:
        """Whether the value or default is known and not null."""
        return self.get(name) not in (None, UNKNOWN_VALUE, "null", "None", "")

    def integer(self, name: str) -> int | None:
        """The value as an integer; None if it is not set, not known or not an integer."""
        value = self.number(name)
        return int(value) if value is not None and value == int(value) else None

    def number(self, name: str) -> float | None:
        """The value as a number; None if it is not set, not known or not a number."""
        value = self.get(name)
        if isinstance(value, bool) or value is UNKNOWN_VALUE or isinstance(value, list | dict) or value is None:
            return None
        try:
            number = float(str(value).replace("_", ""))
        except ValueError:
            return None
        return number if abs(number) < 1e18 else None

    def flag(self, name: str) -> bool | None:
        """The value as a boolean; False if it is not set, None if it is not known or not a boolean."""
        value = self.get(name)
        if value is UNKNOWN_VALUE:
            return None
        text = str(value).lower()
        return True if text in _TRUE else False if text in _FALSE or value in (None, "") else None

    def text(self, name: str) -> str | None:
        """The value as a string; None if it is not set, not known or a list or mapping."""
        value = self.get(name)
        return (
            str(value)
            if value not in (None, UNKNOWN_VALUE, "null", "None") and not isinstance(value, list | dict)
            else None
        )


@dataclass(slots=True)
class ConfigFindings:
    """Collects findings; each text begins with the location in the config."""

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
        location = f"{at}: " if at is not None and at.file else ""
        self.findings.append(Finding(id, severity, "", f"{location}{seen}", why, fix, source))

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
