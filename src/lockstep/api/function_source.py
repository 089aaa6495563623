"""Carries functions of the program that started a run to the processes of the run, as source.

Worker processes import a function by module and name, or from a file. The main module of a script or a notebook cannot
be imported: a script would start its run again, and a notebook is no file. Such a function is copied instead, with what
it needs: functions and classes of the same module, imports, and constants. Nothing is pickled.
"""

import ast
import builtins
import importlib.machinery
import inspect
import linecache
import math
import os
import re
import symtable
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

MAIN = "__main__"
LARGEST_CONSTANT = 2**20
"""Characters of a constant that is copied: a longer one belongs into a file."""
_REMEDY = "put the function into a file.py and import it, or pass its path 'file.py:name'"


class FunctionNotCarried(ValueError):
    """A function cannot be used by other processes. Says which one, why, and what to do."""

    def __init__(self, name: str, problem: str, remedy: str = _REMEDY) -> None:
        super().__init__(f"reward function {name}: {problem}; {remedy}")
        self.name, self.problem, self.remedy = name, problem, remedy


def importable_path(function: Callable[..., Any]) -> str | None:
    """The path by which another process imports a function, `package.module:name` or `file.py:name`; None if it is
    defined in the main module, whose functions are copied.

    Raises:
        FunctionNotCarried: it has no name in its module, or its module cannot be imported elsewhere.
    """
    name, module_name = _name_of(function), str(getattr(function, "__module__", ""))
    if module_name == MAIN:
        return None
    module = sys.modules.get(module_name)
    if module is None or _resolve(module, name) is not function:
        raise FunctionNotCarried(name, f"the module {module_name} has no such name")
    top, dot, _ = module_name.partition(".")
    file = getattr(module, "__file__", None)
    if _is_installed(top) or (dot and _is_inherited(top)):
        return f"{module_name}:{name}"
    if dot or not file or not file.endswith(".py"):
        problem = f"the package {top} is neither installed nor in the current folder, {Path.cwd()}"
        raise FunctionNotCarried(name, problem, "install it, or start in the folder that contains it")
    path, here = Path(file).resolve(), Path.cwd().resolve()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{name}"


def _name_of(function: Any) -> str:
    """The function's name. Raises FunctionNotCarried for what is no function with a name."""
    if isinstance(function, FunctionType) and "<lambda>" in function.__qualname__:
        raise FunctionNotCarried("<lambda>", "a lambda has no name by which another process finds it", "use `def`")
    if not isinstance(function, FunctionType) or not hasattr(function, "__code__"):
        shown = getattr(function, "__qualname__", type(function).__qualname__)
        problem = f"it is {type(function).__qualname__}, and only functions written with `def` are taken"
        raise FunctionNotCarried(shown, problem, "wrap it in a function")
    return function.__qualname__


def _resolve(module: ModuleType, name: str) -> object:
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _is_installed(top: str) -> bool:
    """Whether every process of this environment finds a module: of Python, or installed."""
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return True
    editable = [finder for finder in sys.meta_path if getattr(finder, "__module__", "").startswith("__editable__")]
    if any(finder.find_spec(top, None, None) for finder in editable):
        return True
    paths = [each for each in sys.path if each.endswith(("site-packages", "dist-packages"))]
    paths += [line for path in paths for line in _linked_folders(Path(path))]
    return importlib.machinery.PathFinder.find_spec(top, paths) is not None


def _is_inherited(top: str) -> bool:
    """Whether the processes of a run find a module in the folder where it began, or in PYTHONPATH."""
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    return importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd()), *paths]) is not None


def _linked_folders(site_packages: Path) -> list[str]:
    """The folders that `.pth` files add, as those of editable installations."""
    lines = [line for file in site_packages.glob("*.pth") for line in file.read_text(errors="replace").splitlines()]
    return [line for line in lines if line.startswith("/")]


class SourceModule:
    """A module of copied functions with what they need.

    Everything shares one namespace, so a name may stand for one object only.
    """

    def __init__(self) -> None:
        self._objects: dict[str, object] = {}
        """What every name stands for."""
        self._parts: list[str] = []
        """The source of each object, what it needs before it."""
        self._folders: list[str] = []
        """The folders of modules that are imported and not installed."""

    def text(self) -> str:
        """The source of the module."""
        header = ["# Functions of the program that started this run, and what they need."]
        header += [f"__import__('sys').path.append({folder!r})" for folder in dict.fromkeys(self._folders)]
        return "\n".join(header) + "\n\n" + "\n\n".join(part.strip("\n") for part in self._parts) + "\n"

    def add(self, function: Callable[..., Any]) -> str:
        """Adds a function of the main module, and returns its name.

        Raises:
            FunctionNotCarried: its source is not available, or it needs something that is no source: a lambda, or an
                object other than a constant.
        """
        qualified = _name_of(function)
        self._define(function.__name__, function, qualified)
        return function.__name__

    def _define(self, name: str, value: object, user: str) -> None:
        """Adds what `name` stands for in `user`."""
        if name in self._objects:
            if self._objects[name] is not value:
                problem = f"the name {name!r} stands for two different things in what it needs"
                raise FunctionNotCarried(user, problem, "give one of them another name")
            return
        self._objects[name] = value
        if isinstance(value, ModuleType):
            self._import_module(name, value, user)
        elif isinstance(value, FunctionType | type) and value.__module__ == MAIN:
            self._copy(name, value, user)
        elif (line := _import_line(name, value)) is not None:
            self._parts.append(line)
            self._find_folder(value.__module__)
        else:
            self._parts.append(f"{name} = {_constant(name, value, user)}")

    def _import_module(self, name: str, module: ModuleType, user: str) -> None:
        if module.__name__ == MAIN:
            raise FunctionNotCarried(user, f"it uses the main module as {name!r}")
        if "." in module.__name__:
            parent, _, last = module.__name__.rpartition(".")
            self._parts.append(f"from {parent} import {last} as {name}")
        else:
            self._parts.append(f"import {module.__name__} as {name}")
        self._find_folder(module.__name__)

    def _find_folder(self, module: str) -> None:
        """Keeps the folder of a module that other processes would not find, such as one beside the script."""
        top = module.partition(".")[0]
        file = getattr(sys.modules.get(top), "__file__", None)
        if file and not _is_installed(top):
            path = Path(file).resolve()
            self._folders.append(str(path.parents[1] if path.name == "__init__.py" else path.parent))

    def _copy(self, name: str, value: FunctionType | type, user: str) -> None:
        """Copies a function or class. Raises FunctionNotCarried."""
        source = _source_of(value, user)
        node = ast.parse(source).body[0]
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        outer, inner = vars(sys.modules[MAIN]), dict[str, object]()
        if isinstance(value, FunctionType):
            outer, inner = value.__globals__, _closure(value, user)
        if node.decorator_list and outer.get(node.name) is not value:
            raise FunctionNotCarried(user, f"{node.name} is decorated, and the decorator returns another function")
        if inner and any(isinstance(each, ast.Nonlocal) for each in ast.walk(node)):
            raise FunctionNotCarried(user, f"{node.name} changes a variable of the function around it")
        for each in sorted(_global_names(source)):
            if each == node.name:
                continue
            if each in inner or each in outer:
                self._define(each, inner.get(each, outer.get(each)), user)
            elif not hasattr(builtins, each):
                raise FunctionNotCarried(user, f"it uses {each!r}, which is not defined", "define it first")
        self._parts.append(source if node.name == name else f"{source}\n\n{name} = {node.name}")


def _source_of(value: FunctionType | type, user: str) -> str:
    """The source of a function or class, without the indentation of what is around it. Raises FunctionNotCarried."""
    name = value.__qualname__
    if isinstance(value, FunctionType) and "<lambda>" in name:
        raise FunctionNotCarried(user, "it uses a lambda, whose source cannot be copied", "use `def`")
    try:
        source = inspect.getsource(value)
    except (OSError, TypeError) as error:
        found = _source_of_command(value) if isinstance(value, FunctionType) else _source_of_class(value)
        if found is None:
            raise FunctionNotCarried(user, f"the source of {name} is not available ({error})") from error
        source = found
    source = textwrap.dedent(source)
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise FunctionNotCarried(user, f"the source of {name} cannot be copied ({error})") from error
    if len(body) != 1 or getattr(body[0], "name", None) != value.__name__:
        raise FunctionNotCarried(user, f"the source of {name} cannot be found: it changed, or stands inside a line")
    return source if source.endswith("\n") else f"{source}\n"


def _source_of_command(function: FunctionType) -> str | None:
    """The source of a function in the text of `python -c`, which Python itself does not keep."""
    arguments = sys.orig_argv
    if function.__code__.co_filename != "<string>" or "-c" not in arguments:
        return None
    text = arguments[arguments.index("-c") + 1]
    return _definition_in(text, function.__name__, function.__code__.co_firstlineno)


def _source_of_class(value: type) -> str | None:
    """The source of a class of a notebook, found by the lines of one of its methods."""
    for method in vars(value).values():
        if isinstance(method, FunctionType):
            text = "".join(linecache.getlines(method.__code__.co_filename))
            if found := _definition_in(text, value.__name__, method.__code__.co_firstlineno):
                return found
    return None


def _definition_in(text: str, name: str, line: int) -> str | None:
    """The definition of a name in a text, with its decorators, that begins at a line or contains it."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError:
        return None
    lines = text.splitlines(keepends=True)
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first <= line <= (node.end_lineno or first):
                return "".join(lines[first - 1 : node.end_lineno])
    return None


def _closure(function: FunctionType, user: str) -> dict[str, object]:
    """The variables of the functions around this one. Raises FunctionNotCarried if one has no value yet."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        return {name: cell.cell_contents for name, cell in cells}
    except ValueError as error:
        raise FunctionNotCarried(user, "it uses a variable of the function around it that has no value") from error


def _global_names(source: str) -> set[str]:
    """The names that a definition takes from its module, or from the functions around it."""
    found: set[str] = set()

    def visit(table: symtable.SymbolTable) -> None:
        for symbol in table.get_symbols():
            if symbol.is_global() or (table.get_type() == "module" and symbol.is_referenced()):
                found.add(symbol.get_name())
        for child in table.get_children():
            visit(child)

    visit(symtable.symtable(source, "copied", "exec"))
    return found


def _import_line(name: str, value: Any) -> str | None:
    """The line that imports an object by the module and name that it knows itself; None if that is another object."""
    module_name, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module_name, str) or not isinstance(own, str) or module_name in (MAIN, "builtins"):
        return None
    module = sys.modules.get(module_name)
    if module is None or "." in own or getattr(module, own, None) is not value:
        return None
    return f"from {module_name} import {own} as {name}"


def _constant(name: str, value: object, user: str) -> str:
    """The source of a constant. Raises FunctionNotCarried for other objects."""
    if isinstance(value, re.Pattern):
        return f"__import__('re').compile({value.pattern!r}, {value.flags})"
    if isinstance(value, Path):
        return f"__import__('pathlib').Path({str(value)!r})"
    if not _is_plain(value):
        problem = f"it uses {name!r}, which is {type(value).__qualname__}: only constants can be copied"
        raise FunctionNotCarried(user, problem, "create it inside the function, or " + _REMEDY)
    text = repr(value)
    if len(text) > LARGEST_CONSTANT:
        raise FunctionNotCarried(
            user, f"the constant {name!r} is larger than 1 MiB", "read it from a file, or " + _REMEDY
        )
    return text


def _is_plain(value: object) -> bool:
    """Whether `repr` is the source of a value: numbers, texts, and containers of them."""
    if value is None or type(value) in (bool, int, str, bytes):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if type(value) in (list, tuple) or (type(value) in (set, frozenset) and value):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(each) for key, each in value.items())
    return False
