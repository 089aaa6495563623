"""Reads config files: the commands of a shell script, or the tree of a YAML or JSON file with the line of each key."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.config.yaml_text import MAX_YAML_DEPTH, MalformedYaml, compose_yaml
from lockstep.doctor.configs.config_settings import UNKNOWN_VALUE, ConfigLocation, ConfigNotReadable
from lockstep.doctor.configs.shell_scripts import ShellCommand, ShellScript

MAX_BYTES = 4 << 20
MAX_NODES = 100_000
MAX_DEPTH = 60


@dataclass(slots=True)
class ConfigDocument:
    """A parsed file: a script has `commands`; a YAML or JSON file has a `tree`."""

    file: str
    text: str
    commands: tuple[ShellCommand, ...] = ()
    tree: dict[str, Any] | None = None
    locations: dict[str, ConfigLocation] = field(default_factory=dict)
    """Location of each key of the tree, by dotted path."""
    duplicates: list[tuple[str, ConfigLocation]] = field(default_factory=list)
    """Duplicate keys, with the location of each repetition."""


def read_config(path: Path, certain: bool = False) -> ConfigDocument:
    """Reads and parses a file. Raises ConfigNotReadable with file and line. See `ShellScript` for `certain`."""
    file = str(path)
    try:
        if not path.is_file():
            raise ConfigNotReadable(file, 0, "no such file" if not path.exists() else "not a file")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigNotReadable(file, 0, error.strerror or str(error)) from error
    if len(data) > MAX_BYTES:
        raise ConfigNotReadable(file, 0, f"larger than {MAX_BYTES >> 20} MiB, so not a config")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigNotReadable(file, line, "not UTF-8 text") from error
    if "\0" in text:
        raise ConfigNotReadable(file, text[: text.index("\0")].count("\n") + 1, "not text: it contains a NUL byte")
    if not text.strip():
        raise ConfigNotReadable(file, 0, "the file is empty")
    return parse_config(text, file, certain)


def parse_config(text: str, file: str, certain: bool = False) -> ConfigDocument:
    """Parses text as the kind of file that its suffix or its content indicates."""
    suffix = Path(file).suffix.lower()
    if suffix == ".json" or (suffix not in (".sh", ".bash", ".yaml", ".yml") and text.lstrip()[:1] == "{"):
        return _parse_json(text, file)
    if suffix in (".yaml", ".yml"):
        return _parse_yaml(text, file)
    if suffix in (".sh", ".bash", ".sbatch", ".slurm") or _looks_like_a_script(text):
        return ConfigDocument(file, text, commands=tuple(ShellScript(text, file, certain).commands()))
    return _parse_yaml(text, file)


def _looks_like_a_script(text: str) -> bool:
    return text.startswith("#!") or bool(re.search(r"(?m)^[^#\n]*(\s-m\s|--\w|\btrl\s|\\$)", text))


def _parse_yaml(text: str, file: str) -> ConfigDocument:
    try:
        node = compose_yaml(text, file)
    except MalformedYaml as error:
        raise ConfigNotReadable(file, error.line, error.problem) from error
    document = ConfigDocument(file, text)
    if not isinstance(node, yaml.MappingNode):
        raise ConfigNotReadable(file, 1, "neither a shell script nor settings: no `key: value` at the top level")
    builder = _YamlTree(document)
    document.tree = builder.build(node, "", 0)
    return document


class _YamlTree:
    """Converts YAML nodes to plain values. Aliases are expanded: `compose_yaml` has counted their values."""

    def __init__(self, document: ConfigDocument) -> None:
        self.document = document
        self.loader = yaml.SafeLoader("")

    def build(self, node: yaml.Node, path: str, depth: int) -> Any:
        line = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(each, f"{path}[{index}]", depth + 1) for index, each in enumerate(node.value)]
        if str(node.tag).startswith("!") and not str(node.tag).startswith("!!"):
            return UNKNOWN_VALUE
        try:
            return self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            raise ConfigNotReadable(
                self.document.file, line, f"a value with an unknown tag: {node.value!r:.60}"
            ) from error

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigNotReadable(self.document.file, key.start_mark.line + 1, "a key that is not a string")
            name = f"{path}.{key.value}" if path else str(key.value)
            location = ConfigLocation(self.document.file, key.start_mark.line + 1)
            if key.tag == "tag:yaml.org,2002:merge":
                merged = self.build(value, path, depth + 1)
                for each in merged if isinstance(merged, list) else [merged]:
                    result = {**each, **result} if isinstance(each, dict) else result
                continue
            if key.value in result:
                self.document.duplicates.append((name, location))
            self.document.locations[name] = location
            result[str(key.value)] = self.build(value, name, depth + 1)
        return result


_JSON_TOKEN = re.compile(r'"(?:[^"\\\n]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def _parse_json(text: str, file: str) -> ConfigDocument:
    try:
        tree = parse_json(text, file, max_depth=MAX_YAML_DEPTH, parse_constant=lambda name: UNKNOWN_VALUE)
    except MalformedJson as error:
        raise ConfigNotReadable(file, error.line, error.problem) from error
    if not isinstance(tree, dict):
        raise ConfigNotReadable(file, 1, "no `{...}` at the top level")
    document = ConfigDocument(file, text, tree=tree)
    for name, line in _json_keys(text):
        location = ConfigLocation(file, line)
        if name in document.locations:
            document.duplicates.append((name, location))
        document.locations[name] = location
        if len(document.locations) > MAX_NODES:
            raise ConfigNotReadable(file, line, "too many values for a config")
    return document


def _json_keys(text: str) -> Iterator[tuple[str, int]]:
    """Dotted path and line of every key of a valid JSON text."""
    stack: list[str | None] = []
    line, at, last = 1, 0, ""
    for match in _JSON_TOKEN.finditer(text):
        line += text.count("\n", at, match.start())
        at, token = match.start(), match[0]
        if token in "{[":
            if len(stack) > MAX_DEPTH:
                return
            stack.append(None if token == "{" else "[]")
        elif token in "}]":
            stack.pop()
        elif token == ":" and stack:
            stack[-1] = last
            yield ".".join(each for each in stack if each), line
        elif token.startswith('"'):
            last = str(json.loads(token))


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf of `tree`, including empty mappings."""
    for key, value in tree.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            yield from leaves(value, name)
        else:
            yield name, value
