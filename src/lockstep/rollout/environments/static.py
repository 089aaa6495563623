"""Whether an environment or tools can be found, and what the model is told of them, without running their code."""

import ast
from pathlib import Path
from typing import Any

from lockstep.cluster.user_code import check_source, split_path
from lockstep.config.environment import Environment
from lockstep.rollout.environments.api import EnvironmentCodeError
from lockstep.rollout.environments.schemas import tool_schemas


def told_tools(config: Environment, base: Path = Path()) -> list[dict[str, Any]]:
    """Schemas of the tools for the chat template; none where calls are not in its style, or there is an environment.

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
