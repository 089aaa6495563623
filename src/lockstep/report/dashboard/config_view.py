"""Configs of runs as dotted keys, without secrets, and what differs between two of them."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.base.secrets import redact, secret_values
from lockstep.ledger.config_changes import ABSENT, config_differences


def shown_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config by dotted key."""
    return dict(_flat("", redact(config, secret_values(os.environ))))


def changed_keys(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The keys that differ, each with the values `a` and `b`; one that a config lacks is left out.

    Secrets are hidden after the comparison, so that different ones are seen to differ.
    """
    found = []
    for key, before, after in config_differences("", a, b):
        known, name = secret_values(os.environ), key.rpartition(".")[2]
        sides = {side: value for side, value in (("a", before), ("b", after)) if value is not ABSENT}
        found.append({"key": key, **{side: redact(value, known, name) for side, value in sides.items()}})
    return found


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        for index, inner in enumerate(value):
            yield from _flat(f"{path}.{index}", inner)
    else:
        yield path, value
