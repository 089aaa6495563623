"""Removes functions of `doctor.judge` one at a time, to see which of them change a verdict."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from types import FunctionType, ModuleType
from typing import Any

import lockstep.doctor.judge.log_diagnosis  # noqa: F401 - imports every module of the judge

_PACKAGE = "lockstep.doctor.judge."


@dataclass(frozen=True, slots=True)
class JudgeFunction:
    """A function, or the function of a method or property with its class."""

    owner: ModuleType | type
    attribute: str
    function: FunctionType

    @property
    def name(self) -> str:
        return f"{self.function.__module__.removeprefix(_PACKAGE)}.{self.function.__qualname__}"

    @contextmanager
    def replaced(self, other: Callable[..., Any]) -> Iterator[None]:
        """Puts another function into every place that the modules of the judge call this one from."""
        with ExitStack() as undo:
            if isinstance(self.owner, type):
                before = self.owner.__dict__[self.attribute]
                after: object = other if isinstance(before, FunctionType) else property(other)
                if isinstance(before, cached_property):
                    after = cached_property(other)
                    after.__set_name__(self.owner, self.attribute)
                undo.callback(setattr, self.owner, self.attribute, before)
                setattr(self.owner, self.attribute, after)
            for module in _modules() if isinstance(self.owner, ModuleType) else ():
                for name, value in list(vars(module).items()):
                    if value is self.function:
                        undo.callback(setattr, module, name, value)
                        setattr(module, name, other)
                    elif isinstance(value, tuple) and any(each is self.function for each in value):
                        undo.callback(setattr, module, name, value)
                        setattr(module, name, tuple(other if each is self.function else each for each in value))
                    elif isinstance(value, dict) and any(each is self.function for each in value.values()):
                        undo.callback(setattr, module, name, value)
                        setattr(
                            module, name, {key: other if each is self.function else each for key, each in value.items()}
                        )
            yield


@dataclass(frozen=True, slots=True)
class Removal:
    """A function, and what it answers instead."""

    target: JudgeFunction
    answer: str
    replacement: Callable[..., Any]

    @property
    def function(self) -> str:
        return self.target.name

    @property
    def name(self) -> str:
        return f"{self.target.name}: {self.answer}"

    def applied(self) -> Any:
        """Returns a context in which the function is replaced."""
        return self.target.replaced(self.replacement)


def _modules() -> list[ModuleType]:
    return [module for name, module in sorted(sys.modules.items()) if name.startswith(_PACKAGE)]


def judge_functions() -> list[JudgeFunction]:
    """Returns every function, method and property of the judge."""
    found = []
    for module in _modules():
        for name, value in vars(module).items():
            if isinstance(value, FunctionType) and value.__module__ == module.__name__:
                found.append(JudgeFunction(module, name, value))
            if isinstance(value, type) and value.__module__ == module.__name__:
                for attribute, member in vars(value).items():
                    function = getattr(member, "func", getattr(member, "fget", member))
                    if isinstance(function, FunctionType) and not attribute.startswith("__"):
                        found.append(JudgeFunction(value, attribute, function))
    return found


def removals() -> list[Removal]:
    """Returns for each function the answers that mean it was not there, by the type that it returns."""
    found = []
    for target in judge_functions():
        signature = inspect.signature(target.function)
        returned = inspect.formatannotation(signature.return_annotation)
        same = next((at for at, each in enumerate(signature.parameters.values())
                     if _shape(inspect.formatannotation(each.annotation)) == _shape(returned)), None)  # fmt: skip
        if same is not None and returned not in ("bool", "float", "int"):
            found.append(Removal(target, "what it was given", lambda *given, at=same: given[at]))
        for name, value in _empty_answers(returned):
            found.append(Removal(target, name, lambda *_given, value=value: value()))
    return found


def _shape(annotation: str) -> str:
    """Returns an annotation in which the abstract names of lists and mappings are the concrete ones."""
    return re.sub(r"^(?:Sequence|Iterable)\b", "list", re.sub(r"^Mapping\b", "dict", annotation))


def _empty_answers(returned: str) -> list[tuple[str, Callable[[], object]]]:
    """Returns what an annotation allows as an answer of nothing; none for the types of the result itself."""
    if "Iterator" in returned:
        return [("none", lambda: iter(()))]
    if returned.endswith("bool"):
        return [("no", lambda: False), ("yes", lambda: True)]
    if "None" in returned.split("|")[-1]:
        return [("none", lambda: None)]
    kinds: dict[str, Callable[[], object]] = {
        "list": list, "Sequence": list, "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict,
        "Mapping": dict, "str": str, "float": float, "int": int,
    }  # fmt: skip
    kind = kinds.get(re.split(r"\W", returned, maxsplit=1)[0])
    return [("none", kind)] if kind is not None else []


def called_functions(run: Callable[[], object]) -> frozenset[str]:
    """Returns the names of the judge's functions that are called while `run` runs."""
    called: set[str] = set()
    with ExitStack() as undo:
        for each in judge_functions():
            undo.enter_context(each.replaced(_noting(each, called)))
        run()
    return frozenset(called)


def _noting(target: JudgeFunction, called: set[str]) -> Callable[..., Any]:
    @wraps(target.function)
    def note(*given: Any, **named: Any) -> Any:
        called.add(target.name)
        return target.function(*given, **named)

    return note
