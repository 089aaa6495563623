"""Command lines -> settings: argparse's `--name value` and Hydra's `a.b=c`."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from lockstep.doctor.configs.files import leaves
from lockstep.doctor.configs.settings import UNKNOWN, Setting, Settings
from lockstep.doctor.configs.shell import Word
from lockstep.doctor.configs.tables import Option
from lockstep.doctor.configs.words import UNSET


def add(settings: Settings, words: Sequence[Word], options: Mapping[str, Option], hyphens: bool = True) -> list[Word]:
    """`--name value`, `--name=value`, `--flag` into `settings`; returns what stands there by itself.

    `options` tells flags and options of several values; of a name that it does not have, the next word is the value
    unless that begins with `--`. `hyphens`: `--a-b` means `a_b`.
    """
    loose: list[Word] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.text.startswith("--") or len(word.text) == 2:
            loose.append(word)
            continue
        name, equals, value = word.text[2:].partition("=")
        if hyphens:
            name = name.replace("-", "_")
        name = complete(name, options) or name
        option = options.get(name)
        many = option is not None and (option.nargs is not None or option.type == "list")
        said: Any = _value(value, word.known)
        if not equals:
            taken: list[Word] = []
            while (
                rest and not _is_option(rest[0].text) and (many or not taken) and not (option and option.type == "flag")
            ):
                taken.append(rest.pop(0))
            values = [_value(each.text, each.known) for each in taken]
            said = values if many else values[0] if values else True
        settings.add(Setting(name, said, word.place))
    return loose


def _is_option(text: str) -> bool:
    return text.startswith("--") or (len(text) > 1 and text[0] == "-" and text[1].isalpha())


def complete(name: str, options: Mapping[str, Option]) -> str | None:
    """What argparse makes of a name: itself, or the only option that begins with it."""
    if name in options:
        return name
    longer = [each for each in options if each.startswith(name)]
    return longer[0] if len(longer) == 1 and name else None


def _value(text: str, known: bool) -> Any:
    return text if known else UNKNOWN


# ---------------------------------------------------------------- Hydra


def add_overrides(settings: Settings, words: Sequence[Word]) -> list[Word]:
    """`a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b` into `settings`; returns the rest."""
    loose: list[Word] = []
    for word in words:
        text = word.text
        if text.startswith("~"):
            settings.add(Setting(text[1:].partition("=")[0], None, word.place, removed=True))
            continue
        forced = text.startswith("+")
        name, equals, value = text.lstrip("+").partition("=")
        if not equals or text.startswith("-") or not name or UNSET in name:
            loose.append(word)
            continue
        said = plain(value) if word.known else UNKNOWN
        if isinstance(said, dict) and said:
            for leaf, each in leaves(said, name):
                settings.add(Setting(leaf, each, word.place, forced))
        else:
            settings.add(Setting(name, said, word.place, forced))
    return loose


def plain(text: str) -> Any:
    """A value as Hydra reads it, near enough: null, booleans, numbers, quoted text, lists and mappings."""
    stripped = text.strip()
    if stripped.lower() in ("null", "none", ""):
        return None
    if stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        return stripped[1:-1]
    if stripped[0] in "[{" and len(stripped) < 20_000 and stripped.count("[") + stripped.count("{") < 50:
        try:
            return yaml.safe_load(stripped)
        except (yaml.YAMLError, ValueError, TypeError):
            return text
    return text
