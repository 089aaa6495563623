"""Who wrote a structured record, a line of JSON or of `name=value` pairs, according to its fields."""

import re

_RANK = re.compile(r"\"(?:global_)?rank\": ?\"?(?P<rank>\d{1,6})\b")
_HOST = re.compile(r"\"(?:host|hostname|node)\": ?\"(?P<host>[A-Za-z][\w.-]*)\"")
PARTY_NAMES = ("service", "svc", "component", "app", "unit")
"""Names of the field that says which program wrote a record."""
_PARTY = f"(?:{'|'.join(PARTY_NAMES)})"
_NAME = r"(?P<party>[A-Za-z][\w.:@/-]{0,60})"
_JSON_PARTY = re.compile(rf"\"{_PARTY}\": ?\"{_NAME}\"")
_PAIRS_PARTY = re.compile(rf"(?:^|\s){_PARTY}=\"?{_NAME}")


def of_json(line: str, at: int, end: int) -> tuple[int | None, str, str]:
    """Returns rank, host and name of the process that wrote a JSON record, None and "" where it does not say them.

    Args:
        at: Where the record begins in the line.
        end: Where the search ends.
    """
    rank, host, party = _RANK.search(line, at, end), _HOST.search(line, at, end), _JSON_PARTY.search(line, at, end)
    return int(rank["rank"]) if rank else None, host["host"] if host else "", party["party"] if party else ""


def party_of_pairs(line: str, end: int) -> str:
    """Returns the name of the process that wrote a line of `name=value` pairs; "" if it does not say it."""
    party = _PAIRS_PARTY.search(line, 0, end)
    return party["party"] if party else ""
