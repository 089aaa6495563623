"""Writes a converted config as YAML, each field with the options that it comes from."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from lockstep.config.run_config import RunConfig
from lockstep.convert.conversion import FieldEntry

_INDENT = "  "


def render_yaml(recipe: str, fields: Mapping[str, FieldEntry], header: Sequence[str], framework: str) -> str:
    """The text of a config file.

    Args:
        fields: by dotted path.
        header: lines of the comment at the top.
    """
    tree: dict[str, Any] = {"recipe": FieldEntry(recipe)}
    order = {name: index for index, name in enumerate(RunConfig.model_fields)}
    for path in sorted(fields, key=lambda path: order.get(path.partition(".")[0], len(order))):
        section = tree
        *parents, last = path.split(".")
        for part in parents:
            section = section.setdefault(part, {})
        section[last] = fields[path]
    lines = [f"# {_one_line(line)}".rstrip() for line in header]
    return "\n".join([*lines, *_section(tree, "", framework)]) + "\n"


def _section(tree: Mapping[str, Any], indent: str, framework: str) -> list[str]:
    lines: list[str] = []
    for name, entry in tree.items():
        if not isinstance(entry, FieldEntry):
            lines += [f"{indent}{name}:", *_section(entry, indent + _INDENT, framework)]
            continue
        comment = _comment(entry, framework)
        if isinstance(entry.value, list) and any(isinstance(each, dict) for each in entry.value):
            lines.append(f"{indent}{name}:{comment}")
            lines += [f"{indent}{_INDENT}- {_flow(each)}" for each in entry.value]
        else:
            lines.append(f"{indent}{name}: {_flow(entry.value)}{comment}")
    return lines


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _comment(entry: FieldEntry, framework: str) -> str:
    if not entry.names:
        return f"  # as in {framework}" if entry.default else ""
    names = _one_line(", ".join(entry.names))
    return f"  # {framework}'s default of {names}" if entry.default else f"  # {names}"


def _one_line(text: str) -> str:
    """The text without line breaks and control characters."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text)
