"""Finding a user's reward function, and which of the three known signatures it has."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lockstep.cluster.user_code import UserCodeError, load_object, nearest
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


class FunctionError(UserCodeError):
    """A reward function that cannot be used: which one, what is wrong, what would help."""

    noun = "reward function"


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
    function = _callable(path, load_object(path, base, FunctionError))
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


def _callable(path: str, found: Any) -> Callable[..., Any]:
    name = path.rpartition(":")[2]
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
            hint = nearest(name, list(user.parameters))
            raise FunctionError(user.path, f"`arguments` sets {name!r}, which it does not take", hint)
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
