"""Scores completions by a JSON Schema: whether they are valid JSON, and which share of their properties is valid.

Imported only for terms of this kind, because importing jsonschema takes a tenth of a second.
"""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import referencing
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from lockstep.base.json_text import parse_json, read_json
from lockstep.config.reward import JsonSchemaReward, check_schema
from lockstep.rewards.scoring_messages import TermError

_CODE_FENCED = re.compile(r"^[ \t]*```[ \t]*(?:json|JSON)?[ \t]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)


def read_schema(term: JsonSchemaReward, base: Path) -> Any:
    """Reads the term's schema. Raises TermError if the file is missing or not a JSON Schema, or if a `$ref` points
    outside of the schema: nothing is downloaded."""
    schema = term.definition
    if term.file is not None:
        file = (base / term.file).expanduser()
        try:
            schema = read_json(file)
            check_schema(schema)
        except (OSError, ValueError) as error:
            problem = f"cannot be read: {error}" if isinstance(error, OSError) else str(error)
            raise TermError(f"json_schema {term.file}", problem, "paths are relative to the current folder") from error
    resource = referencing.Resource.from_contents(schema, default_specification=DRAFT202012)
    registry = referencing.Registry().with_resource(resource.id() or "", resource)
    for reference in _references(schema):
        try:
            registry.resolver(resource.id() or "").lookup(reference)
        except Unresolvable as error:
            remedy = "put the referenced schema under $defs of the schema"
            raise TermError(
                f"json_schema {term.file or ''}".rstrip(), f"$ref {reference!r} cannot be resolved", remedy
            ) from error
    return schema


class JsonSchemaVerifier:
    """Scores texts by a schema."""

    def __init__(self, schema: Any, extract: str, partial: float) -> None:
        self.schema, self.extract, self.partial = schema, extract, partial

    @cached_property
    def _validator(self) -> Any:
        kind = validator_for(self.schema, default=Draft202012Validator)
        return kind(self.schema, registry=referencing.Registry(), format_checker=kind.FORMAT_CHECKER)

    def score(self, completion: str) -> float:
        """1 if the JSON is valid, else `partial` times `valid_share`; 0 if there is no JSON."""
        text = self._extract_json(completion)
        if text is None:
            return 0.0
        try:
            value = parse_json(text, "the completion", parse_constant=_refuse_constant)
            if self._validator.is_valid(value):
                return 1.0
            return self.partial * self.valid_share(value) if self.partial else 0.0
        except (ValueError, RecursionError):  # not JSON, or nested too deeply
            return 0.0

    def valid_share(self, value: Any) -> float:
        """The share of the schema's properties that are present and valid, or of an array's items that are valid."""
        schema = self.schema if isinstance(self.schema, dict) else {}
        properties, items = schema.get("properties"), schema.get("items")
        if isinstance(value, dict) and isinstance(properties, dict) and properties:
            valid = (name in value and self._is_valid(value[name], each) for name, each in properties.items())
            return sum(valid) / len(properties)
        if isinstance(value, list) and isinstance(items, dict) and value:
            return sum(self._is_valid(each, items) for each in value) / len(value)
        return 0.0

    def _is_valid(self, value: Any, schema: Any) -> bool:
        valid: bool = next(self._validator.descend(value, schema), None) is None
        return valid

    def _extract_json(self, completion: str) -> str | None:
        if self.extract == "whole":
            return completion
        blocks = _CODE_FENCED.findall(completion)
        return blocks[-1] if blocks else None


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in ("$ref", "$dynamicRef") and isinstance(value, str):
                yield value
            elif key not in ("const", "enum", "default", "examples"):
                yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)
