"""What `lockstep watch -- COMMAND` loads into the Python processes of the command: Python imports a module of this
name when it starts, and `PYTHONPATH` names this folder.

It does nothing until `torch.distributed` has been imported. Then it opens the process's beacon and installs the
recorder. Errors in this module are reported in one line and never affect the job. It uses only the standard library and
the syntax of Python 3.8, because it runs in the job's Python.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUN = "LOCKSTEP_WATCH"
"""The run's id; set by `lockstep watch`."""
NEEDED = (3, 10)
"""The Python version that the recorder needs."""
DISTRIBUTED = "torch.distributed"


class _DistributedFinder(importlib.abc.MetaPathFinder):
    """Calls `enroll` once both torch and torch.distributed have been imported, in whichever order they finish."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if self._searching or fullname not in ("torch", DISTRIBUTED):
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            torch = module if fullname == "torch" else sys.modules["torch"]
            under_way = fullname == DISTRIBUTED and getattr(torch.__spec__, "_initializing", False)
            if DISTRIBUTED in sys.modules and not under_way and self in sys.meta_path:
                sys.meta_path.remove(self)
                enroll()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def enroll() -> None:
    try:
        _find_lockstep()
        module = importlib.import_module("lockstep.watch.attach.enroll")
        module.enroll_process(os.environ[RUN])
    except Exception as error:  # noqa: BLE001 - an error here must not end the job
        warn(f"{type(error).__name__}: {error}")


def warn(why: str) -> None:
    sys.stderr.write(f"lockstep watch: process {os.getpid()} is not recorded: {why}\n")


def _find_lockstep() -> None:
    """Makes `lockstep` importable if it is not installed: uses the package that this file is part of, without its
    dependencies."""
    if "lockstep" in sys.modules or importlib.util.find_spec("lockstep") is not None:
        return
    package = HERE.parents[2]
    spec = importlib.util.spec_from_file_location(
        "lockstep", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {package}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["lockstep"] = module
    spec.loader.exec_module(module)


def _import_shadowed() -> None:
    """Imports the `sitecustomize` that this one shadows."""
    paths = [path for path in sys.path if Path(path or os.curdir).resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get(RUN):
    if sys.version_info >= NEEDED:
        sys.meta_path.insert(0, _DistributedFinder())
    elif "RANK" in os.environ:
        warn("its Python is older than 3.10")
_import_shadowed()
