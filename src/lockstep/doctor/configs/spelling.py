"""Options that no version has, that are gone, or that are spelled wrong."""

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.doctor.configs.advice import Advice
from lockstep.doctor.configs.settings import UNKNOWN, Setting
from lockstep.doctor.configs.tables import Option, Table


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a program takes its options."""

    dashes: str = "--"
    """What stands before a name."""
    consequence: str = "The program ends with an error at its start."
    guessed: bool = False
    """Whether nothing but its options tells the version: one that newer versions do not have is worth a warning."""
    fatal: bool = True
    """Whether a name that it does not know ends it."""


def judge(
    advice: Advice, table: Table, settings: Iterable[Setting], version: str, spelling: Spelling, strict: bool = True
) -> None:
    """Findings on names and values. `strict` false: it may have options of its own, only near misses are told."""
    known, newest = table.at(version), table.versions[-1]
    later = table.at(newest)
    leaving: list[Setting] = []
    for setting in settings:
        name = setting.name
        if name in known or _below(name, known):
            if version != newest and name not in later and not _below(name, later):
                leaving.append(setting)
            if name in known:
                _value(advice, table, known[name], setting, spelling)
            continue
        _unknown(advice, table, setting, version, spelling, strict)
    _later(advice, table, leaving, spelling)


def _later(advice: Advice, table: Table, leaving: list[Setting], spelling: Spelling) -> None:
    """What a newer version than the one judged by does not have, in one finding."""
    if not leaving:
        return
    newest = table.versions[-1]
    told = "; ".join(f"{spelling.dashes}{each.name}{_became(table, each.name, newest)}" for each in leaving)
    say = advice.warn if spelling.guessed else advice.note
    say(
        "option-gone-later",
        f"gone in {table.framework} {newest}: {told}",
        source=table.source,
        at=leaving[0].place,
    )


def _below(name: str, known: dict[str, Option]) -> bool:
    """Whether it is within an open mapping, or the mapping around options."""
    parts = name.split(".")
    for index in range(1, len(parts)):
        around = known.get(".".join(parts[:index]))
        if around is not None and around.type in ("open", "dict"):
            return True
    return any(each.startswith(f"{name}.") for each in known)


def _became(table: Table, name: str, version: str) -> str:
    renamed = table.renamed.get(name)
    if renamed is None:
        return ""
    known = table.at(version)
    to = [each for each in renamed.to if each in known]
    note = f" ({renamed.note})" if renamed.note else ""
    return f", now {' and '.join(to)}{note}" if to else f", nothing took its place{note}"


def _unknown(advice: Advice, table: Table, setting: Setting, version: str, spelling: Spelling, strict: bool) -> None:
    name, framework = setting.name, table.framework
    if setting.removed:
        seen = f"~{name}: {framework} {version} has no such option to remove"
        advice.error("option-unknown", seen, spelling.consequence, at=setting.place)
    elif name in table.options or name in table.renamed:
        _gone(advice, table, setting, version, spelling)
    else:
        _misspelt(advice, table, setting, version, spelling, strict)


def _gone(advice: Advice, table: Table, setting: Setting, version: str, spelling: Spelling) -> None:
    """An option of another version."""
    name, framework = setting.name, table.framework
    option, renamed = table.options.get(name), table.renamed.get(name)
    fatal, became = spelling.fatal or (renamed is not None and renamed.refused), _became(table, name, version)
    if option is not None and option.until is not None and _older(table, option.until, version):
        when = f"is gone since {framework} {option.until}"
    elif option is not None and option.since is not None:
        following = table.versions[table.versions.index(version) + 1]
        fatal, became = fatal and option.since != following, ""
        when = f"came with {framework} {option.since} or shortly before, later than {version}, which has the others"
    else:
        when = f"is gone in {framework} {version}"
    if setting.forced:
        fatal, when = False, f"{when}; with + it is taken, and read by nothing"
    say = advice.error if fatal else advice.warn
    seen, fix = f"{spelling.dashes}{name} {when}{became}", _fix(table, name, version)
    say("option-gone", seen, spelling.consequence if fatal else "", fix, table.source, setting.place)


def _misspelt(advice: Advice, table: Table, setting: Setting, version: str, spelling: Spelling, strict: bool) -> None:
    """An option of no version."""
    name, shown = setting.name, f"{spelling.dashes}{setting.name}"
    near = table.nearest(name, version)
    certain = bool(near) and _very_near(near[0], name)
    if setting.forced:
        if certain and near[0].count(".") == name.count("."):
            seen = f"+{name} is read by nothing; {near[0]} is"
            advice.warn("option-misspelt", seen, "", f"{near[0]}=...", table.source, setting.place)
        return
    if not strict and not certain:
        advice.note(
            "option-unknown",
            f"{shown}: {table.framework} has none of this name; of the script's own?",
            at=setting.place,
        )
        return
    say = advice.error if spelling.fatal else advice.warn
    gone = _became(table, near[0], version) if near and near[0] not in table.at(version) else ""
    meant = f"; did you mean {spelling.dashes}{near[0]}{gone}?" if near else ""
    seen = f"{shown}: {table.framework} {version} has no such option{meant}"
    id, fix = ("option-misspelt", "") if near else ("option-unknown", "remove it")
    say(id, seen, spelling.consequence, fix, table.source, setting.place)


def _older(table: Table, one: str, other: str) -> bool:
    return table.versions.index(one) < table.versions.index(other)


def _very_near(one: str, other: str) -> bool:
    from difflib import SequenceMatcher

    return SequenceMatcher(None, one, other).ratio() > 0.9


def _fix(table: Table, name: str, version: str) -> str:
    renamed, known = table.renamed.get(name), table.at(version)
    to = [each for each in renamed.to if each in known] if renamed is not None else []
    return f"write {' and '.join(to)}" if to else f"remove {name}"


def _value(advice: Advice, table: Table, option: Option, setting: Setting, spelling: Spelling) -> None:
    """A value of the wrong kind."""
    value, shown = setting.value, f"{spelling.dashes}{setting.name}"
    if value is UNKNOWN or value is None or isinstance(value, list | dict):
        return
    text = str(value)
    if option.choices and text not in [str(each) for each in option.choices]:
        choices = ", ".join(str(each) for each in option.choices)
        advice.error(
            "option-value",
            f"{shown} {text} is none of {choices}",
            spelling.consequence,
            source=table.source,
            at=setting.place,
        )
    elif option.type in ("int", "float") and not option.nargs and not _number(text, option.type) and "${" not in text:
        advice.error(
            "option-value",
            f"{shown} {text} is no {'whole number' if option.type == 'int' else 'number'}",
            spelling.consequence,
            source=table.source,
            at=setting.place,
        )


def _number(text: str, kind: str) -> bool:
    if text.lower() in ("auto", "true", "false", "null", "none"):
        return True
    try:
        return float(text) == int(float(text)) or kind == "float"
    except (ValueError, OverflowError):
        return text.lower() in ("inf", "nan", "-inf")
