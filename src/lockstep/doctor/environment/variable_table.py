"""The table of environment variables: schema of the data files, and loading them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

SourceUrl = Annotated[str, Field(pattern=r"^(https://\S+|docs/[\w-]+\.md)$")]
"""Of Lockstep itself, the page."""
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
VersionText = Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]
Gravity = Literal["error", "warning", "note"]
ValueCondition = Annotated[str, Field(min_length=1)] | tuple[str, ...]
"""Which values are meant: `set` (any), `empty`, `place_bundle`, `off`, `>N`, `<N`, `~REGEX` for the whole value, a
value as it is written, or several of these."""
ValueKind = Literal[
    "boolean", "flag", "integer", "number", "choice", "choices", "interface", "address", "port", "path", "text"
]
"""flag: 0 or 1, and a word counts as 0; choices: several of `values`, by commas."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class HarmfulValue(_Model):
    """What a value does to a run when nobody looks for a fault any more, or anywhere."""

    when: ValueCondition = "on"
    since: VersionText | None = None
    """Nothing is said where an older version is installed."""
    where: Literal["several", "cuda"] | None = None
    """It is so where the job has several hosts, or is to use GPUs; a note elsewhere."""
    gpus: str | None = None
    """Said only where a GPU of the host has such a name; regular expression."""
    not_gpus: str | None = None
    """Not said there."""
    severity: Gravity = "warning"
    why: str
    fix: str = ""

    @field_validator("gpus", "not_gpus")
    @classmethod
    def _compile(cls, value: str | None) -> str | None:
        re.compile(value or "")
        return value


class VariableConflict(_Model):
    """Two variables that contradict each other."""

    when: ValueCondition = "set"
    other: VariableName
    other_when: ValueCondition = "set"
    severity: Gravity = "warning"
    why: str
    fix: str = ""


class EnvironmentVariable(_Model):
    name: VariableName
    readers: tuple[str, ...]
    """Who reads it. Nobody where it is empty: then `instead` says what is meant, or that there is no such thing."""
    does: str
    """What it really does."""
    use: str = ""
    hurts: str = ""
    kind: ValueKind = "text"
    values: tuple[str, ...] = ()
    """Of choices; of other kinds: what is allowed besides."""
    ignore_case: bool = False
    range: tuple[float | None, float | None] | None = None
    pattern: str | None = None
    """Regular expression that the whole value has to match."""
    bad: str = ""
    """What happens with another value."""
    bad_severity: Gravity = "error"
    default: str = ""
    since: VersionText | None = None
    until: VersionText | None = None
    """The first version that does not read it any more."""
    renamed: VariableName | None = None
    renamed_since: VersionText | None = None
    instead: str = ""
    left_on: tuple[HarmfulValue, ...] = ()
    conflicts: tuple[VariableConflict, ...] = ()
    differs: Gravity | Literal["expected"] = "note"
    """What it means where hosts have other values; expected: each has its own."""
    secret: bool = False
    sources: tuple[SourceUrl, ...] = Field(min_length=1)

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            re.compile(value)
        return value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.kind in ("choice", "choices") and not self.values:
            raise ValueError(f"values: missing for kind {self.kind}")
        if self.range is not None and self.kind not in ("integer", "number", "port"):
            raise ValueError(f"range: not for kind {self.kind}")
        if not self.readers and not (self.instead or self.renamed):
            raise ValueError("instead: nobody reads it, so say what is meant")
        if self.renamed_since is not None and self.renamed is None:
            raise ValueError("renamed: missing, renamed_since is there")
        return self


class LibraryVariables(_Model):
    """One file."""

    library: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    """As versions are given by."""
    title: str
    read: str
    """Which version the lists were read from."""
    prefixes: tuple[str, ...] = ()
    """Names that begin so belong to this library: one that is not listed is a slip, or read by nobody."""
    shared: bool = False
    """Others have names of these beginnings too: only slips are told, not every name that is not listed."""
    open: tuple[str, ...] = ()
    """Beginnings within `prefixes` that others may continue freely."""
    links: tuple[SourceUrl, ...] = ()
    """Sources that several variables share."""
    names_source: SourceUrl | None = None
    names: tuple[VariableName, ...] = ()
    """Further names that it reads, or that images and builds set, of which nothing is said here."""
    gone: dict[VariableName, VersionText] = {}
    """Names that it read once, of which nothing else is said here: the first version that does not any more."""
    variables: tuple[EnvironmentVariable, ...]

    @model_validator(mode="after")
    def _once(self) -> Self:
        every = [each.name for each in self.variables] + [*self.names, *self.gone]
        twice = sorted({name for name in every if every.count(name) > 1})
        if twice:
            raise ValueError(f"names: {', '.join(twice)} more than once")
        if (self.names or self.gone) and self.names_source is None:
            raise ValueError("names_source: missing")
        return self


class LauncherForwarding(_Model):
    """How variables of the shell that starts a job reach its workers on other hosts."""

    name: Annotated[str, Field(pattern=r"^[a-z]+$")]
    title: str
    forwards: tuple[str, ...] = ()
    """Names, or beginnings with `*`."""
    why: str
    fix: str
    sources: tuple[SourceUrl, ...] = Field(min_length=1)


class LauncherTable(_Model):
    launchers: tuple[LauncherForwarding, ...]


DATA_FOLDER = Path(__file__).parent / "data"
LAUNCHERS_FILE = "launchers.yaml"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Shape = TypeVar("_Shape", bound=BaseModel)


class BadVariableData(ValueError):
    """A data file that is not of the schema.

    Attributes:
        file: Which one.
        key: The key, dotted; variables by their names.
        why: What is wrong with it.
    """

    def __init__(self, file: Path, key: str, why: str) -> None:
        self.file, self.key, self.why = file, key, why
        super().__init__(": ".join(part for part in (file.name, key, why) if part))


@dataclass(frozen=True)
class KnownVariable:
    """A variable with the library whose file it stands in."""

    variable: EnvironmentVariable
    library: LibraryVariables


@dataclass(frozen=True)
class VariableTable:
    """All that is known."""

    libraries: tuple[LibraryVariables, ...]
    known: Mapping[str, KnownVariable]
    names: frozenset[str]
    """All names that somebody reads or of which it is known that nobody does."""
    launchers: Mapping[str, LauncherForwarding]

    def library_of(self, name: str) -> LibraryVariables | None:
        """The library to which a name belongs by its beginning, the longest that fits."""
        prefix = self.prefix_of(name)
        return next((each for each in self.libraries if prefix in each.prefixes), None) if prefix else None

    def prefix_of(self, name: str) -> str:
        """The beginning by which it belongs there; empty where it belongs to none."""
        fits = (each for library in self.libraries for each in library.prefixes if name.startswith(each))
        return max(fits, key=len, default="")

    def free(self, name: str) -> bool:
        """Whether users may make up names of this beginning."""
        return any(fnmatchcase(name, f"{begin}*") for library in self.libraries for begin in library.open)


@cache
def load_variables(home: Path = DATA_FOLDER) -> VariableTable:
    """Reads a folder of data files.

    Raises:
        BadData: naming file, key and what is wrong.
    """
    libraries = [
        _read_file(file, LibraryVariables) for file in sorted(home.glob("*.yaml")) if file.name != LAUNCHERS_FILE
    ]
    known: dict[str, KnownVariable] = {}
    for library in libraries:
        for variable in library.variables:
            if variable.name in known:
                where = known[variable.name].library.library
                raise BadVariableData(home / f"{library.library}.yaml", variable.name, f"{where}.yaml has it already")
            known[variable.name] = KnownVariable(variable, library)
    names = frozenset(known) | {name for library in libraries for name in (*library.names, *library.gone)}
    launchers = _read_file(home / LAUNCHERS_FILE, LauncherTable).launchers if (home / LAUNCHERS_FILE).is_file() else ()
    return VariableTable(tuple(libraries), known, names, {each.name: each for each in launchers})


def _read_file(file: Path, shape: type[_Shape]) -> _Shape:
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=_LOADER)
        return shape.model_validate(values)
    except yaml.YAMLError as error:
        raise BadVariableData(file, "", f"no YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise BadVariableData(file, _dotted_key(values, first["loc"]), first["msg"]) from error


def _dotted_key(values: Any, location: tuple[int | str, ...]) -> str:
    """The dotted key, with names in place of numbers."""
    parts = []
    for part in location:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            values = None
        named = values.get("name") if isinstance(values, dict) else None
        parts.append(str(named or part))
    return ".".join(parts)


def version_numbers(text: str) -> tuple[int, ...]:
    """`(2, 27, 3)` for `2.27.3+cuda12.2`; what comes after the numbers does not count, empty where there are none."""
    found = re.match(r"\D{0,3}(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def version_reached(installed: str | None, wanted: str | None) -> bool | None:
    """Whether the installed version is at least the wanted one; None where one of them is not known."""
    if installed is None or wanted is None or not version_numbers(installed):
        return None
    have, want = version_numbers(installed), version_numbers(wanted)
    width = max(len(have), len(want))
    return have + (0,) * (width - len(have)) >= want + (0,) * (width - len(want))
