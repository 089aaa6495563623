"""Whether users' functions can be found, without running their code: that happens in scorer processes only."""

import ast
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from lockstep.config import reward as config
from lockstep.rewards.functions import FunctionError


def check_terms(terms: Sequence[config.Term], base: Path = Path()) -> None:
    """Looks every user's function up in the text of its module.

    Raises:
        FunctionError: no such file or package, text that is no Python, or no such name in it.
    """
    for term in terms:
        if isinstance(term, config.Function):
            _check(term.path, base)


def compares_answers(terms: Sequence[config.Term]) -> bool:
    """Whether one of the verifiers needs an answer with every prompt."""
    return any(isinstance(term, config.ExactMatch | config.Math) for term in terms)


def _check(path: str, base: Path) -> None:
    source, _, name = path.rpartition(":")
    if not source or not name:
        raise FunctionError(path, "names no function", "write `file.py:name` or `package.module:name`")
    if not source.endswith(".py"):
        # Only the top package is looked up: finding a submodule would import its parents.
        top = source.partition(".")[0]
        if not (base / top).exists() and not (base / f"{top}.py").exists() and importlib.util.find_spec(top) is None:
            raise FunctionError(path, f"there is no package {top!r}", "install it, or give a path to a file.py")
        return
    file = (base / source).expanduser()
    if not file.is_file():
        raise FunctionError(path, f"there is no file {file}", "paths are relative to the current folder")
    try:
        module = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise FunctionError(path, f"{file} is not valid Python: {error}") from error
    names = defined(module)
    top_name = name.partition(".")[0]
    if "*" not in names and top_name not in names:
        raise FunctionError(
            path, f"{file} defines no {top_name!r}", f"it defines {', '.join(sorted(names)) or 'nothing'}"
        )


def defined(module: ast.Module) -> set[str]:
    """Names a module's top level binds; `*` where an import makes them unknowable."""
    found: set[str] = set()
    for node in ast.walk(module):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Import() | ast.ImportFrom():
                found.update(alias.asname or alias.name for alias in node.names)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
    return found
