"""Finding a user's reward function, and which of the three known signatures it has."""

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from lockstep.rewards.api import Signature

TELLTALE: Mapping[Signature, frozenset[str]] = {
    "trl": frozenset({"completions", "completion_ids", "trainer_state"}),
    "verl": frozenset({"solution_str"}),
    "openrlhf": frozenset({"queries"}),
}
"""Parameters that only this signature has."""
FORMS: Mapping[Signature, str] = {
    "trl": "f(prompts, completions, **columns) -> list[float | None]",
    "verl": "f(data_source, solution_str, ground_truth, extra_info=None) -> float | dict",
    "openrlhf": "f(queries, prompts, labels, **kwargs) -> dict | tensor | list",
}
OFFERED: Mapping[Signature, frozenset[str]] = {
    "trl": frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}),
    "verl": frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
    "openrlhf": frozenset({"queries", "prompts", "labels", "references"}),
}
"""What each signature hands over by itself; columns of the data come on top."""


class FunctionError(ValueError):
    """A reward function that cannot be used: which one, what is wrong, what would help."""

    def __init__(self, path: str, problem: str, remedy: str = "", trace: str | None = None) -> None:
        super().__init__(f"reward function {path}: {problem}" + (f"; {remedy}" if remedy else ""))
        self.path, self.problem, self.remedy, self.traceback = path, problem, remedy, trace


@dataclass(frozen=True, slots=True)
class UserFunction:
    """A loaded function with what is needed to call it."""

    path: str
    call: Callable[..., Any]
    signature: Signature
    parameters: Mapping[str, inspect.Parameter]
    """Those that can be given by keyword (or, for OpenRLHF, position)."""
    takes_any: bool
    """Has `**kwargs`."""
    arguments: dict[str, Any] = field(default_factory=dict)

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.parameters

    def requires(self) -> list[str]:
        """Parameters without a default which the configured arguments leave open."""
        free = inspect.Parameter.empty
        return [name for name, each in self.parameters.items() if each.default is free and name not in self.arguments]


def load(
    path: str,
    signature: Literal["auto"] | Signature = "auto",
    arguments: dict[str, Any] | None = None,
    base: Path = Path(),
) -> UserFunction:
    """The function at `file.py:name` (relative to `base`) or `package.module:name`. Raises FunctionError."""
    source, _, name = path.rpartition(":")
    if not source or not name:
        raise FunctionError(path, "names no function", "write `file.py:name` or `package.module:name`")
    module = _from_file(path, base / source) if source.endswith(".py") else _from_package(path, source, base)
    function = _attribute(path, module, name)
    parameters, takes_any = _parameters(path, function)
    known = detect(path, parameters) if signature == "auto" else signature
    user = UserFunction(path, function, known, parameters, takes_any, dict(arguments or {}))
    _check(user)
    return user


def detect(path: str, parameters: Mapping[str, inspect.Parameter]) -> Signature:
    """The signature by the parameters' names. Raises FunctionError where they fit none or several."""
    fits = [signature for signature, telltales in TELLTALE.items() if not telltales.isdisjoint(parameters)]
    if len(fits) == 1:
        return fits[0]
    listed = ", ".join(parameters) or "no named parameter"
    if fits:
        problem = f"its parameters ({listed}) fit the signatures of {' and '.join(fits)}"
    else:
        problem = f"its parameters ({listed}) fit none of the known signatures: " + "  ".join(FORMS.values())
    raise FunctionError(path, problem, "set `signature: trl`, `verl` or `openrlhf` on the term")


def _from_file(path: str, file: Path) -> ModuleType:
    file = file.expanduser().resolve()
    if not file.is_file():
        siblings = [each.name for each in file.parent.glob("*.py")] if file.parent.is_dir() else []
        raise FunctionError(path, f"there is no file {file}", _nearest(file.name, siblings))
    name = f"lockstep_rewards_{zlib.crc32(str(file).encode()):08x}_{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise FunctionError(path, f"{file} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles inside look themselves up
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # as `python file.py` would: the file may import its neighbours
    loader = spec.loader
    try:
        _imported(path, lambda: loader.exec_module(module))
    except FunctionError:
        del sys.modules[name]
        raise
    return module


def _from_package(path: str, source: str, base: Path) -> ModuleType:
    if str(base.resolve()) not in sys.path:
        sys.path.insert(0, str(base.resolve()))
    module = _imported(path, lambda: importlib.import_module(source))
    assert isinstance(module, ModuleType)
    return module


def _imported(path: str, run: Callable[[], object]) -> object:
    """Runs a user's module, in which anything may happen."""
    try:
        return run()
    except (Exception, SystemExit) as error:  # whatever it is, it is told with the traceback
        trace = user_traceback(error)
        raise FunctionError(path, f"importing it raised {type(error).__name__}: {error}", trace=trace) from error


def _attribute(path: str, module: ModuleType, name: str) -> Callable[..., Any]:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            candidates = [each for each, value in vars(found).items() if callable(value)]
            raise FunctionError(path, f"{module.__file__} has no {part!r}", _nearest(part, candidates))
        found = getattr(found, part)
    if inspect.isclass(found):
        raise FunctionError(path, f"{name} is a class", "name a function, or an instance that can be called")
    if not callable(found):
        raise FunctionError(path, f"{name} is {type(found).__name__}, which cannot be called")
    function: Callable[..., Any] = found
    return function


def _parameters(path: str, function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    try:
        every = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise FunctionError(path, f"its parameters cannot be read ({error})", "wrap it in a Python function") from error
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {name: each for name, each in every.items() if each.kind not in variable}
    return named, any(each.kind is inspect.Parameter.VAR_KEYWORD for each in every.values())


def _check(user: UserFunction) -> None:
    """What can be refused before the first call."""
    for name in user.arguments:
        if name in OFFERED[user.signature] - {"data_source", "extra_info", "labels", "ground_truth"}:
            raise FunctionError(user.path, f"`arguments` sets {name!r}, which is what is being scored")
        if not user.takes(name):
            nearest = _nearest(name, list(user.parameters))
            raise FunctionError(user.path, f"`arguments` sets {name!r}, which it does not take", nearest)
    if user.signature == "openrlhf" and not user.takes("queries") and len(user.parameters) >= 3:
        return  # called by position
    if not any(user.takes(name) for name in OFFERED[user.signature]) or positional_only(user):
        listed = ", ".join(user.parameters) or "none"
        raise FunctionError(
            user.path,
            f"its parameters ({listed}) cannot take the signature {user.signature}",
            f"expected {FORMS[user.signature]}",
        )


def positional_only(user: UserFunction) -> bool:
    return any(each.kind is inspect.Parameter.POSITIONAL_ONLY for each in user.parameters.values())


def user_traceback(error: BaseException) -> str:
    """The traceback from the user's first frame on: Lockstep's own and the import machinery's say nothing to them."""
    own = str(Path(__file__).parent)
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((own, "<frozen importlib")) and "/importlib/" not in file and "/asyncio/" not in file:
            break
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _nearest(name: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(name, candidates, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there are: {', '.join(sorted(candidates)[:20])}" if candidates else ""
