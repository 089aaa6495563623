"""From a YAML file and `section.key=value` overrides to a checked config."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from lockstep.config.errors import ConfigError, Problem
from lockstep.config.recipes import Config, GRPOConfig, SFTConfig
from lockstep.config.spelling import resolve, suggestion
from lockstep.watch.secrets import found_in, redact_text

_ADAPTER: TypeAdapter[SFTConfig | GRPOConfig] = TypeAdapter(Config)
_NAME_IT = (
    "a run's config is written to files: put it into the environment, and name the variable where one is asked for"
)
RECIPES: dict[str, type[SFTConfig] | type[GRPOConfig]] = {"sft": SFTConfig, "grpo": GRPOConfig}


def load_config(path: Path, overrides: Sequence[str] = ()) -> SFTConfig | GRPOConfig:
    """Reads and checks a run's file.

    Raises:
        ConfigError: unreadable file, malformed YAML (with line), unknown keys, wrong types, fields that
            contradict each other; everything that is wrong is reported at once.
    """
    return check_config(apply_overrides(read_yaml(path), overrides), source=str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping; ConfigError where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [Problem("file", f"cannot be read: {error}")]) from error
    try:
        values = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(str(path), [Problem("file", f"is not valid YAML: {error}")]) from error
    if not isinstance(values, dict):
        found = "an empty file" if values is None else type(values).__name__
        raise ConfigError(str(path), [Problem("file", f"expected a mapping of keys to values, found {found}")])
    return values


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `values` with each `a.b.c=value` set; values are read as YAML, numbers index lists."""
    result = yaml.safe_load(yaml.safe_dump(values))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError("command line", [Problem(override, "expected section.key=value")])
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError("command line", [Problem(key, f"{text!r} is not a YAML value: {error}")]) from error
        _set(result, key.strip().split("."), value, override)
    return dict(result)


def check_config(values: dict[str, Any], source: str) -> SFTConfig | GRPOConfig:
    """Validates a mapping; `source` is named in the errors."""
    recipe = values.get("recipe")
    if recipe not in RECIPES:
        hint = f"one of {', '.join(RECIPES)}"
        message = "is missing" if recipe is None else f"{recipe!r} is not known"
        raise ConfigError(source, [Problem("recipe", message, hint)])
    secrets = [Problem(path, f"holds what looks like {kind}", _NAME_IT) for path, kind in found_in(values)]
    if secrets:
        raise ConfigError(source, secrets)
    try:
        return _ADAPTER.validate_python(values)
    except ValidationError as error:
        items = error.errors()
        roots = [item for item in items if not _follows(item, items)]
        raise ConfigError(source, [_problem(item, RECIPES[recipe]) for item in roots]) from error


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _set(values: Any, path: list[str], value: Any, override: str) -> None:
    for index, part in enumerate(path):
        key: Any = part
        if isinstance(values, list):
            if not part.isdigit() or int(part) >= len(values):
                where = ".".join(path[:index])
                raise ConfigError("command line", [Problem(override, f"{where} has no item {part!r}")])
            key = int(part)
        elif not isinstance(values, dict):
            raise ConfigError("command line", [Problem(override, f"{'.'.join(path[:index])} has no keys")])
        if index == len(path) - 1:
            values[key] = value
        elif isinstance(values, dict) and not isinstance(values.get(key), (dict, list)):
            given = values.get(key)
            values[key] = {"kind": given} if isinstance(given, str) else {}
        values = values[key]


def _follows(item: Any, items: Sequence[Any]) -> bool:
    """Whether a list is only too short because its items were refused."""
    inside = [other for other in items if other["loc"][: len(item["loc"])] == item["loc"]]
    return item["type"] == "too_short" and len(inside) > 1


def _problem(item: Any, root: type[BaseModel]) -> Problem:
    """One pydantic error in the words of the file."""
    location, kind, given = tuple(item["loc"]), item["type"], item["input"]
    if kind == "extra_forbidden":
        here, _ = resolve([root], location[:-1])
        _, path = resolve([root], location)
        return Problem(path, "unknown key", suggestion(str(location[-1]), here, root, path))
    _, path = resolve([root], location)
    if kind == "missing":
        return Problem(path, "is required")
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    shown = repr(given)
    if isinstance(given, dict) or len(shown) > 80:
        return Problem(path, message)
    return Problem(path, f"{redact_text(shown)}: {message}")
