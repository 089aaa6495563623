"""The tables of what each option of another framework becomes: a field, nothing, or something that is not here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any, Literal

import yaml

MappingKind = Literal["converted", "unneeded", "unsupported"]


@dataclass(frozen=True, slots=True)
class MappedOption:
    """What becomes of an option."""

    names: tuple[str, ...]
    """Its newest name, then older ones; `*` stands for anything."""
    to: tuple[str, ...] = ()
    """The fields that get its value; empty if there are none."""
    by_rule: bool = False
    """Whether a rule computes the fields, from this option and others; else the value is copied."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """For a copied option, the value of the field for each value of the option; any value as it is when empty."""
    given_only: bool = False
    """Whether the source's default is not written: it concerns how a run works, and not what it learns."""
    unneeded: str = ""
    """Why it needs no counterpart."""
    unsupported: str = ""
    """What to do without it."""
    neutral: tuple[Any, ...] | None = None
    """Values of an unsupported option that change nothing; the option's default and its null values when absent."""
    programs: tuple[str, ...] = ()
    """The programs that the row applies to; all when empty."""
    remark: str = ""
    group: int = 0
    """The entry of the file that it is from, which may be about several options (`each`)."""

    @property
    def kind(self) -> MappingKind:
        """What becomes of it."""
        return "converted" if self.to else "unneeded" if self.unneeded else "unsupported"


@dataclass(frozen=True, slots=True)
class MappingTable:
    """The rows of a framework."""

    framework: str
    rows: tuple[MappedOption, ...]
    others: "MappingTable | None" = None
    """The table for all options that this one has no row for."""
    shown: tuple[str, ...] = ()
    """Options of the other table that the page for users shows, too."""

    @property
    def all_rows(self) -> tuple[MappedOption, ...]:
        """The rows of this table and of the one for other options."""
        return self.rows + (self.others.all_rows if self.others is not None else ())

    def row(self, name: str, program: str) -> MappedOption | None:
        """The row of an option under any of its names: an exact one, else that with the longest pattern. Of several,
        one for the program."""
        own = self._own_row(name, program)
        return self.others.row(name, program) if own is None and self.others is not None else own

    def _own_row(self, name: str, program: str) -> MappedOption | None:
        short = program.rpartition(".")[2]
        mine = [row for row in self.rows if not row.programs or short in row.programs]
        exact = [row for row in mine if name in row.names]
        if exact:
            return max(exact, key=lambda row: bool(row.programs))
        patterns = [
            (bool(row.programs), len(pattern), index)
            for index, row in enumerate(mine)
            for pattern in row.names
            if "*" in pattern and fnmatchcase(name, pattern)
        ]
        return mine[max(patterns)[2]] if patterns else None


def _strings(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


@cache
def mapping_table(framework: str) -> MappingTable:
    """Reads the table of a framework."""
    text = resources.files("lockstep.convert").joinpath("tables", f"{framework}.yaml").read_text(encoding="utf-8")
    content, rows = yaml.safe_load(text), []
    others = mapping_table(content["also"]) if "also" in content else None
    for group, entry in enumerate(content["options"]):
        rule = entry.pop("rule", None)
        to, programs = _strings(rule or entry.pop("to", ())), _strings(entry.pop("programs", ()))
        neutral = tuple(entry.pop("neutral")) if "neutral" in entry else None
        each = [_strings(entry.pop("names"))] if "names" in entry else [(name,) for name in entry.pop("each")]
        for names in each:
            row = MappedOption(names, to, rule is not None, neutral=neutral, programs=programs, group=group, **entry)
            rows.append(row)
    return MappingTable(framework, tuple(rows), others, tuple(content.get("shown", ())))
