"""Checks the values of variables, and finds the nearest names of misspelt ones."""

import re

from lockstep.base.secrets import HIDDEN
from lockstep.doctor.environment.variable_table import EnvironmentVariable, ValueCondition

ON = ("1", "true", "yes", "on", "y", "t", "enable", "enabled")
OFF = ("0", "false", "no", "off", "n", "f", "", "disable", "disabled")
_BOOLEAN = ("0", "1", "true", "false", "yes", "no", "y", "n", "t", "f")
_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|\d{1,30})")
_LONGEST = 4096
"""Maximum number of characters of a value that is checked; the longest values are paths."""
_NUMBERED = re.compile(r"_?\d+$")
_NUMBER = re.compile(r"[+-]?(\d{1,30}\.?\d{0,30}|\.\d{1,30})([eE][+-]?\d{1,3})?")


def is_literal(value: str) -> bool:
    """Whether a value is known: it is not hidden, and contains no variable, command or template."""
    return value != HIDDEN and not any(sign in value for sign in ("$", "`", "{{"))


def value_matches(value: str, when: ValueCondition) -> bool:
    """Whether a value satisfies a condition."""
    if not isinstance(when, str):
        return any(value_matches(value, each) for each in when)
    lower = value.strip().lower()
    match when:
        case "set":
            return True
        case "empty":
            return lower == ""
        case "on":
            return lower in ON
        case "off":
            return lower in OFF
    if when[0] == "~":
        return len(value) <= _LONGEST and re.fullmatch(when[1:], value.strip(), re.IGNORECASE) is not None
    if when[0] in "<>" and (limit := parse_number(when[1:])) is not None:
        given = parse_number(lower)
        return given is not None and (given > limit if when[0] == ">" else given < limit)
    return lower == when.lower()


def parse_number(text: str) -> float | None:
    """Parses a decimal, hexadecimal or fractional number; None if the text is none."""
    text = text.strip()
    if _INTEGER.fullmatch(text):
        return float(int(text, 16) if "x" in text.lower() else int(text))
    return float(text) if _NUMBER.fullmatch(text) else None


def value_problem(variable: EnvironmentVariable, value: str) -> str:
    """Returns what the value should be; "" if it is valid or unknown."""
    text = value.strip()
    if (
        not is_literal(value)
        or (variable.kind == "text" and variable.pattern is None)
        or any(_same_value(variable, text, each) for each in variable.values)
    ):
        return ""
    if len(value) > _LONGEST:
        return f"shorter than {_LONGEST} characters"
    if variable.pattern is not None and re.fullmatch(variable.pattern, text) is None:
        return "a value of the required form"
    match variable.kind:
        case "boolean":
            return "" if text.lower() in _BOOLEAN else "0, 1, true or false"
        case "flag":
            return "" if _INTEGER.fullmatch(text) else "0 or 1"
        case "choice":
            return f"one of {_allowed_values(variable)}"
        case "choices":
            parts = [part.strip().lstrip("^") for part in text.split(",")]
            allowed = all(any(_same_value(variable, part, each) for each in variable.values) for part in parts)
            return "" if allowed else f"a list of {_allowed_values(variable)}"
        case "integer" | "number" | "port":
            return _number_problem(variable, text)
        case "address" | "interface":
            return "" if text and not re.search(r"\s", text) else "a name without blanks"
    return ""


def _same_value(variable: EnvironmentVariable, value: str, allowed: str) -> bool:
    return value.lower() == allowed.lower() if variable.ignore_case else value == allowed


def _allowed_values(variable: EnvironmentVariable) -> str:
    return ", ".join(variable.values)


def _number_problem(variable: EnvironmentVariable, value: str) -> str:
    low, high = variable.range or ((1, 65535) if variable.kind == "port" else (None, None))
    given = parse_number(value)
    is_integer = variable.kind != "number"
    if given is None or (is_integer and given != int(given)):
        return "a whole number" if is_integer else "a number"
    if (low is not None and given < low) or (high is not None and given > high):
        return _range_text(low, high)
    return ""


def _range_text(low: float | None, high: float | None) -> str:
    """Describes a range: `from 1 to 64`, `at least 1`, `at most 64`."""
    if low is not None and high is not None:
        return f"from {low:.15g} to {high:.15g}"
    return f"at least {low:.15g}" if low is not None else f"at most {high:.15g}"


def edit_distance(one: str, other: str, limit: int) -> int:
    """Returns the Damerau-Levenshtein distance (optimal string alignment) of two texts.

    It counts insertions, deletions, replacements and swaps of neighbours. If it exceeds the limit, the result is any
    number above the limit.
    """
    if abs(len(one) - len(other)) > limit:
        return limit + 1
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        row = [i]
        for j, right in enumerate(other, 1):
            cost = min(row[-1] + 1, last[j] + 1, last[j - 1] + (left != right))
            if i > 1 and j > 1 and left == other[j - 2] and right == one[i - 2]:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        if min(row) > limit:
            return limit + 1
        before, last = last, row
    return last[-1]


def nearest_name(name: str, names: frozenset[str], begin: int = 0) -> str | None:
    """Returns the known name that was probably meant; None if none is near, or if `name` is a known name with a number.

    A near name differs by one edit, or by two or three if the part after the first `begin` characters is long.
    """
    if _NUMBERED.sub("", name) in names:
        return None
    length = len(name) - begin
    limit = 1 if length < 6 else 2 if length < 14 else 3
    best = min(((edit_distance(name.upper(), each.upper(), limit), each) for each in names), default=(limit + 1, ""))
    return best[1] if best[0] <= limit else None
