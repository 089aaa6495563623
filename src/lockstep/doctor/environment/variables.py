"""The data files, read and checked once."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from lockstep.doctor.environment.schema import Launcher, Launchers, Library, Variable

HOME = Path(__file__).parent / "data"
LAUNCHERS = "launchers.yaml"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Shape = TypeVar("_Shape", bound=BaseModel)


class BadData(ValueError):
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
class Known:
    """A variable with the library whose file it stands in."""

    variable: Variable
    library: Library


@dataclass(frozen=True)
class Table:
    """All that is known."""

    libraries: tuple[Library, ...]
    known: Mapping[str, Known]
    names: frozenset[str]
    """All names that somebody reads or of which it is known that nobody does."""
    launchers: Mapping[str, Launcher]

    def library_of(self, name: str) -> Library | None:
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
def load(home: Path = HOME) -> Table:
    """Reads a folder of data files.

    Raises:
        BadData: naming file, key and what is wrong.
    """
    libraries = [_read(file, Library) for file in sorted(home.glob("*.yaml")) if file.name != LAUNCHERS]
    known: dict[str, Known] = {}
    for library in libraries:
        for variable in library.variables:
            if variable.name in known:
                where = known[variable.name].library.library
                raise BadData(home / f"{library.library}.yaml", variable.name, f"{where}.yaml has it already")
            known[variable.name] = Known(variable, library)
    names = frozenset(known) | {name for library in libraries for name in (*library.names, *library.gone)}
    launchers = _read(home / LAUNCHERS, Launchers).launchers if (home / LAUNCHERS).is_file() else ()
    return Table(tuple(libraries), known, names, {each.name: each for each in launchers})


def _read(file: Path, shape: type[_Shape]) -> _Shape:
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=_LOADER)
        return shape.model_validate(values)
    except yaml.YAMLError as error:
        raise BadData(file, "", f"no YAML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise BadData(file, _place(values, first["loc"]), first["msg"]) from error


def _place(values: Any, location: tuple[int | str, ...]) -> str:
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


def version(text: str) -> tuple[int, ...]:
    """`(2, 27, 3)` for `2.27.3+cuda12.2`; what comes after the numbers does not count, empty where there are none."""
    found = re.match(r"\D{0,3}(\d+(?:\.\d+)*)", text)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def reached(installed: str | None, wanted: str | None) -> bool | None:
    """Whether the installed version is at least the wanted one; None where one of them is not known."""
    if installed is None or wanted is None or not version(installed):
        return None
    have, want = version(installed), version(wanted)
    width = max(len(have), len(want))
    return have + (0,) * (width - len(have)) >= want + (0,) * (width - len(want))
