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
"""A URL, or a page of Lockstep's documentation."""
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
VersionText = Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]
Gravity = Literal["error", "warning", "note"]
ValueCondition = Annotated[str, Field(min_length=1)] | tuple[str, ...]
"""Condition on a value: `set` (any value), `empty`, `on`, `off`, `>N`, `<N`, `~REGEX` (for the whole value), a literal
value, or several conditions, of which one must be met."""
ValueKind = Literal[
    "boolean", "flag", "integer", "number", "choice", "choices", "interface", "address", "port", "path", "text"
]
"""flag: 0 or 1, where a word counts as 0; choices: several of `values`, separated by commas."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class HarmfulValue(_Model):
    """Values that are harmful, in general or except for debugging."""

    when: ValueCondition = "on"
    since: VersionText | None = None
    """First version with this effect."""
    where: Literal["several", "cuda"] | None = None
    """The jobs to which the severity applies: with several hosts, or with GPUs. For other jobs it is `note`."""
    gpus: str | None = None
    """Regular expression: only applies if the name of a GPU of the host matches."""
    not_gpus: str | None = None
    """Regular expression: does not apply if the name of a GPU of the host matches."""
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
    """A variable with its valid and harmful values."""

    name: VariableName
    readers: tuple[str, ...]
    """The programs that read the variable. If empty, `instead` or `renamed` names the right setting."""
    does: str
    """What it really does."""
    use: str = ""
    """When to set it."""
    hurts: str = ""
    """The harm that it can do."""
    kind: ValueKind = "text"
    values: tuple[str, ...] = ()
    """Allowed choices; for other kinds, additional allowed values."""
    ignore_case: bool = False
    range: tuple[float | None, float | None] | None = None
    pattern: str | None = None
    """Regular expression that the whole value must match."""
    bad: str = ""
    """The effect of a value that is not allowed."""
    bad_severity: Gravity = "error"
    """The severity of a value that is not allowed."""
    default: str = ""
    since: VersionText | None = None
    until: VersionText | None = None
    """The first version that no longer reads it."""
    renamed: VariableName | None = None
    renamed_since: VersionText | None = None
    instead: str = ""
    harmful_values: tuple[HarmfulValue, ...] = ()
    conflicts: tuple[VariableConflict, ...] = ()
    differs: Gravity | Literal["expected"] = "note"
    """The severity if hosts have different values; expected: each host has its own value."""
    secret: bool = False
    sources: tuple[SourceUrl, ...] = Field(min_length=1)

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        if value is not None:
            re.compile(value)
        return value

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.kind in ("choice", "choices") and not self.values:
            raise ValueError(f"values: missing for kind {self.kind}")
        if self.range is not None and self.kind not in ("integer", "number", "port"):
            raise ValueError(f"range: not for kind {self.kind}")
        if not self.readers and not (self.instead or self.renamed):
            raise ValueError("instead: nothing reads it, so name the right setting")
        if self.renamed_since is not None and self.renamed is None:
            raise ValueError("renamed: missing, but renamed_since is set")
        return self


class LibraryVariables(_Model):
    """A data file: one library with its variables."""

    library: Annotated[str, Field(pattern=r"^[a-z0-9_]+$")]
    """The name of the library in the data files, and the key of its version in `LintRequest.versions`."""
    title: str
    listed_from: str
    """The versions from which the lists were made."""
    prefixes: tuple[str, ...] = ()
    """Prefixes of the library's names. An unlisted name with such a prefix is misspelt, or nothing reads it."""
    shared_prefixes: bool = False
    """Whether others use the prefixes too, so that only misspelt names are reported, not all unlisted ones."""
    user_prefixes: tuple[str, ...] = ()
    """Longer prefixes with which users may choose any name."""
    links: tuple[SourceUrl, ...] = ()
    """Sources shared by several variables."""
    names_source: SourceUrl | None = None
    names: tuple[VariableName, ...] = ()
    """Further names that the library reads, or that images and builds set."""
    removed: dict[VariableName, VersionText] = {}
    """Names that the library no longer reads, each with the first version that does not read it."""
    variables: tuple[EnvironmentVariable, ...]

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        all_names = [each.name for each in self.variables] + [*self.names, *self.removed]
        twice = sorted({name for name in all_names if all_names.count(name) > 1})
        if twice:
            raise ValueError(f"names: {', '.join(twice)} more than once")
        if (self.names or self.removed) and self.names_source is None:
            raise ValueError("names_source: missing")
        return self


class LauncherForwarding(_Model):
    """How a launcher forwards variables of the shell to workers on other hosts."""

    name: Annotated[str, Field(pattern=r"^[a-z]+$")]
    title: str
    forwards: tuple[str, ...] = ()
    """Names, or prefixes with `*`."""
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
    """A data file violates the schema.

    Attributes:
        file: The file.
        key: The dotted key, with the names of variables instead of indices.
        why: The problem.
    """

    def __init__(self, file: Path, key: str, why: str) -> None:
        self.file, self.key, self.why = file, key, why
        super().__init__(": ".join(part for part in (file.name, key, why) if part))


@dataclass(frozen=True)
class KnownVariable:
    """A variable with its library."""

    variable: EnvironmentVariable
    library: LibraryVariables


@dataclass(frozen=True)
class VariableTable:
    """All libraries, variables and launchers."""

    libraries: tuple[LibraryVariables, ...]
    known: Mapping[str, KnownVariable]
    names: frozenset[str]
    """All known names, including those that nothing reads."""
    launchers: Mapping[str, LauncherForwarding]

    def library_of(self, name: str) -> LibraryVariables | None:
        """Returns the library with the longest matching prefix; None if no prefix matches."""
        prefix = self.prefix_of(name)
        return next((each for each in self.libraries if prefix in each.prefixes), None) if prefix else None

    def prefix_of(self, name: str) -> str:
        """Returns the longest matching prefix of a library; "" if none matches."""
        matching = (each for library in self.libraries for each in library.prefixes if name.startswith(each))
        return max(matching, key=len, default="")

    def is_user_defined(self, name: str) -> bool:
        """Whether a name has a prefix with which users may choose any name."""
        return any(fnmatchcase(name, f"{begin}*") for library in self.libraries for begin in library.user_prefixes)


@cache
def load_variables(folder: Path = DATA_FOLDER) -> VariableTable:
    """Reads the data files of a folder.

    Raises:
        BadVariableData: A file violates the schema, or two files have the same variable.
    """
    libraries = [
        _read_file(file, LibraryVariables) for file in sorted(folder.glob("*.yaml")) if file.name != LAUNCHERS_FILE
    ]
    known: dict[str, KnownVariable] = {}
    for library in libraries:
        for variable in library.variables:
            if variable.name in known:
                where = known[variable.name].library.library
                raise BadVariableData(folder / f"{library.library}.yaml", variable.name, f"is also in {where}.yaml")
            known[variable.name] = KnownVariable(variable, library)
    names = frozenset(known) | {name for library in libraries for name in (*library.names, *library.removed)}
    launchers_file = folder / LAUNCHERS_FILE
    launchers = _read_file(launchers_file, LauncherTable).launchers if launchers_file.is_file() else ()
    return VariableTable(tuple(libraries), known, names, {each.name: each for each in launchers})


def _read_file(file: Path, shape: type[_Shape]) -> _Shape:
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=_LOADER)
        return shape.model_validate(values)
    except yaml.YAMLError as error:
        raise BadVariableData(file, "", f"not YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise BadVariableData(file, _dotted_key(values, first["loc"]), first["msg"]) from error


def _dotted_key(values: Any, location: tuple[int | str, ...]) -> str:
    """Returns the dotted key, with names instead of indices."""
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
    """Returns the leading numbers of a version: `(2, 27, 3)` for `2.27.3+cuda12.2`; empty if there are none."""
    found = re.match(r"\D{0,3}(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def version_reached(installed: str | None, wanted: str | None) -> bool | None:
    """Whether the installed version is at least `wanted`; None if one of them is unknown."""
    if installed is None or wanted is None or not version_numbers(installed):
        return None
    have, want = version_numbers(installed), version_numbers(wanted)
    width = max(len(have), len(want))
    return have + (0,) * (width - len(have)) >= want + (0,) * (width - len(want))
