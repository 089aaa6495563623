"""The trainer protocol and the kinds of trainers, objectives, checkpoints and export.

`lockstep.train(config)` runs a training: an import of anything in this package makes it the attribute `train` of
`lockstep`, so the package itself can be called. The function is `lockstep.api.training.train`.
"""

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **arguments: Any) -> Any:
        return self._function()(*args, **arguments)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())

    @staticmethod
    def _function() -> Any:
        return import_module("lockstep.api.training").train


sys.modules[__name__].__class__ = _CallablePackage
