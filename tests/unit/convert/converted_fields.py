"""What the tests of conversions ask of a converted config."""

from typing import Any

import yaml

from lockstep.convert.converter import ConvertedConfig


def value(config: ConvertedConfig, path: str) -> Any:
    """The value at a dotted path of the YAML that is written; None if it is absent."""
    section: Any = yaml.safe_load(config.text)
    for part in path.split("."):
        section = section.get(part) if isinstance(section, dict) else None
    return section


def values(config: ConvertedConfig, *paths: str) -> dict[str, Any]:
    """The values at several dotted paths, by path."""
    return {path: value(config, path) for path in paths}


def left(config: ConvertedConfig) -> set[str]:
    """The options that are listed because they are not converted."""
    return {each.name for each in config.of_kind("unsupported", "unknown")}
