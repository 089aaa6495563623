"""`import lockstep` is light, and offers what `__init__.pyi` declares."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep
import lockstep.train.errors  # makes the package the attribute `train`
from lockstep.api.training import train

STUB = Path(lockstep.__path__[0]) / "__init__.pyi"


def test_the_names_are_those_with_types() -> None:
    declared = {
        alias.asname: node.module
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert declared.pop("train") == "lockstep.api.training"
    assert {f"lockstep.{module}" for module in lockstep._MODULES.values()} == set(declared.values())  # type: ignore[attr-defined]
    for name in declared:
        assert getattr(lockstep, str(name)) is not None and name in dir(lockstep)
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = lockstep.trian  # type: ignore[attr-defined]


def test_train_can_be_called_whatever_was_imported_before() -> None:
    assert lockstep.train.errors is not None
    assert inspect.signature(lockstep.train) == inspect.signature(train)
    with pytest.raises(lockstep.RunRefused, match="name a config to train from"):
        lockstep.train()


def test_the_import_loads_nothing() -> None:
    code = (
        "import sys, lockstep; print([n for n in sys.modules if n.startswith('lockstep.') or n in ('torch', 'numpy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
