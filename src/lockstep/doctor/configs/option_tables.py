"""Tables of the options that each framework release has, and findings about unknown, removed or misspelt options."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import yaml

from lockstep.doctor.configs.config_settings import UNKNOWN_VALUE, ConfigFindings, ConfigSetting

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """An option as declared by the newest release that has it."""

    name: str
    type: str = "str"
    default: Any = None
    since: str | None = None
    """First compared release that has it; None: the first one."""
    until: str | None = None
    """Last compared release that has it; None: the newest."""
    nargs: str | int | None = None
    choices: tuple[Any, ...] = ()
    only: tuple[str, ...] = ()
    """Model engines whose config has it."""


@dataclass(frozen=True, slots=True)
class RenamedOption:
    """Replacement of an option."""

    to: tuple[str, ...]
    note: str = ""
    refused: bool = False
    """Whether the program refuses the old option with an error that names it."""


@dataclass(frozen=True, slots=True)
class OptionTable:
    """The options of one program, or of several dataclasses together."""

    framework: str
    versions: tuple[str, ...]
    source: str
    options: Mapping[str, OptionSpec]
    renamed: Mapping[str, RenamedOption] = field(default_factory=dict)

    def at(self, version: str) -> dict[str, OptionSpec]:
        """The options of `version`, one of the compared releases."""
        index = self.versions.index(version)
        return {name: option for name, option in self.options.items() if self._within(option, index)}

    def _within(self, option: OptionSpec, index: int) -> bool:
        first = self.versions.index(option.since) if option.since in self.versions else 0
        last = self.versions.index(option.until) if option.until in self.versions else len(self.versions) - 1
        return first <= index <= last

    def version_for(self, names: Iterable[str], installed: str | None = None) -> str:
        """The release to judge by: the installed one, else the newest of those with most of `names`."""
        if installed is not None:
            older = [version for version in self.versions if _version_key(version) <= _version_key(installed)]
            return older[-1] if older else self.versions[0]
        given = set(names)
        return max(
            self.versions, key=lambda version: (len(given & self.at(version).keys()), self.versions.index(version))
        )

    def nearest(self, name: str, version: str) -> list[str]:
        """Options of `version` with a similar name, nearest first; else one of another version."""
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


def _version_key(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


@cache
def read_option_data(name: str) -> Any:
    """Reads one of the data files next to this module."""
    text = resources.files("lockstep.doctor.configs").joinpath("options", f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, _Loader)


@cache
def option_table(framework: str, *programs: str) -> OptionTable:
    """The table of `framework`; several `programs` (dataclasses) are combined. Raises KeyError if there is none."""
    content = read_option_data(framework)
    options: dict[str, OptionSpec] = {}
    for program in programs:
        for name, entry in content["programs"][program]["options"].items():
            choices, only = tuple(entry.get("choices", ())), tuple(entry.get("only", ()))
            options[name] = OptionSpec(**{"name": name, **entry, "choices": choices, "only": only})
    renames = read_option_data("renames")[framework]["options"]
    renamed = {
        name: RenamedOption(tuple(entry["to"]), entry.get("note", ""), entry.get("refused", False))
        for name, entry in renames.items()
    }
    source = content["programs"][programs[0]]["source"]
    return OptionTable(framework, tuple(content["versions"]), source, options, renamed)


def option_programs(framework: str) -> tuple[str, ...]:
    """Programs of `framework` that have a table."""
    return tuple(read_option_data(framework)["programs"])


@dataclass(frozen=True, slots=True)
class OptionSyntax:
    """How a program parses its options."""

    dashes: str = "--"
    """Prefix of a name."""
    consequence: str = "The program exits with an error at startup."
    guessed: bool = False
    """Whether the version is guessed from the options: then those that newer versions removed deserve a warning."""
    fatal: bool = True
    """Whether the program refuses unknown names."""


def judge_options(
    advice: ConfigFindings,
    table: OptionTable,
    settings: Iterable[ConfigSetting],
    version: str,
    spelling: OptionSyntax,
    strict: bool = True,
) -> None:
    """Judges names and values. Without `strict` the program may have options of its own, so that only near misses are
    reported."""
    known, newest = table.at(version), table.versions[-1]
    later = table.at(newest)
    leaving: list[ConfigSetting] = []
    for setting in settings:
        name = setting.name
        if name in known or _is_nested(name, known):
            if version != newest and name not in later and not _is_nested(name, later):
                leaving.append(setting)
            if name in known:
                _judge_value(advice, table, known[name], setting, spelling)
            continue
        _judge_unknown(advice, table, setting, version, spelling, strict)
    _judge_leaving(advice, table, leaving, spelling)


def _judge_leaving(
    advice: ConfigFindings, table: OptionTable, leaving: list[ConfigSetting], spelling: OptionSyntax
) -> None:
    """Reports all options that newer versions removed in one finding."""
    if not leaving:
        return
    newest = table.versions[-1]
    leaving_text = "; ".join(
        f"{spelling.dashes}{each.name}{_replacement_text(table, each.name, newest)}" for each in leaving
    )
    add = advice.warn if spelling.guessed else advice.note
    add(
        "option-gone-later",
        f"removed in {table.framework} {newest}: {leaving_text}",
        source=table.source,
        at=leaving[0].place,
    )


def _is_nested(name: str, known: dict[str, OptionSpec]) -> bool:
    """Whether it is inside an open mapping, or is the mapping around options."""
    parts = name.split(".")
    for index in range(1, len(parts)):
        around = known.get(".".join(parts[:index]))
        if around is not None and around.type in ("open", "dict"):
            return True
    return any(each.startswith(f"{name}.") for each in known)


def _replacement_text(table: OptionTable, name: str, version: str) -> str:
    renamed = table.renamed.get(name)
    if renamed is None:
        return ""
    known = table.at(version)
    to = [each for each in renamed.to if each in known]
    note = f" ({renamed.note})" if renamed.note else ""
    return f", now {' and '.join(to)}{note}" if to else f", without replacement{note}"


def _judge_unknown(
    advice: ConfigFindings,
    table: OptionTable,
    setting: ConfigSetting,
    version: str,
    spelling: OptionSyntax,
    strict: bool,
) -> None:
    name, framework = setting.name, table.framework
    if setting.removed:
        seen = f"~{name}: {framework} {version} has no such option to remove"
        advice.error("option-unknown", seen, spelling.consequence, at=setting.place)
    elif name in table.options or name in table.renamed:
        _judge_removed(advice, table, setting, version, spelling)
    else:
        _judge_misspelt(advice, table, setting, version, spelling, strict)


def _judge_removed(
    advice: ConfigFindings, table: OptionTable, setting: ConfigSetting, version: str, spelling: OptionSyntax
) -> None:
    """Reports an option of another version."""
    name, framework = setting.name, table.framework
    option, renamed = table.options.get(name), table.renamed.get(name)
    fatal, became = spelling.fatal or (renamed is not None and renamed.refused), _replacement_text(table, name, version)
    if option is not None and option.until is not None and _older(table, option.until, version):
        when = f"was removed after {framework} {option.until}"
    elif option is not None and option.since is not None:
        following = table.versions[table.versions.index(version) + 1]
        fatal, became = fatal and option.since != following, ""
        when = f"was added in {framework} {option.since} or shortly before, later than {version}, which has the others"
    else:
        when = f"was removed in {framework} {version}"
    if setting.forced:
        fatal, when = False, f"{when}; with + it is accepted, but nothing reads it"
    add = advice.error if fatal else advice.warn
    seen, fix = f"{spelling.dashes}{name} {when}{became}", _fix(table, name, version)
    add("option-gone", seen, spelling.consequence if fatal else "", fix, table.source, setting.place)


def _judge_misspelt(
    advice: ConfigFindings,
    table: OptionTable,
    setting: ConfigSetting,
    version: str,
    spelling: OptionSyntax,
    strict: bool,
) -> None:
    """Reports an option of no version."""
    name, shown = setting.name, f"{spelling.dashes}{setting.name}"
    near = table.nearest(name, version)
    certain = bool(near) and _very_near(near[0], name)
    if setting.forced:
        if certain and near[0].count(".") == name.count("."):
            seen = f"nothing reads +{name}. Did you mean {near[0]}?"
            advice.warn("option-misspelt", seen, "", f"{near[0]}=...", table.source, setting.place)
        return
    if not strict and not certain:
        advice.note(
            "option-unknown",
            f"{shown}: unknown to {table.framework}; is it an option of the script itself?",
            at=setting.place,
        )
        return
    add = advice.error if spelling.fatal else advice.warn
    gone = _replacement_text(table, near[0], version) if near and near[0] not in table.at(version) else ""
    meant = f"; did you mean {spelling.dashes}{near[0]}{gone}?" if near else ""
    seen = f"{shown}: {table.framework} {version} has no such option{meant}"
    id, fix = ("option-misspelt", "") if near else ("option-unknown", "remove it")
    add(id, seen, spelling.consequence, fix, table.source, setting.place)


def _older(table: OptionTable, one: str, other: str) -> bool:
    return table.versions.index(one) < table.versions.index(other)


def _very_near(one: str, other: str) -> bool:
    from difflib import SequenceMatcher

    return SequenceMatcher(None, one, other).ratio() > 0.9


def _fix(table: OptionTable, name: str, version: str) -> str:
    renamed, known = table.renamed.get(name), table.at(version)
    to = [each for each in renamed.to if each in known] if renamed is not None else []
    return f"write {' and '.join(to)}" if to else f"remove {name}"


def _judge_value(
    advice: ConfigFindings, table: OptionTable, option: OptionSpec, setting: ConfigSetting, spelling: OptionSyntax
) -> None:
    """Reports an invalid value."""
    value, shown = setting.value, f"{spelling.dashes}{setting.name}"
    if value is UNKNOWN_VALUE or value is None or isinstance(value, list | dict):
        return
    text = str(value)
    if option.choices and text not in [str(each) for each in option.choices]:
        choices = ", ".join(str(each) for each in option.choices)
        advice.error(
            "option-value",
            f"{shown} {text} is not one of {choices}",
            spelling.consequence,
            source=table.source,
            at=setting.place,
        )
    elif (
        option.type in ("int", "float") and not option.nargs and not _is_number(text, option.type) and "${" not in text
    ):
        advice.error(
            "option-value",
            f"{shown} {text} is not a {'whole number' if option.type == 'int' else 'number'}",
            spelling.consequence,
            source=table.source,
            at=setting.place,
        )


def _is_number(text: str, kind: str) -> bool:
    if text.lower() in ("auto", "true", "false", "null", "none"):
        return True
    try:
        return float(text) == int(float(text)) or kind == "float"
    except (ValueError, OverflowError):
        return text.lower() in ("inf", "nan", "-inf")
