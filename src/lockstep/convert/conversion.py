"""A conversion in progress: the options of the source by their newest names, the fields set so far, and what became of
each option."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lockstep.base.secrets import HIDDEN, is_secret_name, redact, redact_text, secret_kind
from lockstep.convert.inference_stages import split_stage
from lockstep.convert.option_mapping import MappedOption, mapping_table
from lockstep.convert.source_command import FRAMEWORKS, SourceCommand, known_value
from lockstep.doctor.configs.config_settings import ConfigSetting, ConfigSettings
from lockstep.doctor.configs.option_tables import OptionSpec

OutcomeKind = Literal["converted", "unneeded", "unsupported", "unknown"]
_SELECT = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)(?:,([^}]*))?\}")
_UNRESOLVED = "its value is not in the file (a variable of another shell, or the output of a command): write the value"
_KEYS = ("logger.wandb.key",)
"""Options whose values are secrets, and which turn something on."""
_LARGEST = 1_000_000_000
"""No count of rows, tokens or steps is larger."""
_NO_EFFECT = "it changes nothing together with the other options"


@dataclass(frozen=True, slots=True)
class OptionOutcome:
    """What became of a given option."""

    name: str
    """As it is written in the source."""
    kind: OutcomeKind
    fields: tuple[str, ...] = ()
    text: str = ""
    """Why it needs no counterpart, or what to do without it."""
    line: int = 0


@dataclass(slots=True)
class FieldEntry:
    """A field of the new config."""

    value: Any
    names: tuple[str, ...] = ()
    """The options that it comes from, as they are written."""
    default: bool = False
    """Whether none of them is given, so that the value is the source's default."""
    keep: bool = False
    """Whether it is written even if it equals Lockstep's default."""


@dataclass(frozen=True, slots=True)
class ConversionFacts:
    """What the source does not contain, and the user knows."""

    rows: int | None = None
    """Number of rows of the training data, from which steps follow where the source counts epochs."""
    ranks: int | None = None
    """Number of processes of the trainer, where batch sizes are per process."""


@dataclass(slots=True)
class Conversion:
    """Reads options with `text`, `number`, ... (given value or default), and says what becomes of them with `put`,
    `drop` and `refuse`. Names are the newest ones of the mapping table."""

    source: SourceCommand
    facts: ConversionFacts
    fields: dict[str, FieldEntry] = field(default_factory=dict)
    outcomes: dict[str, OptionOutcome] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    """Fields whose value the source does not say, and what to do."""
    notes: list[str] = field(default_factory=list)
    given: dict[str, ConfigSetting] = field(default_factory=dict)
    """The given options with known values, by their newest name."""

    def __post_init__(self) -> None:
        for name, setting in self._one_of_each():
            if self._lacks_value(name, setting):
                self._finish(name, setting, "unsupported", text="it has no value: write one after it")
            elif name in _KEYS and setting.value not in (None, ""):
                self.given[name] = replace(setting, value=HIDDEN)  # that there is a key counts; it is kept nowhere
            elif known_value(setting):
                self.given[name] = setting
            else:
                self._finish(name, setting, "unsupported", text=_UNRESOLVED)
        for name in [] if self.source.flags else [each for each in self.given if "${" in str(self.raw(each))]:
            self._finish(name, self.given.pop(name), "unsupported", text=_UNRESOLVED)

    def _one_of_each(self) -> list[tuple[str, ConfigSetting]]:
        """Each option that is set, under its newest name. Where it is set under several, the first of the table's row
        counts, and the others are listed."""
        named: dict[str, list[ConfigSetting]] = {}
        for setting in self.source.settings:
            if not setting.removed:
                named.setdefault(self.newest(setting.name), []).append(setting)
        found = []
        for name, settings in named.items():
            row = self.row(name)
            first = min(settings, key=lambda each: row.names.index(each.name)) if row and settings[1:] else settings[0]
            for other in settings:
                if other is first:
                    continue
                same = _plain(other.value) == _plain(first.value)
                text = f"{self._written(first.name)} is given, too, " + (
                    "with the same value" if same else "and its value is taken: leave one of them out"
                )
                self._finish(other.name, other, "unneeded" if same else "unsupported", text=text)
            found.append((name, first))
        return found

    def _lacks_value(self, name: str, setting: ConfigSetting) -> bool:
        """Whether a flag that needs a value is the last word, or is followed by another flag."""
        option = self.option(name)
        takes = option is not None and option.type not in ("flag", "bool")
        return self.source.flags and takes and (setting.value is True or setting.value == [])

    def newest(self, name: str) -> str:
        """The first name of the option's row in the table."""
        row = self.row(name)
        return row.names[0] if row is not None and name in row.names else name

    def row(self, name: str) -> MappedOption | None:
        """The row of an option in the table."""
        return mapping_table(self.source.framework).row(name, self.source.program)

    @property
    def framework(self) -> str:
        """The name of the framework."""
        return FRAMEWORKS[self.source.framework]

    # What the source says.

    def option(self, name: str) -> OptionSpec | None:
        """The declaration of an option in the source's version, under any of its names."""
        row = self.row(name)
        names = row.names if row is not None and name in row.names else (name,)
        return next((self.source.options[each] for each in names if each in self.source.options), None)

    def has(self, name: str) -> bool:
        """Whether the option is given, with a value."""
        return name in self.given and self.raw(name) not in (None, "", "null", "None")

    def raw(self, name: str, depth: int = 0) -> Any:
        """The given value or the default, with `${...}` of another option resolved; None without either."""
        option = self.option(name)
        value = self.given[name].value if name in self.given else option.default if option is not None else None
        match = _SELECT.fullmatch(value) if isinstance(value, str) else None
        if isinstance(value, str) and match is None and "${" in value and depth <= 8:
            return _SELECT.sub(lambda each: self._interpolated(each, depth), value)
        if match is None or depth > 8:
            return value
        found = self.raw(self.newest(match[1]), depth + 1)
        return match[2] if found is None else found

    def _interpolated(self, match: re.Match[str], depth: int) -> str:
        found = self.raw(self.newest(match[1]), depth + 1)
        return match[0] if found is None else str(found)

    def _settings(self, name: str) -> ConfigSettings:
        return ConfigSettings(defaults={name: self.raw(name)})

    def text(self, name: str) -> str | None:
        """The value as a text; None if there is none."""
        return self._settings(name).text(name) or None

    def on(self, name: str) -> bool:
        """Whether the value is true."""
        return self._settings(name).flag(name) is True

    def number(self, name: str) -> float | None:
        """The value as a number; None if there is none. A given text is refused."""
        value = self._settings(name).number(name)
        if value is None and self.has(name) and not isinstance(self.raw(name), bool):
            self.refuse(name, "it is not a number")
        return value

    def integer(self, name: str) -> int | None:
        """The value as a whole number; None if there is none."""
        value = self.number(name)
        if value is not None and abs(value) > _LARGEST:
            self.refuse(name, f"it is larger than {_LARGEST:,}")
            return None
        if value is not None and value != int(value):
            self.refuse(name, "it is not a whole number")
            return None
        return None if value is None else int(value)

    def number_or(self, name: str, default: float) -> float:
        """The value as a number, also 0; `default` if there is none."""
        value = self.number(name)
        return default if value is None else value

    def positive(self, name: str, default: float) -> float:
        """The value as a number above 0; `default` if there is none. Another one is refused."""
        value = self.number_or(name, default)
        if value <= 0:
            self.refuse(name, f"it is not above 0: {default:g} takes its place")
        return value if value > 0 else default

    def count(self, name: str, default: int) -> int:
        """The value as a whole number of at least 1; `default` if there is none. A smaller one is refused."""
        value = self.integer(name)
        if value is not None and value < 1:
            self.refuse(name, f"it is less than 1: {default} takes its place")
        return default if value is None or value < 1 else value

    def items(self, name: str) -> list[str]:
        """The value as a list of texts: a list, or a text with commas, maybe in brackets."""
        value = self.raw(name)
        if value is None or value == "":
            return []
        if not isinstance(value, list):
            text = str(value).strip()
            value = (text[1:-1] if text[:1] == "[" and text[-1:] == "]" else text).split(",")
        return [str(each).strip("'\" ") for each in value if str(each).strip("'\" ")]

    def numbers(self, name: str) -> list[float]:
        """The value as a list of numbers; empty if it is none."""
        try:
            return [float(each) for each in self.items(name)]
        except ValueError:
            self.refuse(name, "it is not a list of numbers")
            return []

    # What becomes of it.

    def put(self, key: str, value: Any, *names: str, keep: bool = False, default: bool = False) -> None:
        """Sets a field from options, of which some may have their defaults."""
        used = [name for name in names if name in self.given]
        shown = tuple(self.shown(name) for name in (used or names[:2]))
        self.fields[key] = FieldEntry(value, shown, default=default or (bool(names) and not used), keep=keep)
        for name in used:
            before = self.outcomes.get(name)
            if before is None or before.kind in ("converted", "unneeded"):
                fields = before.fields if before is not None else ()
                self._finish(name, self.given[name], "converted", tuple(dict.fromkeys((*fields, key))))

    def drop(self, name: str, why: str) -> None:
        """Says that an option needs no counterpart, unless something became of it already."""
        if name in self.given and name not in self.outcomes:
            self._finish(name, self.given[name], "unneeded", text=why)

    def refuse(self, name: str, remedy: str) -> None:
        """Says that an option is not supported, if it is given."""
        if name in self.given:
            self._finish(name, self.given[name], "unsupported", text=remedy)

    def passes_on(self, name: str) -> bool:
        """Whether the value may be written for a function or an engine that gets it as it is. One that is a secret, by
        its name or its form, is refused."""
        leaf, value = name.rpartition(".")[2], self.raw(name)
        if not is_secret_name(leaf) and redact(value, name=leaf) == value:
            return True
        self.refuse(name, "a secret is written into no config: read it from a variable of the environment")
        return False

    def need(self, key: str, remedy: str) -> None:
        """Says that the source does not contain the value of a field."""
        self.missing.setdefault(key, remedy)

    def note(self, text: str) -> None:
        """Adds a remark that asks for nothing."""
        if text not in self.notes:
            self.notes.append(text)

    def shown(self, name: str) -> str:
        """An option as it is written: with dashes if it is a flag."""
        return self._written(self.given[name].name if name in self.given else self._default_name(name))

    def _written(self, name: str) -> str:
        stage, plain = split_stage(name)
        flag = f"--{plain}" if self.source.flags else plain
        return redact_text(f"{stage} {flag}" if stage else flag)

    def _default_name(self, name: str) -> str:
        row = self.row(name)
        names = row.names if row is not None and name in row.names else (name,)
        return next((each for each in names if each in self.source.options), name)

    def shown_value(self, name: str) -> str:
        """The value for a message; hidden if it may be a secret."""
        value = str(self.raw(name))
        hidden = is_secret_name(name) or secret_kind(value) is not None
        return HIDDEN if hidden else redact_text(re.sub(r"\s+", " ", value)[:80])

    def _finish(
        self, name: str, setting: ConfigSetting, kind: OutcomeKind, fields: tuple[str, ...] = (), text: str = ""
    ) -> None:
        self.outcomes[name] = OptionOutcome(
            self._written(setting.name), kind, fields, redact_text(text), setting.location.line
        )

    def apply_table(self) -> None:
        """Applies the table to all options of which no rule said what becomes, and to the defaults of copied ones."""
        for row in mapping_table(self.source.framework).all_rows:
            name = row.names[0]
            if row.to and not row.by_rule and self.row(name) is row and name not in self.outcomes:
                self._copy(row, name)
        for name, setting in list(self.given.items()):
            if name not in self.outcomes:
                self._finish(name, setting, *self._by_table(name))

    def _copy(self, row: MappedOption, name: str) -> None:
        value = typed_value(self.raw(name), self.option(name))
        if value in (None, "") or (row.given_only and name not in self.given):
            return
        if row.values:
            if str(value) not in row.values:
                self.refuse(name, f"{self.shown_value(name)} has no counterpart: only {', '.join(row.values)}")
                return
            value = row.values[str(value)]
        for key in row.to:
            if key not in self.fields:
                self.put(key, value, name)

    def _by_table(self, name: str) -> tuple[OutcomeKind, tuple[str, ...], str]:
        row = self.row(name)
        if row is None:
            if self.option(name) is not None:
                return "unsupported", (), "there is no counterpart"
            return "unknown", (), f"neither {self.framework}'s known versions nor Lockstep have it: check its spelling"
        if row.unneeded:
            return "unneeded", (), row.unneeded
        if row.to:
            return "unneeded", (), _NO_EFFECT
        if self.is_neutral(row, name):
            return "unneeded", (), "its value changes nothing"
        return "unsupported", (), row.unsupported

    def is_neutral(self, row: MappedOption, name: str) -> bool:
        """Whether an unsupported option has a value that changes nothing."""
        option, value = self.option(name), self.raw(name)
        if row.neutral is not None:
            return _plain(value) in [_plain(each) for each in row.neutral]
        off: list[Any] = [None, False, "", [], {}, "null"]
        return _plain(value) in [_plain(each) for each in (*off, *([option.default] if option is not None else ()))]

    def results(self) -> Iterator[OptionOutcome]:
        """What became of each option, in the order of the source."""
        order = [name for each in self.source.settings for name in (self.newest(each.name), each.name)]
        yield from (self.outcomes[name] for name in dict.fromkeys(order) if name in self.outcomes)
        for word in self.source.words:  # it may be a secret, unless it has the form of a name
            named = re.fullmatch(r"[A-Za-z_./=-]{1,40}", word.text) and secret_kind(word.text) is None
            shown = word.text if named else "a word"
            yield OptionOutcome(shown, "unknown", (), "it is no option: is a backslash missing?", word.location.line)


def _plain(value: Any) -> str:
    """A value for comparison: numbers by their value, whatever they are written as."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_plain(each) for each in value) + "]"
    text = str(value).strip().strip("'\"").lower()
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def typed_value(value: Any, option: OptionSpec | None) -> Any:
    """A value of a command line with the type that the option declares, or that its text has."""
    if isinstance(value, list):
        kind = "any" if option is None or option.type == "list" else option.type
        return [typed_value(each, OptionSpec("", kind)) for each in value]
    if not isinstance(value, str):
        return value
    kind = option.type if option is not None else "any"
    if kind == "str" and option is not None and option.default is None:
        kind = "any"
    if kind == "list":
        return [typed_value(each, None) for each in re.split(r"[,\s]+", value.strip("[]() ")) if each]
    lowered = value.lower()
    if kind in ("any", "flag", "bool") and lowered in ("true", "false"):
        return lowered == "true"
    if kind in ("int", "float", "any") and re.fullmatch(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?", value):
        number = float(value)
        if not math.isfinite(number):
            return value
        whole = number == int(number) and (kind == "int" or re.fullmatch(r"[-+]?[\d_]+", value))
        return int(number) if whole else number
    return value
