"""Runs with `trainer.compile: layers`, whose ranks compile in their first step."""

import re
from pathlib import Path
from typing import Any

import pytest
from forked_controller import ENVIRONMENT
from harness import ALPHABET, Launched, config, task, write

from lockstep.models.tiny_model import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ALARM = re.compile(r"\b(notice|confirmed|resumed): |no progress for")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    home = task(tmp_path)
    make_tiny(
        home / "model",
        overwrite=True,
        hidden=16,
        layers=1,
        heads=1,
        kv_heads=1,
        ffn=16,
        max_length=32,
        alphabet=ALPHABET,
    )
    return home


def start(home: Path) -> Launched:
    values: dict[str, Any] = config(
        home, "sft", name="compiled", steps=2, evaluation=None, checkpoint={"every": 0, "export": False},
        trainer={"ranks": 2, "threads": 1, "compile": "layers"},
    )  # fmt: skip
    return Launched.start(home / "runs" / "compiled", str(write(home, values)), cold=True)


def compiling(launched: Launched) -> bool | None:
    state = launched.beacon("policy-0")
    return True if state is not None and state.stage == "compile" else None


def test_compilation_is_a_stage_without_alarms(folder: Path) -> None:
    launched = start(folder)
    launched.wait_until(lambda: compiling(launched), "compiling", lambda: False, 300)
    assert launched.finish(600) == 0, launched.text()
    log = (launched.folder / "logs" / "controller.log").read_text()
    assert not ALARM.search(log + launched.printed()), launched.text()
