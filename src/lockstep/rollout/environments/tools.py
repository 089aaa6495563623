"""Tools as an environment: their schemas for the chat template, read without running their code; parsing and execution
of the model's calls.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.cluster.user_code import check_source, split_path, suggest_name
from lockstep.config.rollout import EnvironmentConfig
from lockstep.config.rollout import EnvironmentConfig as Config
from lockstep.data.samples import Prompt
from lockstep.rollout.environments.environment_messages import EnvironmentCodeError
from lockstep.rollout.environments.environment_protocol import Observation

_TYPES: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "list": {"type": "array"},
    "tuple": {"type": "array"},
    "dict": {"type": "object"},
    "Any": {},
}
_PLAIN = "str, int, float, bool, list, dict, Literal or unions of these"
_HEADING = re.compile(r"^\s*(Args|Arguments|Returns|Raises|Example|Examples|Note|Notes):\s*$", re.MULTILINE)
_ENTRY = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
_CHOICES = re.compile(r"\(\s*choices:\s*(\[.*?\])\s*\)\s*$", re.IGNORECASE | re.DOTALL)


def tool_schemas(paths: Sequence[str], base: Path = Path()) -> list[dict[str, Any]]:
    """One schema per function, in order.

    Raises:
        EnvironmentCodeError: no such function, one without docstring or annotations, or two of one name.
    """
    schemas = [tool_schema(path, base) for path in paths]
    names = [schema["function"]["name"] for schema in schemas]
    for path, name in zip(paths, names, strict=True):
        if names.count(name) > 1:
            raise EnvironmentCodeError(path, f"two tools are called {name!r}", "rename one of them")
    return schemas


def tool_schema(path: str, base: Path = Path()) -> dict[str, Any]:
    """`{"type": "function", "function": {name, description, parameters}}`. Raises EnvironmentCodeError."""
    module = check_source(path, base, EnvironmentCodeError)
    name = split_path(path, EnvironmentCodeError)[1]
    found = [] if module is None else [node for node in ast.walk(module) if _is_function(node, name)]
    if not found:
        remedy = "give the file and name that `def` it: the model reads its parameters and docstring"
        raise EnvironmentCodeError(path, f"the text of a function {name!r} is not found", remedy)
    node = found[-1]
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
    given = node.args
    if given.vararg or given.kwarg or given.posonlyargs:
        raise EnvironmentCodeError(path, "has * or positional-only parameters", "name every parameter: calls are JSON")
    every = [*given.args, *given.kwonlyargs]
    optional = {each.arg for each in given.args[len(given.args) - len(given.defaults) :]}
    optional |= {
        each.arg for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is not None
    }
    properties = {}
    for each in every:
        if each.annotation is None:
            raise EnvironmentCodeError(path, f"parameter {each.arg!r} has no type", f"annotate it: {_PLAIN}")
        if each.arg not in described:
            remedy = f'add a line "{each.arg}: ..." below "Args:" in its docstring'
            raise EnvironmentCodeError(path, f"parameter {each.arg!r} is not described", remedy)
        properties[each.arg] = _described(
            _schema(path, f"parameter {each.arg!r}", each.annotation), described[each.arg]
        )
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    required = [each.arg for each in every if each.arg not in optional]
    return schema | ({"required": required} if required else {})


def _described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    choices = _CHOICES.search(text)
    if choices:
        schema = {**schema, "enum": list(ast.literal_eval(choices[1]))}
        text = text[: choices.start()].strip()
    return {**schema, "description": text}


def _schema(path: str, what: str, node: ast.expr) -> dict[str, Any]:
    """JSON schema of an annotation, as transformers writes it."""
    match node:
        case ast.Constant(value=str(text)):
            return _schema(path, what, ast.parse(text, mode="eval").body)
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _TYPES:
            return dict(_TYPES[name])
        case ast.BinOp(op=ast.BitOr()):
            return _union(path, what, _alternatives(node))
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            return _generic(path, what, name, inner.elts if isinstance(inner, ast.Tuple) else [inner])
    raise EnvironmentCodeError(path, f"{what} has the type {ast.unparse(node)}, which is not known", f"use {_PLAIN}")


def _generic(path: str, what: str, name: str, inner: list[ast.expr]) -> dict[str, Any]:
    match name:
        case "Optional":
            return _union(path, what, [*inner, ast.Constant(None)])
        case "Union":
            return _union(path, what, inner)
        case "Literal":
            values = [ast.literal_eval(each) for each in inner]
            kinds = sorted({str(_TYPES[type(value).__name__]["type"]) for value in values if value is not None})
            found: dict[str, Any] = {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}
            return found | ({"nullable": True} if None in values else {})
        case "list" | "List" | "Sequence":
            return {"type": "array", "items": _schema(path, what, inner[0])}
        case "tuple" | "Tuple":
            return {"type": "array", "prefixItems": [_schema(path, what, each) for each in inner]}
        case "dict" | "Dict":
            values_schema = _schema(path, what, inner[1])
            return {"type": "object"} | ({"additionalProperties": values_schema} if values_schema else {})
    raise EnvironmentCodeError(path, f"{what} has the type {name}[...], which is not known", f"use {_PLAIN}")


def _alternatives(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_alternatives(node.left), *_alternatives(node.right)]
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
    """Description, text of each parameter, and `description` of the result where there is one."""
    text = ast.get_docstring(node)
    if not text:
        raise EnvironmentCodeError(path, "has no docstring", "say what it does: the model reads that")
    parts = _HEADING.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    arguments = _entries(sections.get("Args", sections.get("Arguments", "")))
    returns = " ".join(sections.get("Returns", "").split())
    return parts[0].strip(), arguments, {"description": returns} if returns else {}


def _entries(section: str) -> dict[str, str]:
    """Google's style: `name: text` at the section's indent, further lines deeper."""
    lines = [line for line in section.splitlines() if line.strip()]
    found: dict[str, str] = {}
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    name = ""
    for line in lines:
        entry = _ENTRY.match(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        if entry:
            name, found[entry[1]] = entry[1], entry[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def chat_template_tools(config: EnvironmentConfig, base: Path = Path()) -> list[dict[str, Any]]:
    """Schemas of the tools for the chat template; none if calls have another style, or if there is an environment.

    Raises:
        EnvironmentCodeError: no such file, package or name, or a function that cannot be described.
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
    """An invalid call of the model. The model gets the error as a reply, whatever `on_error` says."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str | None
    """None if there is one tool and the pattern has no name."""
    arguments: str | dict[str, Any]
    """Text that is not parsed yet, or the parsed arguments."""
    problem: str = ""
    """Why it cannot be parsed."""


def hermes_calls(text: str) -> list[ToolCall]:
    """Calls in the style of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. The last one
    may lack its end tag, if that is the stop string."""
    return [_hermes(body) for body in _HERMES.findall(text)]


def _hermes(body: str) -> ToolCall:
    try:
        call = json.loads(body)
    except ValueError as error:
        return ToolCall(None, body, f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(None, body, 'expected {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return ToolCall(call["name"], arguments)
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], body, "arguments must be a JSON object")
    return ToolCall(call["name"], arguments)


def regex_calls(text: str, pattern: str) -> list[ToolCall]:
    """Calls found by a pattern with the group `arguments`, and the group `name` if there are several tools."""
    return [
        ToolCall(match.groupdict().get("name"), (match.group("arguments") or "").strip())
        for match in re.finditer(pattern, text)
    ]


class ToolEnvironment:
    """The environment of a conversation with tools. Tools have no state: write an environment for that.

    Args:
        functions: by name, plain or async.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], config: Config) -> None:
        self.functions, self.config = dict(functions), config

    async def step(self, action: str) -> Observation:
        """Runs the calls of a turn in order. Raises errors of tools, unless the model gets them as replies."""
        pattern = self.config.pattern
        calls = hermes_calls(action) if pattern is None else regex_calls(action, pattern)
        if not calls:
            return Observation(done=True, metrics={"calls": 0, "call_errors": 0})
        messages, errors = [], 0
        for call in calls:
            try:
                content = await self._result(call)
            except BadToolCall as error:
                content, errors = f"error: {error}", errors + 1
            shown = self.config.result.format(content=content) if pattern is not None else content
            messages.append({"role": "tool", "name": call.name or "", "content": shown})
        return Observation(messages=messages, metrics={"calls": len(calls), "call_errors": errors})

    async def _result(self, call: ToolCall) -> str:
        """The result of a tool as text. Raises BadToolCall."""
        if call.problem:
            raise BadToolCall(call.problem)
        function = self._function(call.name)
        arguments = _arguments(function, call.arguments)
        try:
            value = function(**arguments)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            if self.config.on_error == "tell":
                raise BadToolCall(f"{type(error).__name__}: {error}") from error
            raise
        return value if isinstance(value, str) else _json(value)

    def _function(self, name: str | None) -> Callable[..., Any]:
        if name is None and len(self.functions) == 1:
            return next(iter(self.functions.values()))
        if name not in self.functions:
            raise BadToolCall(f"there is no tool {name!r}; {suggest_name(name or '', list(self.functions))}")
        return self.functions[name]


def _arguments(function: Callable[..., Any], given: str | dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call. Raises BadToolCall."""
    signature = inspect.signature(function)
    if isinstance(given, str):
        names = list(signature.parameters)
        if len(names) == 1:
            given = {names[0]: given}
        else:
            try:
                given = json.loads(given)
            except ValueError as error:
                raise BadToolCall(f"the arguments are not JSON: {error}") from error
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
    """The result of an environment's `reset`, None if it has none."""
    reset = getattr(environment, "reset", None)
    return None if reset is None else reset(prompt)
