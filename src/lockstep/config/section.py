"""The base class of all config sections."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

FALSE_AS_OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""For choices with the value `off`, which YAML 1.1 reads as false."""


def default_kind(usual: str) -> BeforeValidator:
    """For sections of several kinds: reads `cluster: ray` as `cluster: {kind: ray}`, and fills in a missing kind."""

    def add_kind(value: Any) -> Any:
        if isinstance(value, str):
            return {"kind": value}
        return {"kind": usual, **value} if isinstance(value, Mapping) and "kind" not in value else value

    return BeforeValidator(add_kind)


def with_defaults(values: Any, defaults: Mapping[str, Any]) -> Any:
    """Adds defaults to a section of a file where it gives no value, for defaults that differ from those of the
    section's class. What is neither a mapping nor a section is returned unchanged."""
    if isinstance(values, Section):
        kind = {"kind": values.kind} if hasattr(values, "kind") else {}
        values = kind | {name: getattr(values, name) for name in values.model_fields_set}
    if not isinstance(values, Mapping):
        return values
    filled = {**defaults, **values}
    for name, default in defaults.items():
        if isinstance(default, Mapping):
            filled[name] = with_defaults(values.get(name, {}), default)
    return filled


class Section(BaseModel):
    """One section of a run's file: unknown keys are refused, and checked values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
