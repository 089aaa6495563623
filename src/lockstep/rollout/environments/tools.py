"""Functions as an environment: each turn's calls are found, done, and answered; a turn without calls is the last."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.cluster.user_code import nearest
from lockstep.config.environment import Environment as Config
from lockstep.data.samples import Prompt
from lockstep.rollout.environments.protocol import Observation

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


class BadCall(ValueError):
    """A call that the model got wrong: it is told so, whatever `on_error` says."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str | None
    """None where there is one tool and the pattern names none."""
    arguments: str | dict[str, Any]
    """Text, where it is not known yet what it means."""
    problem: str = ""
    """Why it cannot be read."""


def hermes_calls(text: str) -> list[Call]:
    """Calls in the style of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. The last one
    may be open, where its end is what stopped the turn."""
    return [_hermes(body) for body in _HERMES.findall(text)]


def _hermes(body: str) -> Call:
    try:
        call = json.loads(body)
    except ValueError as error:
        return Call(None, body, f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call(None, body, 'expected {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(call["name"], arguments)
    if not isinstance(arguments, dict):
        return Call(call["name"], body, "arguments must be a JSON object")
    return Call(call["name"], arguments)


def regex_calls(text: str, pattern: str) -> list[Call]:
    """Calls found by a pattern with the group `arguments`, and `name` where there are several tools."""
    return [
        Call(match.groupdict().get("name"), (match.group("arguments") or "").strip())
        for match in re.finditer(pattern, text)
    ]


class Tools:
    """The environment of a conversation with tools. They get no state of it: a tool that wants some is an environment.

    Args:
        functions: by name, plain or async.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], config: Config) -> None:
        self.functions, self.config = dict(functions), config

    async def step(self, action: str) -> Observation:
        """Does the calls of a turn, one after the other. Raises what a tool raises, unless the model is to be told."""
        pattern = self.config.pattern
        calls = hermes_calls(action) if pattern is None else regex_calls(action, pattern)
        if not calls:
            return Observation(done=True, metrics={"calls": 0, "call_errors": 0})
        messages, errors = [], 0
        for call in calls:
            try:
                content = await self._result(call)
            except BadCall as error:
                content, errors = f"error: {error}", errors + 1
            shown = self.config.result.format(content=content) if pattern is not None else content
            messages.append({"role": "tool", "name": call.name or "", "content": shown})
        return Observation(messages=messages, metrics={"calls": len(calls), "call_errors": errors})

    async def _result(self, call: Call) -> str:
        """What the tool says, as text. Raises BadCall."""
        if call.problem:
            raise BadCall(call.problem)
        function = self._function(call.name)
        arguments = _arguments(function, call.arguments)
        try:
            value = function(**arguments)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            if self.config.on_error == "tell":
                raise BadCall(f"{type(error).__name__}: {error}") from error
            raise
        return value if isinstance(value, str) else _json(value)

    def _function(self, name: str | None) -> Callable[..., Any]:
        if name is None and len(self.functions) == 1:
            return next(iter(self.functions.values()))
        if name not in self.functions:
            raise BadCall(f"there is no tool {name!r}; {nearest(name or '', list(self.functions))}")
        return self.functions[name]


def _arguments(function: Callable[..., Any], given: str | dict[str, Any]) -> dict[str, Any]:
    """Keywords of a call that the function takes. Raises BadCall."""
    signature = inspect.signature(function)
    if isinstance(given, str):
        names = list(signature.parameters)
        if len(names) == 1:
            given = {names[0]: given}
        else:
            try:
                given = json.loads(given)
            except ValueError as error:
                raise BadCall(f"the arguments are not JSON: {error}") from error
            if not isinstance(given, dict):
                raise BadCall("the arguments must be a JSON object")
    try:
        signature.bind(**given)
    except TypeError as error:
        raise BadCall(str(error)) from error
    return given


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def begins(environment: object, prompt: Prompt) -> Any:
    """What an environment's `reset` returns, None where it has none."""
    reset = getattr(environment, "reset", None)
    return None if reset is None else reset(prompt)
