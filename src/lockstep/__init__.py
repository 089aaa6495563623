"""Lockstep: reinforcement-learning post-training that never waits in silence.

From Python: `lockstep.train(config)`; see docs/python.md. The names of `_MODULES` are imported when they are first
used, and their types are in `__init__.pyi`, because modules of every layer import this one for the version.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "STOP": "report.step_callbacks",
    "CallbackFailed": "report.step_callbacks",
    "ConfigError": "config.errors",
    "DataError": "data.dataset_rows",
    "FunctionNotCarried": "api.function_source",
    "LoadedPolicy": "api.loaded_policy",
    "NotStarted": "run.errors",
    "Result": "api.run_result",
    "RewardError": "rewards.scoring_messages",
    "RunRefused": "run.errors",
    "Scores": "api.batches",
    "generate": "api.loaded_policy",
    "load_policy": "api.loaded_policy",
    "pack": "api.batches",
    "score": "api.batches",
}


def __getattr__(name: str) -> Any:
    if name == "train":  # the package of this name, which can be called
        return import_module("lockstep.train")
    if name not in _MODULES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    return getattr(import_module(f"lockstep.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "train"})
