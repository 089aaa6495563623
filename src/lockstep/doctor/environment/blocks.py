"""Assignments out of anything in which people write environments: `env` and `export` lines, docker's `-e`, Dockerfiles,
Slurm's `--export`, mpirun's `-x`, YAML and JSON, `/proc/PID/environ`, Python's `os.environ`."""

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

MOST_BYTES = 4 << 20
"""Of a block; more is no environment."""
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_VALUE = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\$'[^']*'|\\.|[^\s"'\\;&|<>()])*"""
_ASSIGNED = re.compile(rf"(?<![\w$.{{/:-])(?P<name>{_NAME})=(?P<value>{_VALUE})")
_SET = re.compile(rf"^\s*(?:setenv|set\s+-\w*x\w*|ENV)\s+(?P<name>{_NAME})\s+(?P<value>\S.*)$")
_UNSET = re.compile(rf"^\s*(?:unset|unsetenv)\s+(?P<names>{_NAME}(?:\s+{_NAME})*)\s*;?\s*$")
_PYTHON = re.compile(
    rf"""environ(?:\[["'](?P<name>{_NAME})["']\]\s*=\s*|\.setdefault\(\s*["'](?P<set>{_NAME})["']\s*,\s*)"""
    r"""(?:str\(\s*)?(?P<value>"[^"]*"|'[^']*'|-?[\w.]+)"""
)
_EXPORT = re.compile(r"--export[= ](?P<list>\S+)")
_HOST = re.compile(rf"^\s*(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*):\s+(?=(?:export\s+)?{_NAME}=)")
_COMMENT = re.compile(r"(?:^|\s)#.*$")
_ENVIRONMENTS = ("env", "environment", "env_vars", "envs", "Env", "variables")
_LINE = 1 << 16
"""Characters of a line; the rest of a longer one is passed over."""
_DOCUMENT = 1 << 20
"""Characters of YAML, which is slow to read."""
_NODES = 100_000
"""Of a document that are looked at: a few lines of YAML with aliases can be billions."""
_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def read(text: str) -> dict[str, dict[str, str]]:
    """By host, the variables; the host is empty where the text names none. Whatever the text is, something is returned:
    what is no assignment is passed over."""
    text = text[:MOST_BYTES]
    structured = _structured(text)
    if structured is not None:
        return structured
    if "\0" in text:
        return {"": dict(pair for part in text.split("\0") if (pair := _whole(part)) is not None)}
    found: dict[str, dict[str, str]] = {}
    for line in _logical(text):
        host = _HOST.match(line)
        values = found.setdefault(host["host"] if host else "", {})
        _line(line[host.end() :] if host else line, values)
    return {host: values for host, values in found.items() if values} or {"": {}}


def _whole(part: str) -> tuple[str, str] | None:
    name, sign, value = part.partition("=")
    return (name, value) if sign and re.fullmatch(_NAME, name) else None


def _logical(text: str) -> Iterator[str]:
    """Lines, those that end in a backslash joined with the next."""
    yield from (line[:_LINE] for line in re.sub(r"\\\r?\n", " ", text).splitlines())


def _line(line: str, values: dict[str, str]) -> None:
    if (exported := _EXPORT.search(line)) is not None:
        values.update(pair for part in exported["list"].split(",") if (pair := _whole(part)) is not None)
        return
    if re.match(r"\s*(#|//)", line):
        return
    if (gone := _UNSET.match(line)) is not None:
        for name in gone["names"].split():
            values.pop(name, None)
        return
    if (python := _PYTHON.search(line)) is not None:
        values[python["name"] or python["set"]] = _unquoted(python["value"])
        return
    if (said := _SET.match(line)) is not None and "=" not in said["name"]:
        values[said["name"]] = _unquoted(_COMMENT.sub("", said["value"]).strip())
        return
    for assigned in _ASSIGNED.finditer(_without_comment(line)):
        values[assigned["name"]] = _unquoted(assigned["value"])


def _without_comment(line: str) -> str:
    """Up to a `#` after a blank, unless it stands in quotes."""
    for match in re.finditer(r"\s#", line):
        before = line[: match.start()]
        if before.count('"') % 2 == 0 and before.count("'") % 2 == 0:
            return before
    return line


def _unquoted(value: str) -> str:
    """As a shell takes it; single quotes keep everything."""
    parts = []
    for part in re.finditer(r"""\$?'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)|([^"'\\]+)|.""", value, re.DOTALL):
        single, double, escaped, plain = part.groups()
        if double is not None:
            parts.append(re.sub(r"\\([$`\"\\])", r"\1", double))
        else:
            parts.append(next((each for each in (single, escaped, plain) if each is not None), part[0]))
    return "".join(parts).strip().rstrip(",")


# ---------------------------------------------------------------- JSON and YAML


def _structured(text: str) -> dict[str, dict[str, str]] | None:
    """The environments in a JSON or YAML document, None where it is none or holds none."""
    document = _loaded(text)
    if not isinstance(document, Mapping | list):
        return None
    hosts = _by_host(document)
    if hosts is not None:
        return hosts
    values: dict[str, str] = {}
    for each in _found(document):
        values.update(each)
    return {"": values} if values else None


def _loaded(text: str) -> Any:
    stripped = text.lstrip("\ufeff \t\r\n")
    try:
        if stripped.startswith(("{", "[")):
            return json.loads(stripped)
        if len(text) > _DOCUMENT or not re.search(r"^\s*(- )?[\w.-]+:(\s|$)", text, re.MULTILINE):
            return None
        return yaml.load(text, Loader=_LOADER)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


def _by_host(document: Any) -> dict[str, dict[str, str]] | None:
    """`{"host": {"NAME": "value"}}`, as incidents have it."""
    if not isinstance(document, Mapping) or not document or set(document) & set(_ENVIRONMENTS):
        return None
    hosts = {str(host): _flat(values) for host, values in document.items() if isinstance(values, Mapping)}
    whole = len(hosts) == len(document) and all(hosts.values())
    return {host: values for host, values in hosts.items() if values is not None} if whole else None


def _flat(values: Mapping[Any, Any]) -> dict[str, str] | None:
    """Names and plain values, None where something else is in it."""
    found = {}
    for name, value in values.items():
        if not isinstance(name, str) or not re.fullmatch(_NAME, name) or isinstance(value, Mapping | list):
            return None
        found[name] = _plain(value)
    return found if any(re.match(r"[A-Z]", name) for name in found) else None


def _plain(value: Any) -> str:
    return {None: "", True: "true", False: "false"}.get(value) or str("" if value is None else value)


def _found(document: Any) -> Iterator[dict[str, str]]:
    """Environments anywhere in it: mappings and lists below the usual keys, lists of `name` and `value`, of
    `NAME=value`."""
    flat = _flat(document) if isinstance(document, Mapping) else None
    if flat is not None:
        yield flat
        return
    nodes = deque([document])
    for _ in range(_NODES):
        if not nodes:
            return
        node = nodes.popleft()
        if isinstance(node, Mapping):
            for key, inner in node.items():
                named = _flat(inner) if key in _ENVIRONMENTS and isinstance(inner, Mapping) else None
                if named is not None:
                    yield named
                else:
                    nodes.append(inner)
        elif isinstance(node, list):
            pairs = [pair for each in node[:_NODES] if (pair := _pair(each)) is not None]
            if pairs:
                yield dict(pairs)
            else:
                nodes.extend(node[:_NODES])


def _pair(each: Any) -> tuple[str, str] | None:
    if isinstance(each, str):
        return _whole(each)
    if isinstance(each, Mapping) and isinstance(name := each.get("name"), str) and re.fullmatch(_NAME, name):
        value = each.get("value")
        return (name, _plain(value)) if isinstance(value, str | int | float | bool) else None
    return None
