"""How an engine takes weights: where it reads them, and whether they are its model's."""

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor, nn

from lockstep.rollout.errors import WeightsMismatch

WeightReader = Callable[[Path, int], AbstractContextManager[Mapping[str, Tensor]]]
"""Opens a version in the weight room's store: parameter names to tensors, valid inside the context.
`lockstep.weights.shared.Reader` is one; the rooms do not know each other, the run brings them together."""

ReaderSource = str | WeightReader
"""A reader, or `package.module:name` of what makes one in whichever process reads."""


def open_reader(source: ReaderSource) -> WeightReader:
    """Raises ValueError for a path that names no factory."""
    if not isinstance(source, str):
        return source
    module, _, name = source.partition(":")
    if not name:
        raise ValueError(f"reader: {source!r} is no factory, expected package.module:name")
    made: WeightReader = getattr(importlib.import_module(module), name)()
    return made


class Expected:
    """The parameters that a version must have: those of the model as transformers makes it. Weights that it ties are
    given once, by any of their names."""

    def __init__(self, lm: nn.Module) -> None:
        """`lm` may be on the meta device."""
        own = dict(lm.named_parameters(remove_duplicate=False))
        self.shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        self._same = {name: id(parameter) for name, parameter in own.items()}

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises WeightsMismatch for other names or shapes."""
        unknown = sorted(set(tensors) - set(self.shapes))
        given = {self._same[name] for name in tensors if name in self._same}
        missing = sorted(name for name, each in self._same.items() if each not in given)
        for name in sorted(set(tensors) & set(self.shapes)):
            found, expected = tuple(tensors[name].shape), self.shapes[name]
            if found != expected:
                unknown.append(f"{name} {list(found)}")
                missing.append(f"{name} {list(expected)}")
        if unknown or missing:
            raise WeightsMismatch(unknown, missing)
