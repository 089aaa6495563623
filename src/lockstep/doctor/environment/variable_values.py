"""Values of variables: on or off, valid for their kind; and nearest names for misspelt ones."""

import re

from lockstep.base.secrets import HIDDEN
from lockstep.doctor.environment.variable_table import EnvironmentVariable, ValueCondition

ON = ("1", "true", "yes", "on", "y", "t", "enable", "enabled")
OFF = ("0", "false", "no", "off", "n", "f", "", "disable", "disabled")
_BOOLEAN = ("0", "1", "true", "false", "yes", "no", "y", "n", "t", "f")
_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|\d{1,30})")
_LONGEST = 4096
"""Maximum characters of a judged value; the longest are paths of folders."""
_NUMBERED = re.compile(r"_?\d+$")
_NUMBER = re.compile(r"[+-]?(\d{1,30}\.?\d{0,30}|\.\d{1,30})([eE][+-]?\d{1,3})?")


def is_literal(value: str) -> bool:
    """Whether it is a literal, not a reference to a variable or a command's output."""
    return value != HIDDEN and not any(sign in value for sign in ("$", "`", "{{"))


def value_matches(value: str, when: ValueCondition) -> bool:
    """Whether a value satisfies a condition."""
    if not isinstance(when, str):
        return any(value_matches(value, each) for each in when)
    plain = value.strip().lower()
    match when:
        case "set":
            return True
        case "empty":
            return plain == ""
        case "on":
            return plain in ON
        case "off":
            return plain in OFF
    if when[0] == "~":
        return len(value) <= _LONGEST and re.fullmatch(when[1:], value.strip(), re.IGNORECASE) is not None
    if when[0] in "<>" and (limit := parse_number(when[1:])) is not None:
        given = parse_number(plain)
        return given is not None and (given > limit if when[0] == ">" else given < limit)
    return plain == when.lower()


def parse_number(text: str) -> float | None:
    """Parses decimal, hexadecimal and fractional numbers."""
    text = text.strip()
    if _INTEGER.fullmatch(text):
        return float(int(text, 16) if "x" in text.lower() else int(text))
    return float(text) if _NUMBER.fullmatch(text) else None


def value_problem(variable: EnvironmentVariable, value: str) -> str:
    """What the value should be; empty if it is valid."""
    plain = value.strip()
    if (
        not is_literal(value)
        or (variable.kind == "text" and variable.pattern is None)
        or any(_same_value(variable, plain, each) for each in variable.values)
    ):
        return ""
    if len(value) > _LONGEST:
        return f"shorter than {_LONGEST} characters"
    if variable.pattern is not None and re.fullmatch(variable.pattern, plain) is None:
        return "a value of the required form"
    match variable.kind:
        case "boolean":
            return "" if plain.lower() in _BOOLEAN else "0, 1, true or false"
        case "flag":
            return "" if _INTEGER.fullmatch(plain) else "0 or 1"
        case "choice":
            return f"one of {_allowed_values(variable)}"
        case "choices":
            parts = [part.strip().lstrip("^") for part in plain.split(",")]
            fits = all(any(_same_value(variable, part, each) for each in variable.values) for part in parts)
            return "" if fits else f"a list of {_allowed_values(variable)}"
        case "integer" | "number" | "port":
            return _number_problem(variable, plain)
        case "address" | "interface":
            return "" if plain and not re.search(r"\s", plain) else "a name without blanks"
    return ""


def _same_value(variable: EnvironmentVariable, value: str, allowed: str) -> bool:
    return value.lower() == allowed.lower() if variable.ignore_case else value == allowed


def _allowed_values(variable: EnvironmentVariable) -> str:
    return ", ".join(variable.values)


def _number_problem(variable: EnvironmentVariable, value: str) -> str:
    low, high = variable.range or ((1, 65535) if variable.kind == "port" else (None, None))
    given = parse_number(value)
    whole = variable.kind != "number"
    if given is None or (whole and given != int(given)):
        return "a whole number" if whole else "a number"
    if (low is not None and given < low) or (high is not None and given > high):
        return _range_text(low, high)
    return ""


def _range_text(low: float | None, high: float | None) -> str:
    """`from 1 to 64`, `at least 1`, `at most 64`."""
    if low is not None and high is not None:
        return f"from {low:.15g} to {high:.15g}"
    return f"at least {low:.15g}" if low is not None else f"at most {high:.15g}"


def edit_distance(one: str, other: str, limit: int) -> int:
    """Damerau-Levenshtein distance (optimal string alignment): insertions, deletions, replacements, swaps of
    neighbours;
    a larger number than `limit` if it exceeds the limit."""
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
    """The known name that was probably meant: one edit away, two or three if the part after the first `begin` letters
    is
    long; None if none is near, or if the name is numbered."""
    if _NUMBERED.sub("", name) in names:
        return None
    length = len(name) - begin
    limit = 1 if length < 6 else 2 if length < 14 else 3
    best = min(((edit_distance(name.upper(), each.upper(), limit), each) for each in names), default=(limit + 1, ""))
    return best[1] if best[0] <= limit else None
