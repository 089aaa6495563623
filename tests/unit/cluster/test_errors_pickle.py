"""Errors from other processes survive pickle with message, fields and notes."""

import importlib
import inspect
import pickle
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from lockstep.base.errors import ForkedWorker

ROOMS = (
    "lockstep.base",
    "lockstep.watch",
    "lockstep.cluster",
    "lockstep.weights",
    "lockstep.rollout",
    "lockstep.models",
)
"""Packages whose errors other processes may raise."""
OWN = {ForkedWorker}
"""Control flow within one process; no error."""
EXTRAS = ("lockstep.cluster.ray", "lockstep.rollout.vllm")
"""Packages that need an extra."""


def below(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for each in kind.__subclasses__():
        yield each
        yield from below(each)


def errors() -> list[type[BaseException]]:
    importlib.import_module("lockstep.rollout.vllm.vllm_setup")
    for room in ROOMS:
        package = importlib.import_module(room)
        for module in pkgutil.walk_packages(package.__path__, f"{room}."):
            if not module.name.startswith(EXTRAS) and not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    found = {each for each in below(BaseException) if each.__module__.startswith(ROOMS) and each.__name__[0] != "_"}
    return sorted(found - OWN, key=lambda each: (each.__module__, each.__qualname__))


def value(kind: Any) -> Any:
    """A value of that type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return arguments[0]
    if origin in (types.UnionType, typing.Union):
        return value(next(each for each in arguments if each is not type(None)))
    if origin is tuple and ... not in arguments:
        return tuple(map(value, arguments))
    if origin in (Sequence, list, tuple):
        return [value(arguments[0])]
    if origin in (Mapping, dict):
        return {value(arguments[0]): value(arguments[1])}
    if is_dataclass(kind):
        assert isinstance(kind, type)
        hints = typing.get_type_hints(kind)
        return kind(**{each.name: value(hints[each.name]) for each in fields(kind) if each.init})
    return {str: "a word", int: 3, float: 2.5, bool: True, Path: Path("a/path"), object: "anything", Any: 7}.get(
        kind, "whatever"
    )


def made(kind: type[BaseException]) -> BaseException:
    builder = next((each for each in kind.__mro__ if isinstance(vars(each).get("__init__"), types.FunctionType)), None)
    if builder is None:
        return kind("what happened")
    hints = typing.get_type_hints(builder.__init__, vars(importlib.import_module(builder.__module__)))
    return kind(**{name: value(hints[name]) for name in list(inspect.signature(builder).parameters)})


@pytest.mark.parametrize("kind", [pytest.param(each, id=f"{each.__module__}.{each.__name__}") for each in errors()])
def test_errors_survive_pickle(kind: type[BaseException]) -> None:
    error = made(kind)
    error.add_note("seen on node-b")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error) and again.args == error.args
    assert vars(again) == vars(error)


def test_errors_are_found() -> None:
    names = {each.__name__ for each in errors()}
    assert {"AgentError", "UnreachableAddress", "WaitTimeout", "Superseded", "VersionError", "VllmUnsupported"} <= names
