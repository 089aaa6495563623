"""Which options there are: tables made from the programs' own parsers, with the releases that have them."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class Option:
    """An option as the newest release that has it declares it."""

    name: str
    type: str = "str"
    default: Any = None
    since: str | None = None
    """The first of the releases compared that has it; None: the first one compared."""
    until: str | None = None
    """The last one; None: the newest."""
    nargs: str | int | None = None
    choices: tuple[Any, ...] = ()
    only: tuple[str, ...] = ()
    """The model engines whose config has it."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """What took an option's place."""

    to: tuple[str, ...]
    note: str = ""
    refused: bool = False
    """The program ends with an error that names it."""


@dataclass(frozen=True, slots=True)
class Table:
    """The options of one program, or of several dataclasses together."""

    framework: str
    versions: tuple[str, ...]
    source: str
    options: Mapping[str, Option]
    renamed: Mapping[str, Renamed] = field(default_factory=dict)

    def at(self, version: str) -> dict[str, Option]:
        """What `version`, one of those compared, knows."""
        index = self.versions.index(version)
        return {name: option for name, option in self.options.items() if self._within(option, index)}

    def _within(self, option: Option, index: int) -> bool:
        first = self.versions.index(option.since) if option.since in self.versions else 0
        last = self.versions.index(option.until) if option.until in self.versions else len(self.versions) - 1
        return first <= index <= last

    def version_for(self, names: Iterable[str], installed: str | None = None) -> str:
        """The release to judge by: the one that is installed, else the newest of those that know most of `names`."""
        if installed is not None:
            older = [version for version in self.versions if _numbers(version) <= _numbers(installed)]
            return older[-1] if older else self.versions[0]
        given = set(names)
        return max(
            self.versions, key=lambda version: (len(given & self.at(version).keys()), self.versions.index(version))
        )

    def nearest(self, name: str, version: str) -> list[str]:
        """Options of `version` that are spelled like `name`, the nearest first; else one of another version."""
        known = list(self.at(version))
        leaf = name.rpartition(".")[2]
        close = difflib.get_close_matches(name, known, n=2, cutoff=0.82)
        same_leaf = [each for each in known if each.rpartition(".")[2] == leaf]
        if close:
            return close
        if same_leaf and len(same_leaf) <= 12:
            return difflib.get_close_matches(name, same_leaf, n=2, cutoff=0.0)
        leaves = {each.rpartition(".")[2]: each for each in known}
        by_leaf = [leaves[each] for each in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.85)]
        return by_leaf or difflib.get_close_matches(name, self.options, n=1, cutoff=0.85)


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


@cache
def data(name: str) -> Any:
    """One of the data files beside this module."""
    text = resources.files("lockstep.doctor.configs").joinpath("options", f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, _Loader)


@cache
def table(framework: str, *programs: str) -> Table:
    """Of `framework`; several `programs` (dataclasses) are taken together. KeyError: there is no list of such a one."""
    content = data(framework)
    options: dict[str, Option] = {}
    for program in programs:
        for name, said in content["programs"][program]["options"].items():
            choices, only = tuple(said.get("choices", ())), tuple(said.get("only", ()))
            options[name] = Option(**{"name": name, **said, "choices": choices, "only": only})
    renames = data("renames")[framework]["options"]
    renamed = {
        name: Renamed(tuple(said["to"]), said.get("note", ""), said.get("refused", False))
        for name, said in renames.items()
    }
    source = content["programs"][programs[0]]["source"]
    return Table(framework, tuple(content["versions"]), source, options, renamed)


def programs(framework: str) -> tuple[str, ...]:
    """Of which there is a list."""
    return tuple(data(framework)["programs"])
