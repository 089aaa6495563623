"""The signatures of users' reward functions: detecting them, and checking what a function needs against the data."""

import ast
import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.cluster.user_code import UserCodeError, check_source, load_object, split_path, suggest_name
from lockstep.config.reward import FunctionReward
from lockstep.data.images.image_store import ImageStore
from lockstep.rewards.scoring_messages import DataColumns, FunctionSignature

DISTINCTIVE_PARAMETERS: Mapping[FunctionSignature, frozenset[str]] = {
    "trl": frozenset({"completions", "completion_ids", "trainer_state"}),
    "verl": frozenset({"solution_str"}),
    "verl_batch": frozenset({"solution_strs"}),
    "openrlhf": frozenset({"queries"}),
}
"""The parameters that only this signature has. VLM-R1's functions look like TRL's: only the config tells."""
SIGNATURE_FORMS: Mapping[FunctionSignature, str] = {
    "trl": "f(prompts, completions, **columns) -> list[float | None]",
    "vlm_r1": "f(completions, solution, **columns) -> list[float | None]",
    "verl": "f(data_source, solution_str, ground_truth, extra_info=None) -> float | dict",
    "verl_batch": "f(data_sources, solution_strs, ground_truths, extra_infos) -> list[float | dict]",
    "openrlhf": "f(queries, prompts, labels, **kwargs) -> dict | tensor | list",
}
_TRL_PARAMETERS = frozenset({"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"})
PROVIDED_PARAMETERS: Mapping[FunctionSignature, frozenset[str]] = {
    "trl": _TRL_PARAMETERS,
    "vlm_r1": _TRL_PARAMETERS | {"problem", "accu_reward_method"},
    "verl": frozenset({"data_source", "solution_str", "ground_truth", "extra_info"}),
    "verl_batch": frozenset({"data_sources", "solution_strs", "ground_truths", "extra_infos"}),
    "openrlhf": frozenset({"queries", "prompts", "labels", "references"}),
}
"""Arguments that each signature provides in addition to the data's columns."""

ImageForm = Literal["paths", "pil", "none"]
_DATA_PARAMETERS = frozenset(
    {"data_source", "extra_info", "labels", "ground_truth", "data_sources", "extra_infos", "ground_truths"}
)
"""Arguments that come from the data's columns, and may be configured instead."""
IMAGE_PARAMETERS: Mapping[str, frozenset[str]] = {
    "paths": frozenset({"image_path", "image_grid_thw"}),
    "pil": frozenset({"image_path", "image_grid_thw", "images"}),
    "none": frozenset(),
}
"""Arguments that come from a prompt's images, by the term's `images`."""
ANSWER_NAMES = ("answer", "solution", "ground_truth", "label")
"""Names under which functions expect the ground truth; provided if no column has the name."""


class RewardFunctionError(UserCodeError):
    """A reward function cannot be used. Names its path, the problem and a fix."""

    noun = "reward function"


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded reward function and how to call it."""

    path: str
    call: Callable[..., Any]
    signature: FunctionSignature
    parameters: Mapping[str, inspect.Parameter]
    """Parameters that can be passed by keyword (for OpenRLHF, by position)."""
    has_kwargs: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    """The configured arguments."""
    images: ImageForm = "paths"
    """What it gets of the prompts' images."""
    store: ImageStore | None = None
    """The run's prepared images; None if there are none."""

    def takes(self, name: str) -> bool:
        return self.has_kwargs or name in self.parameters

    def requires(self) -> list[str]:
        """Parameters with neither a default nor a configured argument."""
        empty = inspect.Parameter.empty
        return [name for name, each in self.parameters.items() if each.default is empty and name not in self.arguments]


def load_reward_function(
    path: str,
    signature: Literal["auto"] | FunctionSignature = "auto",
    arguments: dict[str, Any] | None = None,
    base: Path = Path(),
    images: ImageForm = "paths",
) -> RewardFunction:
    """Loads the function at `file.py:name` (relative to `base`) or `package.module:name`. Raises
    RewardFunctionError."""
    return bind_reward_function(path, load_object(path, base, RewardFunctionError), signature, arguments, images)


def bind_reward_function(
    path: str,
    loaded: Any,
    signature: Literal["auto"] | FunctionSignature = "auto",
    arguments: dict[str, Any] | None = None,
    images: ImageForm = "paths",
) -> RewardFunction:
    """Finds out how to call a function. Raises RewardFunctionError if it fits no signature.

    Args:
        path: its name in errors.
    """
    function = _check_callable(path, loaded)
    parameters, has_kwargs = _parameters(path, function)
    detected = detect_signature(path, parameters) if signature == "auto" else signature
    bound = RewardFunction(path, function, detected, parameters, has_kwargs, dict(arguments or {}), images)
    _check_function(bound)
    return bound


def detect_signature(path: str, parameters: Mapping[str, inspect.Parameter]) -> FunctionSignature:
    """Detects the signature by the names of the parameters. Raises RewardFunctionError if none or several match."""
    matches = [signature for signature, names in DISTINCTIVE_PARAMETERS.items() if not names.isdisjoint(parameters)]
    if len(matches) == 1:
        return matches[0]
    listed = ", ".join(parameters) or "no named parameter"
    if matches:
        problem = f"its parameters ({listed}) fit the signatures of {' and '.join(matches)}"
    else:
        problem = f"its parameters ({listed}) fit none of the known signatures: " + "  ".join(SIGNATURE_FORMS.values())
    raise RewardFunctionError(
        path, problem, "set `signature: trl`, `vlm_r1`, `verl`, `verl_batch` or `openrlhf` on the term"
    )


def _check_callable(path: str, loaded: Any) -> Callable[..., Any]:
    name = path.rpartition(":")[2]
    if inspect.isclass(loaded):
        raise RewardFunctionError(path, f"{name} is a class", "name a function, or an instance that can be called")
    if not callable(loaded):
        raise RewardFunctionError(path, f"{name} is {type(loaded).__name__}, which cannot be called")
    function: Callable[..., Any] = loaded
    return function


def _parameters(path: str, function: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    try:
        every = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise RewardFunctionError(
            path, f"its parameters cannot be read ({error})", "wrap it in a Python function"
        ) from error
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {name: each for name, each in every.items() if each.kind not in variable}
    return named, any(each.kind is inspect.Parameter.VAR_KEYWORD for each in every.values())


def _check_function(user: RewardFunction) -> None:
    """Raises RewardFunctionError if the function cannot be called with its signature and configured arguments."""
    for name in user.arguments:
        if name in PROVIDED_PARAMETERS[user.signature] - _DATA_PARAMETERS:
            raise RewardFunctionError(user.path, f"`arguments` sets {name!r}, which the framework provides")
        if not user.takes(name):
            hint = suggest_name(name, list(user.parameters))
            raise RewardFunctionError(user.path, f"`arguments` sets {name!r}, which is not one of its parameters", hint)
    if user.signature == "openrlhf" and not user.takes("queries") and len(user.parameters) >= 3:
        return  # called by position
    if not any(user.takes(name) for name in PROVIDED_PARAMETERS[user.signature]) or has_positional_only(user):
        listed = ", ".join(user.parameters) or "none"
        raise RewardFunctionError(
            user.path,
            f"its parameters ({listed}) cannot take the signature {user.signature}",
            f"expected {SIGNATURE_FORMS[user.signature]}",
        )


def has_positional_only(user: RewardFunction) -> bool:
    return any(each.kind is inspect.Parameter.POSITIONAL_ONLY for each in user.parameters.values())


def parse_reward_function(term: FunctionReward, base: Path = Path()) -> RewardFunction | None:
    """Reads a function's signature from the source of its module, without running any code.

    Returns None if only the module's code tells what is called: a decorated function, an instance, an imported name.

    Raises:
        RewardFunctionError: no such file, package or name, invalid Python, or a signature that fits no framework.
    """
    module = check_source(term.path, base, RewardFunctionError)
    name = split_path(term.path, RewardFunctionError)[1]
    if module is None:
        return None
    bound = [node for node in ast.walk(module) if name in _bound_names(node)]
    found = bound[0] if len(bound) == 1 and bound[0] in module.body else None
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) or found.decorator_list:
        return None
    parameters, has_kwargs = _parsed_parameters(found.args)
    signature = detect_signature(term.path, parameters) if term.signature == "auto" else term.signature
    function = RewardFunction(
        term.path, _not_loaded, signature, parameters, has_kwargs, dict(term.arguments), term.images
    )
    _check_function(function)
    return function


def _bound_names(node: ast.AST) -> Collection[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return (node.name,)
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
        case ast.Name(ctx=ast.Store()):
            return (node.id,)
    return ()


def _parsed_parameters(arguments: ast.arguments) -> tuple[dict[str, inspect.Parameter], bool]:
    """The parameters of a function definition, as `_parameters` returns those of a function. Defaults are None."""
    found: dict[str, inspect.Parameter] = {}
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    for number, each in enumerate(positional):
        only = number < len(arguments.posonlyargs)
        kind = inspect.Parameter.POSITIONAL_ONLY if only else inspect.Parameter.POSITIONAL_OR_KEYWORD
        default = inspect.Parameter.empty if number < required else None
        found[each.arg] = inspect.Parameter(each.arg, kind, default=default)
    for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        default = inspect.Parameter.empty if value is None else None
        found[each.arg] = inspect.Parameter(each.arg, inspect.Parameter.KEYWORD_ONLY, default=default)
    return found, arguments.kwarg is not None


def _not_loaded(**_: Any) -> Any:
    raise RuntimeError("only the source of this reward function was read")


def check_columns(function: RewardFunction, data: Collection[DataColumns]) -> None:
    """Raises RewardFunctionError if a dataset lacks a column that the function requires."""
    if function.signature == "openrlhf" and not function.takes("queries"):
        return  # called by position
    for each in data:
        for name in function.requires():
            if name not in IMAGE_PARAMETERS[function.images] and not _provides(function.signature, name, each):
                available = [*each.names, *(["the answer"] if each.has_answer else [])]
                problem, remedy = missing_column(name, available, each.path)
                raise RewardFunctionError(function.path, problem, remedy)


def _provides(signature: FunctionSignature, name: str, data: DataColumns) -> bool:
    if name in data.names:
        return True
    if name in ("ground_truth", "ground_truths") and signature in ("verl", "verl_batch"):
        return data.has_truth
    if name in ("data_source", "data_sources"):
        return signature == "verl_batch" or "data_source" in data.names
    if name in PROVIDED_PARAMETERS[signature]:
        return True
    return signature in ("trl", "vlm_r1", "openrlhf") and name in ANSWER_NAMES and data.has_answer


def missing_column(name: str, available: Collection[str], where: str) -> tuple[str, str]:
    """The problem that a function requires a column that `where` (such as `the row`) does not have, and its remedy."""
    close = difflib.get_close_matches(name, available, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    problem = (
        f"requires the column {name!r}, which {where} does not have{hint}; it has {', '.join(available) or 'none'}"
    )
    return problem, "add the column, or set it under the term's `arguments`"
