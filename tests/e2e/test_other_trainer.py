"""A run with a kind of trainer that the package has never heard of, through all that a run does with its trainer."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_controller import ENVIRONMENT
from harness import Launched, config, prompts_used, task, weights, write
from test_recovery import kill_worker, recoveries, wait_for_restarts
from transformers import AutoModelForCausalLM

from lockstep.ledger.ledger import Ledger

KIND = {"trainer_kind": "replicated_trainer"}


def start(home: Path, name: str, hold: dict[str, Any] | None = None) -> Launched:
    """Four steps of GRPO on two ranks, with a checkpoint after the second."""
    trainer = {"kind": "replicated", "ranks": 2, "threads": 1, "optimizer": {"lr": 3e-3}}
    values = config(home, "grpo", name=name, steps=4, trainer=trainer, evaluation=None, checkpoint={"every": 2})
    return Launched.start(home / "runs" / name, str(write(home, values)), hold=KIND | (hold or {}))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_kind_of_trainer_trains_recovers_resumes_and_exports(tmp_path: Path) -> None:
    home = task(tmp_path)
    undisturbed = start(home, "undisturbed")
    assert undisturbed.finish() == 0, undisturbed.text()
    killed = start(home, "killed", {"stage": "train", "seconds": 0.3, "at_end": False})
    killed.wait_for("train", 1)
    kill_worker(killed, "policy-1")  # its state is in no memory checkpoint, so both ranks begin anew
    wait_for_restarts(killed)
    killed.wait_for("train", 3)
    killed.kill()
    assert [each["restored"] for each in recoveries(killed.folder)] == [0]
    with Ledger.reader(killed.folder) as ledger:
        assert [row.step for row in ledger.checkpoints()] == [1]
    killed = Launched.resume(killed.folder, hold=KIND)
    assert killed.finish() == 0, killed.text()
    assert prompts_used(killed.folder) == prompts_used(undisturbed.folder)
    assert weights(killed.folder) == weights(undisturbed.folder)
    again = killed.folder.with_name("again")
    command = "import replicated_trainer as t; t.register(); from lockstep.cli import app; app()"
    contract = str(Path(__file__).parents[1] / "contract")
    subprocess.run(
        [sys.executable, "-c", command, "export", str(killed.folder), str(again)],
        env={**ENVIRONMENT, "PYTHONPATH": contract}, check=True, timeout=120,
    )  # fmt: skip
    assert (again / "model.safetensors").read_bytes() == (killed.folder / "export/model.safetensors").read_bytes()
    before = AutoModelForCausalLM.from_pretrained(home / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(killed.folder / "export").state_dict()
    assert before.keys() == after.keys() and all((after[name] != before[name]).any() for name in before)
