"""What to type instead of an option that a command does not have."""

import shlex
from collections.abc import Collection, Sequence

from lockstep.config.loader import find_keys
from lockstep.config.other_frameworks import describe_counterpart

_TAKE_SETTINGS = ("train", "check")
"""The commands with arguments KEY=VALUE."""
_TAKE_COMMANDS = ("watch", "convert")
"""The commands with another program's command line as arguments."""


def usage_hint(command: str, arguments: Sequence[str], option: str, valued: Collection[str]) -> str:
    """Returns a sentence that says what to type; empty if that is unknown.

    Args:
        command: the subcommand, such as `train`.
        arguments: its arguments, as they were typed.
        option: the unknown option; empty for other errors.
        valued: the options of the command that take a value.
    """
    if command in _TAKE_COMMANDS and _names(watched := _watched_words(arguments, valued), option):
        at = len(arguments) - len(watched)
        typed = shlex.join(["lockstep", command, *arguments[:at], "--", *watched])
        return f"Options after the command need `--` before it: {typed}"
    if command in _TAKE_SETTINGS and option.startswith("--"):
        return _setting_hint(arguments, option)
    return ""


def _names(words: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in words)


def _watched_words(arguments: Sequence[str], valued: Collection[str]) -> Sequence[str]:
    """The command of another program, with its arguments, where no `--` stands before it; else empty."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        if arguments[at] == "--":
            return ()
        at += 2 if arguments[at] in valued else 1
    return arguments[at:]


def _setting_hint(arguments: Sequence[str], option: str) -> str:
    """How to write an option of another framework, or a setting that was given as an option."""
    name = option.lstrip("-").replace("-", "_")
    keys = find_keys(name)
    if not keys:
        counterpart = describe_counterpart(name)
        return f"Settings are in the file, or given as KEY=VALUE: {counterpart}" if counterpart else ""
    typed = next(each for each in arguments if each.partition("=")[0] == option)
    _, equals, value = typed.partition("=")
    following = arguments[arguments.index(typed) + 1 :]
    if not equals:
        value = following[0] if following and not following[0].startswith("--") and "=" not in following[0] else "..."
    meant = " or ".join(f"{key}={value if value == '...' else shlex.quote(value)}" for key in keys)
    return f"Settings are given as KEY=VALUE: did you mean {meant}?"
