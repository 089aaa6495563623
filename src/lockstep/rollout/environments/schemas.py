"""What the model is told of tools: OpenAI-style schemas, read off the text of functions.

Nothing of the user's runs for it. The result is what transformers' `get_json_schema` makes of the function: types from
the annotations, descriptions from a docstring in Google's style.
"""

import ast
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.cluster.user_code import check_source, split_path
from lockstep.rollout.environments.api import EnvironmentCodeError

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
        remedy = "give the file and name that `def` it: its parameters and docstring are what the model is told"
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
        raise EnvironmentCodeError(path, "has no docstring", "say what it does: that is what the model is told")
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
