"""Loads a run's config: a YAML file and `section.key=value` overrides, checked."""

import copy
import difflib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from lockstep.base.secrets import find_secrets, redact_text
from lockstep.config.errors import ConfigError, ConfigProblem
from lockstep.config.other_frameworks import counterpart_of, describe_counterpart
from lockstep.config.recipes import RECIPES
from lockstep.config.run_config import RunConfig
from lockstep.config.trainer import read_deepspeed_file
from lockstep.config.yaml_text import MalformedYaml, parse_yaml, read_yaml_text


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The model classes in a field's annotation, inside unions, Annotated and containers."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, Annotated, tuple, list):
        for inner in get_args(annotation):
            yield from models_in(inner)


def tag_of(model: type[BaseModel]) -> str | None:
    """The value of a model's discriminator (`kind` or `recipe`); None if it has none."""
    for name in ("kind", "recipe"):
        if name in model.model_fields:
            annotation = model.model_fields[name].annotation
            if get_origin(annotation) is Literal and len(get_args(annotation)) == 1:
                return str(get_args(annotation)[0])
    return None


def resolve_location(
    models: list[type[BaseModel]], location: tuple[int | str, ...]
) -> tuple[list[type[BaseModel]], str]:
    """Follows a pydantic error location.

    Returns the models at its end and the dotted path as users write it (without the union tags that pydantic adds).
    """
    path: list[str] = []
    for part in location:
        tagged = [model for model in models if tag_of(model) == part]
        if tagged and not any(part in model.model_fields for model in models):
            models = tagged
            continue
        path.append(str(part))
        if isinstance(part, int):
            continue
        found = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [inner for annotation in found for inner in models_in(annotation)]
    return models, ".".join(path)


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key below a model."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in models_in(info.annotation):
            yield from dotted_keys(inner, f"{prefix}{name}.")


def suggest_key(key: str, here: list[type[BaseModel]], root: type[BaseModel], path: str = "") -> str:
    """What to write instead of an unknown key; may be empty.

    Args:
        here: the models that do not have the key.
        path: its dotted path.
    """
    names = sorted({name for model in here for name in model.model_fields})
    if path in dotted_keys(root):
        return f"another kind has this key; valid keys here: {', '.join(names)}"
    if counterpart := describe_counterpart(path or key):
        return counterpart
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    elsewhere = [path for path in dict.fromkeys(dotted_keys(root)) if path.rsplit(".", 1)[-1] == key]
    if elsewhere:
        return f"did you mean '{elsewhere[0]}'?"
    similar = difflib.get_close_matches(key, {path.rsplit(".", 1)[-1] for path in dotted_keys(root)}, n=1, cutoff=0.75)
    if similar:
        path = next(path for path in dotted_keys(root) if path.rsplit(".", 1)[-1] == similar[0])
        return f"did you mean '{path}'?"
    return f"valid keys here: {', '.join(names)}" if names else ""


def find_keys(name: str) -> list[str]:
    """Returns the dotted keys of any recipe that a user may mean: by another framework's name, by the whole key, or by
    its last part; at most three. If there are more, those with the fewest parts; empty if these are more as well."""
    known = dict.fromkeys(key for recipe in RECIPES.values() for key in dotted_keys(recipe))
    for meant in (counterpart_of(name), name):
        if meant in known:
            return [meant]
    if "." in name:
        return []
    alike = [key for key in known if key.rpartition(".")[2] == name]
    if len(alike) > 3:
        fewest = min(key.count(".") for key in alike)
        alike = [key for key in alike if key.count(".") == fewest]
    return alike if len(alike) <= 3 else []


_SECRET_HINT = (
    "a run's config is written to files: put the secret into the environment, and name the variable where a field asks"
)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a run's file.

    Raises:
        ConfigError: unreadable file, malformed YAML (with line), unknown keys, wrong types, fields that contradict each
            other; all problems are reported at once.
    """
    return check_config(apply_overrides(read_yaml(path), overrides), source=str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML mapping; ConfigError if there is none."""
    try:
        values = parse_yaml(read_yaml_text(path), str(path), _UniqueKeys)
    except OSError as error:
        raise ConfigError(str(path), [ConfigProblem("file", f"cannot be read: {error}")]) from error
    except MalformedYaml as error:
        place = f"line {error.line}: " if error.line else ""
        raise ConfigError(str(path), [ConfigProblem("file", f"{place}{error.problem}", error.remedy)]) from error
    if not isinstance(values, dict):
        found = "an empty file" if values is None else type(values).__name__
        raise ConfigError(str(path), [ConfigProblem("file", f"expected a mapping of keys to values, found {found}")])
    return values


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `values` with each `a.b.c=value` set; values are read as YAML, numbers index lists."""
    result = copy.deepcopy(values)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError("command line", [ConfigProblem(override, "expected section.key=value")])
        try:
            value = parse_yaml(text, "command line")
        except MalformedYaml as error:
            shown = repr(text if len(text) <= 80 else f"{text[:80]}...")
            message = f"{shown} is not a YAML value: {error.problem}"
            raise ConfigError("command line", [ConfigProblem(key, message, error.remedy)]) from error
        _set_override(result, key.strip().split("."), value, override)
    return dict(result)


def accepts_overrides(config: RunConfig, overrides: Sequence[str]) -> bool:
    """Whether a config is valid with these overrides."""
    try:
        check_config(apply_overrides(config.model_dump(mode="json"), overrides), source="a suggestion")
    except ConfigError:
        return False
    return True


def check_config(values: dict[str, Any], source: str) -> RunConfig:
    """Validates a mapping; `source` is named in the errors."""
    recipe = values.get("recipe")
    if recipe not in RECIPES:
        hint = f"one of {', '.join(RECIPES)}"
        message = "is missing" if recipe is None else f"{recipe!r} is unknown"
        raise ConfigError(source, [ConfigProblem("recipe", message, hint)])
    secrets = [
        ConfigProblem(path, f"contains what looks like {kind}", _SECRET_HINT) for path, kind in find_secrets(values)
    ]
    if secrets:
        raise ConfigError(source, secrets)
    try:
        config = RECIPES[recipe].model_validate(values)
        config.check_roles()
    except ValidationError as error:
        items = error.errors()
        roots = [item for item in items if not _is_follow_up(item, items)]
        raise ConfigError(source, [each for item in roots for each in _to_problems(item, RECIPES[recipe])]) from error
    except ValueError as error:
        raise ConfigError(source, [ConfigProblem("", str(error))]) from error
    return config


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, of which YAML would silently keep the last."""

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


def _set_override(values: Any, path: list[str], value: Any, override: str) -> None:
    for index, part in enumerate(path):
        key: Any = part
        if isinstance(values, list):
            if not part.isdigit() or int(part) >= len(values):
                where = ".".join(path[:index])
                raise ConfigError("command line", [ConfigProblem(override, f"{where} has no item {part!r}")])
            key = int(part)
        elif not isinstance(values, dict):
            raise ConfigError("command line", [ConfigProblem(override, f"{'.'.join(path[:index])} has no keys")])
        if index == len(path) - 1:
            values[key] = value
        elif isinstance(values, dict) and not isinstance(values.get(key), (dict, list)):
            given = values.get(key)
            values[key] = _expand_section(path[: index + 1], given) if isinstance(given, str) else {}
        values = values[key]


def _expand_section(path: list[str], given: str) -> Any:
    """The content of a section that is written as one word, before an override changes a part of it: of a DeepSpeed
    file, or a kind."""
    if path[-2:] != ["trainer", "deepspeed"]:
        return {"kind": given}
    try:
        return read_deepspeed_file(given)
    except ValueError as error:
        raise ConfigError("command line", [ConfigProblem(".".join(path), str(error))]) from error


def _is_follow_up(item: Any, items: Sequence[Any]) -> bool:
    """Whether a list is only too short because its items were refused."""
    inside = [other for other in items if other["loc"][: len(item["loc"])] == item["loc"]]
    return item["type"] == "too_short" and len(inside) > 1


def _to_problems(item: Any, root: type[BaseModel]) -> list[ConfigProblem]:
    """Converts a pydantic error to the terms of the file. An unknown section that is another framework's is reported by
    its keys, each with its name here."""
    location, kind, given = tuple(item["loc"]), item["type"], item["input"]
    _, path = resolve_location([root], location)
    if kind == "extra_forbidden":
        inside = [(key, describe_counterpart(key)) for key in _leaf_keys(path, given)]
        if isinstance(given, dict) and any(hint for _, hint in inside):
            return [ConfigProblem(key, "unknown key", hint) for key, hint in inside]
        here, _ = resolve_location([root], location[:-1])
        return [ConfigProblem(path, "unknown key", suggest_key(str(location[-1]), here, root, path))]
    if kind == "missing":
        return [ConfigProblem(path, "is required")]
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    shown = repr(given)
    if isinstance(given, dict) or len(shown) > 80:
        return [ConfigProblem(path, message)]
    return [ConfigProblem(path, f"{redact_text(shown)}: {message}")]


def _leaf_keys(path: str, given: Any) -> Iterator[str]:
    """The dotted keys of all values below an unknown key that are not sections themselves."""
    if not isinstance(given, dict) or not given or describe_counterpart(path):
        yield path
        return
    for name, value in given.items():
        yield from _leaf_keys(f"{path}.{name}", value)
