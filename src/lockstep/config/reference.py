"""Generates the reference of all fields as Markdown: `python -m lockstep.config.reference`."""

import sys
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lockstep.config.loader import models_in, tag_of
from lockstep.config.recipes import RECIPES

_SIGNS = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))


def reference() -> str:
    """Returns the page: one table per section, each section once, in the order of the fields."""
    lines = [
        "# Every field",
        "",
        "A run is a YAML file. Any field can be changed on the command line: `section.key=value`.",
        "This page is generated (`python -m lockstep.config.reference`).",
    ]
    seen: set[type[BaseModel]] = set()
    for name, model in RECIPES.items():
        lines += ["", f"## recipe: {name}", "", *_summary(model), *_table(model)]
        lines += _sections(model, "", seen)
    return "\n".join(lines) + "\n"


def _sections(model: type[BaseModel], prefix: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    for name, info in model.model_fields.items():
        for inner in models_in(info.annotation):
            if inner in seen:
                continue
            seen.add(inner)
            path = f"{prefix}{name}"
            tag = tag_of(inner)
            heading = f"`{path}`" + (f", kind `{tag}`" if tag else "")
            yield from ["", f"### {heading}", "", *_summary(inner), *_table(inner)]
            yield from _sections(inner, f"{path}.", seen)


def _summary(model: type[BaseModel]) -> list[str]:
    return [" ".join(model.__doc__.split()), ""] if model.__doc__ else []


def _table(model: type[BaseModel]) -> Iterator[str]:
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, info in model.model_fields.items():
        meaning = " ".join((info.description or "").split())
        cells = (f"`{name}`", _bounded_type_name(info), _default(info), meaning)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _bounded_type_name(info: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(limit, attribute):g}"
        for limit in info.metadata
        for kind, attribute, sign in _SIGNS
        if isinstance(limit, kind)
    ]
    return ", ".join([_type_name(info.annotation), *bounds])


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        kinds = [_type_name(inner) for inner in get_args(annotation) if inner is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if origin is Annotated:
        return _type_name(get_args(annotation)[0])
    if origin in (tuple, list):
        return f"list of {_type_name(get_args(annotation)[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    name = str(annotation.__name__)
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(name, name)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.default
    if isinstance(value, BaseModel):
        return f"`{tag_of(type(value))}`" if tag_of(type(value)) else "see below"
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str) and "\n" in value:
        return "a text of its own"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
