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
    """First of the compared releases that has this option; None: the oldest one."""
    until: str | None = None
    """Last of the compared releases that has this option; None: the newest one."""
    nargs: str | int | None = None
    choices: tuple[Any, ...] = ()
    only: tuple[str, ...] = ()
    """The model engines of which the config has this option; empty: all."""


@dataclass(frozen=True, slots=True)
class RenamedOption:
    """What replaces a renamed or removed option."""

    to: tuple[str, ...]
    note: str = ""
    refused: bool = False
    """Whether the program refuses the old name with an error message of its own."""


@dataclass(frozen=True, slots=True)
class OptionTable:
    """The options of one program, or of several dataclasses together."""

    framework: str
    versions: tuple[str, ...]
    source: str
    options: Mapping[str, OptionSpec]
    renamed: Mapping[str, RenamedOption] = field(default_factory=dict)

    def at(self, version: str) -> dict[str, OptionSpec]:
        """The options of one of the compared releases."""
        index = self.versions.index(version)
        return {name: option for name, option in self.options.items() if self._within(option, index)}

    def _within(self, option: OptionSpec, index: int) -> bool:
        first = self.versions.index(option.since) if option.since in self.versions else 0
        last = self.versions.index(option.until) if option.until in self.versions else len(self.versions) - 1
        return first <= index <= last

    def version_for(self, names: Iterable[str], installed: str | None = None) -> str:
        """The release to judge by: the installed one, or the newest of those that know most of `names`."""
        if installed is not None:
            older = [version for version in self.versions if _version_key(version) <= _version_key(installed)]
            return older[-1] if older else self.versions[0]
        given = set(names)
        return max(
            self.versions, key=lambda version: (len(given & self.at(version).keys()), self.versions.index(version))
        )

    def nearest(self, name: str, version: str) -> list[str]:
        """Options of `version` with a similar name, most similar first; if there is none, one of another version."""
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
    """Reads a data file of the folder `options`."""
    text = resources.files("lockstep.doctor.configs").joinpath("options", f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, _Loader)


@cache
def option_table(framework: str, *programs: str) -> OptionTable:
    """The options of a framework's programs or dataclasses, combined. Raises KeyError if there is no such table."""
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
    """The programs of a framework of which the options are known."""
    return tuple(read_option_data(framework)["programs"])


@dataclass(frozen=True, slots=True)
class OptionPolicy:
    """How a program writes its options, and what it does with unknown ones."""

    prefix: str = "--"
    """What precedes a name."""
    consequence: str = "The program exits with an error at startup."
    """What happens because of an unknown name."""
    version_guessed: bool = False
    """Whether the version is a guess; if so, options that newer versions removed deserve a warning."""
    refuses_unknown: bool = True


def judge_options(
    advice: ConfigFindings,
    table: OptionTable,
    settings: Iterable[ConfigSetting],
    version: str,
    policy: OptionPolicy,
    strict: bool = True,
) -> None:
    """Judges names and values of options.

    Args:
        strict: whether the table contains all options of the program; if not, only likely misspellings are reported.
    """
    known, newest = table.at(version), table.versions[-1]
    later = table.at(newest)
    removed_later: list[ConfigSetting] = []
    for setting in settings:
        name = setting.name
        if name in known or _is_nested(name, known):
            if version != newest and name not in later and not _is_nested(name, later):
                removed_later.append(setting)
            if name in known:
                _judge_value(advice, table, known[name], setting, policy)
            continue
        _judge_unknown(advice, table, setting, version, policy, strict)
    _report_removed_later(advice, table, removed_later, policy)


def _report_removed_later(
    advice: ConfigFindings, table: OptionTable, settings: list[ConfigSetting], policy: OptionPolicy
) -> None:
    """Reports in one finding all options that the newest version no longer has."""
    if not settings:
        return
    newest = table.versions[-1]
    names = "; ".join(f"{policy.prefix}{each.name}{_replacement_text(table, each.name, newest)}" for each in settings)
    add = advice.warn if policy.version_guessed else advice.note
    add(
        "option-gone-later",
        f"removed in {table.framework} {newest}: {names}",
        source=table.source,
        at=settings[0].location,
    )


def _is_nested(name: str, known: dict[str, OptionSpec]) -> bool:
    """Whether the name is inside a mapping with arbitrary keys, or is itself a mapping that contains options."""
    parts = name.split(".")
    for index in range(1, len(parts)):
        parent = known.get(".".join(parts[:index]))
        if parent is not None and parent.type in ("open", "dict"):
            return True
    return any(each.startswith(f"{name}.") for each in known)


def _replacement_text(table: OptionTable, name: str, version: str) -> str:
    """What replaces an option in `version`, as the end of a sentence; empty if that is not known."""
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
    policy: OptionPolicy,
    strict: bool,
) -> None:
    name, framework = setting.name, table.framework
    if setting.removed:
        seen = f"~{name}: {framework} {version} has no such option to remove"
        advice.error("option-unknown", seen, policy.consequence, at=setting.location)
    elif name in table.options or name in table.renamed:
        _judge_removed(advice, table, setting, version, policy)
    else:
        _judge_misspelt(advice, table, setting, version, policy, strict)


def _judge_removed(
    advice: ConfigFindings, table: OptionTable, setting: ConfigSetting, version: str, policy: OptionPolicy
) -> None:
    """Reports an option that another version has."""
    name, framework = setting.name, table.framework
    option, renamed = table.options.get(name), table.renamed.get(name)
    fatal = policy.refuses_unknown or (renamed is not None and renamed.refused)
    replacement = _replacement_text(table, name, version)
    if option is not None and option.until is not None and _is_older(table, option.until, version):
        when = f"was removed after {framework} {option.until}"
    elif option is not None and option.since is not None:
        following = table.versions[table.versions.index(version) + 1]
        fatal, replacement = fatal and option.since != following, ""
        when = f"was added in {framework} {option.since} or shortly before, but the other options fit version {version}"
    else:
        when = f"was removed in {framework} {version}"
    if setting.forced:
        fatal, when = False, f"{when}; with + it is accepted, but nothing reads it"
    add = advice.error if fatal else advice.warn
    seen, fix = f"{policy.prefix}{name} {when}{replacement}", _removal_fix(table, name, version)
    add("option-gone", seen, policy.consequence if fatal else "", fix, table.source, setting.location)


def _judge_misspelt(
    advice: ConfigFindings,
    table: OptionTable,
    setting: ConfigSetting,
    version: str,
    policy: OptionPolicy,
    strict: bool,
) -> None:
    """Reports an option that no version has."""
    name, shown = setting.name, f"{policy.prefix}{setting.name}"
    near = table.nearest(name, version)
    certain = bool(near) and _is_likely_typo(near[0], name)
    if setting.forced:
        if certain and near[0].count(".") == name.count("."):
            seen = f"nothing reads +{name}. Did you mean {near[0]}?"
            advice.warn("option-misspelt", seen, "", f"{near[0]}=...", table.source, setting.location)
        return
    if not strict and not certain:
        advice.note(
            "option-unknown",
            f"{shown}: unknown to {table.framework}; is it an option of the script itself?",
            at=setting.location,
        )
        return
    add = advice.error if policy.refuses_unknown else advice.warn
    replacement = _replacement_text(table, near[0], version) if near and near[0] not in table.at(version) else ""
    suggestion = f"; did you mean {policy.prefix}{near[0]}{replacement}?" if near else ""
    seen = f"{shown}: {table.framework} {version} has no such option{suggestion}"
    id, fix = ("option-misspelt", "") if near else ("option-unknown", "remove it")
    add(id, seen, policy.consequence, fix, table.source, setting.location)


def _is_older(table: OptionTable, one: str, other: str) -> bool:
    return table.versions.index(one) < table.versions.index(other)


def _is_likely_typo(one: str, other: str) -> bool:
    from difflib import SequenceMatcher

    return SequenceMatcher(None, one, other).ratio() > 0.9


def _removal_fix(table: OptionTable, name: str, version: str) -> str:
    renamed, known = table.renamed.get(name), table.at(version)
    to = [each for each in renamed.to if each in known] if renamed is not None else []
    return f"write {' and '.join(to)}" if to else f"remove {name}"


def _judge_value(
    advice: ConfigFindings, table: OptionTable, option: OptionSpec, setting: ConfigSetting, policy: OptionPolicy
) -> None:
    """Reports an invalid value."""
    value, shown = setting.value, f"{policy.prefix}{setting.name}"
    if value is UNKNOWN_VALUE or value is None or isinstance(value, list | dict):
        return
    text = str(value)
    if option.choices and text not in [str(each) for each in option.choices]:
        choices = ", ".join(str(each) for each in option.choices)
        advice.error(
            "option-value",
            f"{shown} {text} is not one of {choices}",
            policy.consequence,
            source=table.source,
            at=setting.location,
        )
    elif (
        option.type in ("int", "float") and not option.nargs and not _is_number(text, option.type) and "${" not in text
    ):
        advice.error(
            "option-value",
            f"{shown} {text} is not a {'whole number' if option.type == 'int' else 'number'}",
            policy.consequence,
            source=table.source,
            at=setting.location,
        )


def _is_number(text: str, kind: str) -> bool:
    if text.lower() in ("auto", "true", "false", "null", "none"):
        return True
    try:
        return float(text) == int(float(text)) or kind == "float"
    except (ValueError, OverflowError):
        return text.lower() in ("inf", "nan", "-inf")
