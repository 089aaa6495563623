"""Users' functions as tools of the model: their schemas for the chat template, which are read from the source without
running it, and the environment that parses and executes the model's calls.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.cluster.user_code import check_source, split_path, suggest_name
from lockstep.config.rollout import EnvironmentConfig
from lockstep.config.rollout import EnvironmentConfig as Config
from lockstep.data.samples import Prompt
from lockstep.rollout.environments.environment_protocol import EnvironmentCodeError, Observation

_SCHEMA_OF_TYPE: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "list": {"type": "array"},
    "tuple": {"type": "array"},
    "dict": {"type": "object"},
    "Any": {},
}
_SUPPORTED_TYPES = "str, int, float, bool, list, dict, Literal or unions of these"
_HEADING = re.compile(r"^\s*(Args|Arguments|Returns|Raises|Example|Examples|Note|Notes):\s*$", re.MULTILINE)
_ENTRY = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
_CHOICES = re.compile(r"\(\s*choices:\s*(\[.*?\])\s*\)\s*$", re.IGNORECASE | re.DOTALL)


def tool_schemas(paths: Sequence[str], base: Path = Path()) -> list[dict[str, Any]]:
    """Returns the schema of each function.

    Raises:
        EnvironmentCodeError: a function does not exist or has no docstring or annotations, or two have the same name.
    """
    schemas = [tool_schema(path, base) for path in paths]
    names = [schema["function"]["name"] for schema in schemas]
    for path, name in zip(paths, names, strict=True):
        if names.count(name) > 1:
            raise EnvironmentCodeError(path, f"two tools are called {name!r}", "rename one of them")
    return schemas


def tool_schema(path: str, base: Path = Path()) -> dict[str, Any]:
    """Returns `{"type": "function", "function": {name, description, parameters}}`. Raises EnvironmentCodeError."""
    module = check_source(path, base, EnvironmentCodeError)
    name = split_path(path, EnvironmentCodeError)[1]
    definitions = [] if module is None else [node for node in ast.walk(module) if _is_function(node, name)]
    if not definitions:
        remedy = "name the file that defines it with `def`: the model reads its parameters and docstring"
        raise EnvironmentCodeError(path, f"there is no function definition of {name!r}", remedy)
    node = definitions[-1]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    description, arguments, returns = _docstring(path, node)
    function: dict[str, Any] = {
        "name": node.name,
        "description": description,
        "parameters": _parameters(path, node, arguments),
    }
    if node.returns is not None and ast.unparse(node.returns) != "None":
        function["return"] = {**_schema(path, "the result", node.returns), **returns}
    return {"type": "function", "function": function}


def _is_function(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name


def _parameters(path: str, node: ast.FunctionDef | ast.AsyncFunctionDef, described: dict[str, str]) -> dict[str, Any]:
    declared = node.args
    if declared.vararg or declared.kwarg or declared.posonlyargs:
        raise EnvironmentCodeError(path, "has * or positional-only parameters", "name every parameter: calls are JSON")
    every = [*declared.args, *declared.kwonlyargs]
    optional = {each.arg for each in declared.args[len(declared.args) - len(declared.defaults) :]}
    optional |= {
        each.arg for each, default in zip(declared.kwonlyargs, declared.kw_defaults, strict=True) if default is not None
    }
    properties = {}
    for each in every:
        if each.annotation is None:
            raise EnvironmentCodeError(path, f"parameter {each.arg!r} has no type", f"annotate it: {_SUPPORTED_TYPES}")
        if each.arg not in described:
            remedy = f'add a line "{each.arg}: ..." below "Args:" in its docstring'
            raise EnvironmentCodeError(path, f"parameter {each.arg!r} is not described", remedy)
        properties[each.arg] = _add_description(
            _schema(path, f"parameter {each.arg!r}", each.annotation), described[each.arg]
        )
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    required = [each.arg for each in every if each.arg not in optional]
    return schema | ({"required": required} if required else {})


def _add_description(schema: dict[str, Any], text: str) -> dict[str, Any]:
    """Adds a parameter's description. `(choices: [...])` at its end becomes `enum`, as in transformers."""
    choices = _CHOICES.search(text)
    if choices:
        schema = {**schema, "enum": list(ast.literal_eval(choices[1]))}
        text = text[: choices.start()].strip()
    return {**schema, "description": text}


def _schema(path: str, what: str, node: ast.expr) -> dict[str, Any]:
    """The JSON schema of an annotation, as transformers writes it. `what` names the annotated thing in errors."""
    match node:
        case ast.Constant(value=str(text)):
            return _schema(path, what, ast.parse(text, mode="eval").body)
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _SCHEMA_OF_TYPE:
            return dict(_SCHEMA_OF_TYPE[name])
        case ast.BinOp(op=ast.BitOr()):
            return _union(path, what, _union_members(node))
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            return _generic(path, what, name, inner.elts if isinstance(inner, ast.Tuple) else [inner])
    raise EnvironmentCodeError(path, f"{what} has the unsupported type {ast.unparse(node)}", f"use {_SUPPORTED_TYPES}")


def _generic(path: str, what: str, name: str, inner: list[ast.expr]) -> dict[str, Any]:
    match name:
        case "Optional":
            return _union(path, what, [*inner, ast.Constant(None)])
        case "Union":
            return _union(path, what, inner)
        case "Literal":
            values = [ast.literal_eval(each) for each in inner]
            kinds = sorted(
                {str(_SCHEMA_OF_TYPE[type(value).__name__]["type"]) for value in values if value is not None}
            )
            schema: dict[str, Any] = {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
            return schema | ({"nullable": True} if None in values else {})
        case "list" | "List" | "Sequence":
            return {"type": "array", "items": _schema(path, what, inner[0])}
        case "tuple" | "Tuple":
            return {"type": "array", "prefixItems": [_schema(path, what, each) for each in inner]}
        case "dict" | "Dict":
            values_schema = _schema(path, what, inner[1])
            return {"type": "object"} | ({"additionalProperties": values_schema} if values_schema else {})
    raise EnvironmentCodeError(path, f"{what} has the unsupported type {name}[...]", f"use {_SUPPORTED_TYPES}")


def _union_members(node: ast.expr) -> list[ast.expr]:
    """The types of `A | B | C`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_union_members(node.left), *_union_members(node.right)]
    return [node]


def _union(path: str, what: str, nodes: list[ast.expr]) -> dict[str, Any]:
    schemas = [_schema(path, what, node) for node in nodes if not _is_none(node)]
    simple = [schema["type"] for schema in schemas if set(schema) == {"type"}]
    if len(schemas) == 1:
        joined = schemas[0]
    elif len(simple) == len(schemas):
        joined = {"type": sorted(simple)}
    else:
        joined = {"anyOf": schemas}
    return {**joined, "nullable": True} if len(schemas) < len(nodes) else joined


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _docstring(path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, dict[str, str], dict[str, str]]:
    """The description, the description of each parameter, and `{"description": ...}` of the result if it has one."""
    text = ast.get_docstring(node)
    if not text:
        raise EnvironmentCodeError(path, "has no docstring", "describe what it does: the model reads the docstring")
    parts = _HEADING.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    arguments = _entries(sections.get("Args", sections.get("Arguments", "")))
    returns = " ".join(sections.get("Returns", "").split())
    return parts[0].strip(), arguments, {"description": returns} if returns else {}


def _entries(section: str) -> dict[str, str]:
    """The entries of a section in Google's style: `name: text` at the section's indent, further lines indented more."""
    lines = [line for line in section.splitlines() if line.strip()]
    entries: dict[str, str] = {}
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    name = ""
    for line in lines:
        entry = _ENTRY.match(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        if entry:
            name, entries[entry[1]] = entry[1], entry[2].strip()
        elif name:
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return entries


def chat_template_tools(config: EnvironmentConfig, base: Path = Path()) -> list[dict[str, Any]]:
    """Returns the schemas of the tools for the chat template. There are none if the config names an
    environment, or the parser `regex`.

    Raises:
        EnvironmentCodeError: a file, package or name does not exist, or a function has no usable description.
    """
    if config.path is not None:
        _check_class(config.path, base)
        return []
    if config.parser == "hermes":
        return tool_schemas(config.tools, base)
    for path in config.tools:
        check_source(path, base, EnvironmentCodeError)
    return []


def _check_class(path: str, base: Path) -> None:
    module = check_source(path, base, EnvironmentCodeError)
    name = split_path(path, EnvironmentCodeError)[1]
    for node in [] if module is None else module.body:
        if isinstance(node, ast.ClassDef) and node.name == name and not node.bases:
            methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
            if "step" not in methods:
                found = ", ".join(sorted(methods)) or "no method"
                raise EnvironmentCodeError(path, f"{name} has no method step(action) (it has {found})")


_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


class BadToolCall(ValueError):
    """The model's call is invalid. The model gets the error as a reply, whatever `on_error` is."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in a turn of the model."""

    name: str | None
    """None if the pattern has no group `name`, because there is only one tool."""
    arguments: str | dict[str, Any]
    """The parsed arguments, or their text."""
    problem: str = ""
    """Why the call cannot be parsed; "" if it can."""


def hermes_calls(text: str) -> list[ToolCall]:
    """Finds calls in the style of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. The end
    tag of the last call may be missing."""
    return [_parse_hermes_call(body) for body in _HERMES.findall(text)]


def _parse_hermes_call(body: str) -> ToolCall:
    try:
        call = parse_json(body, "the call")
    except MalformedJson as error:
        return ToolCall(None, body, f"the call is not JSON: {error.problem}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(None, body, 'expected {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(call["name"], arguments)
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], body, "arguments must be a JSON object")
    return ToolCall(call["name"], arguments)


def regex_calls(text: str, pattern: str) -> list[ToolCall]:
    """Finds calls by a pattern with the group `arguments`, and the group `name` if there are several tools."""
    return [
        ToolCall(match.groupdict().get("name"), (match.group("arguments") or "").strip())
        for match in re.finditer(pattern, text)
    ]


class ToolEnvironment:
    """The environment of a conversation with tools, which have no state.

    Args:
        functions: the tools by name, plain or async functions.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], config: Config) -> None:
        self.functions, self.config = dict(functions), config

    async def step(self, action: str) -> Observation:
        """Runs the calls of a turn in order. Raises a tool's error, unless `on_error` makes it a reply to the model."""
        pattern = self.config.pattern
        calls = hermes_calls(action) if pattern is None else regex_calls(action, pattern)
        if not calls:
            return Observation(done=True, metrics={"calls": 0, "call_errors": 0})
        messages, errors = [], 0
        for call in calls:
            try:
                content = await self._run_call(call)
            except BadToolCall as error:
                content, errors = f"error: {error}", errors + 1
            shown = self.config.result.format(content=content) if pattern is not None else content
            messages.append({"role": "tool", "name": call.name or "", "content": shown})
        return Observation(messages=messages, metrics={"calls": len(calls), "call_errors": errors})

    async def _run_call(self, call: ToolCall) -> str:
        """Returns the tool's result as text. Raises BadToolCall."""
        if call.problem:
            raise BadToolCall(call.problem)
        function = self._find_function(call.name)
        arguments = _bind_arguments(function, call.arguments)
        try:
            value = function(**arguments)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            if self.config.on_error == "tell":
                raise BadToolCall(f"{type(error).__name__}: {error}") from error
            raise
        return value if isinstance(value, str) else _json(value)

    def _find_function(self, name: str | None) -> Callable[..., Any]:
        if name is None and len(self.functions) == 1:
            return next(iter(self.functions.values()))
        if name not in self.functions:
            raise BadToolCall(f"there is no tool {name!r}; {suggest_name(name or '', list(self.functions))}")
        return self.functions[name]


def _bind_arguments(function: Callable[..., Any], given: str | dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of a call. Raises BadToolCall if the function does not accept them."""
    signature = inspect.signature(function)
    if isinstance(given, str):
        names = list(signature.parameters)
        if len(names) == 1:
            given = {names[0]: given}
        else:
            try:
                given = parse_json(given, "the text")
            except MalformedJson as error:
                raise BadToolCall(f"the arguments are not JSON: {error.problem}") from error
            if not isinstance(given, dict):
                raise BadToolCall("the arguments must be a JSON object")
    try:
        signature.bind(**given)
    except TypeError as error:
        raise BadToolCall(str(error)) from error
    return given


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def reset_environment(environment: object, prompt: Prompt) -> Any:
    """Returns the result of an environment's `reset`; None if it has no `reset`."""
    reset = getattr(environment, "reset", None)
    return None if reset is None else reset(prompt)
