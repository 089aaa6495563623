"""The shape of the data files: one library each, its variables, and what is known of them."""

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Url = Annotated[str, Field(pattern=r"^(https://\S+|docs/[\w-]+\.md)$")]
"""Of Lockstep itself, the page."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Version = Annotated[str, Field(pattern=r"^\d+(\.\d+)*$")]
Gravity = Literal["error", "warning", "note"]
When = Annotated[str, Field(min_length=1)] | tuple[str, ...]
"""Which values are meant: `set` (any), `empty`, `on`, `off`, `>N`, `<N`, `~REGEX` for the whole value, a value as
it is written, or several of these."""
Kind = Literal[
    "boolean", "flag", "integer", "number", "choice", "choices", "interface", "address", "port", "path", "text"
]
"""flag: 0 or 1, and a word counts as 0; choices: several of `values`, by commas."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Harm(_Model):
    """What a value does to a run when nobody looks for a fault any more, or anywhere."""

    when: When = "on"
    since: Version | None = None
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


class Conflict(_Model):
    """Two variables that contradict each other."""

    when: When = "set"
    other: Name
    other_when: When = "set"
    severity: Gravity = "warning"
    why: str
    fix: str = ""


class Variable(_Model):
    name: Name
    readers: tuple[str, ...]
    """Who reads it. Nobody where it is empty: then `instead` says what is meant, or that there is no such thing."""
    does: str
    """What it really does."""
    use: str = ""
    hurts: str = ""
    kind: Kind = "text"
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
    since: Version | None = None
    until: Version | None = None
    """The first version that does not read it any more."""
    renamed: Name | None = None
    renamed_since: Version | None = None
    instead: str = ""
    left_on: tuple[Harm, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    differs: Gravity | Literal["expected"] = "note"
    """What it means where hosts have other values; expected: each has its own."""
    secret: bool = False
    sources: tuple[Url, ...] = Field(min_length=1)

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


class Library(_Model):
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
    links: tuple[Url, ...] = ()
    """Sources that several variables share."""
    names_source: Url | None = None
    names: tuple[Name, ...] = ()
    """Further names that it reads, or that images and builds set, of which nothing is said here."""
    gone: dict[Name, Version] = {}
    """Names that it read once, of which nothing else is said here: the first version that does not any more."""
    variables: tuple[Variable, ...]

    @model_validator(mode="after")
    def _once(self) -> Self:
        every = [each.name for each in self.variables] + [*self.names, *self.gone]
        twice = sorted({name for name in every if every.count(name) > 1})
        if twice:
            raise ValueError(f"names: {', '.join(twice)} more than once")
        if (self.names or self.gone) and self.names_source is None:
            raise ValueError("names_source: missing")
        return self


class Launcher(_Model):
    """How variables of the shell that starts a job reach its workers on other hosts."""

    name: Annotated[str, Field(pattern=r"^[a-z]+$")]
    title: str
    forwards: tuple[str, ...] = ()
    """Names, or beginnings with `*`."""
    why: str
    fix: str
    sources: tuple[Url, ...] = Field(min_length=1)


class Launchers(_Model):
    launchers: tuple[Launcher, ...]
