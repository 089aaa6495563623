"""A recipe that `lockstep.run` has never heard of: it is checked, planned, run, killed and resumed like the others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ENVIRONMENT, config, task, write

SCRIPT = str(Path(__file__).with_name("best_of_n.py"))


def lockstep(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], env=ENVIRONMENT, text=True, capture_output=True, timeout=240
    )


@pytest.mark.slow
def test_a_new_recipe_learns_without_a_change_in_run(tmp_path: Path) -> None:
    values = config(task(tmp_path), "grpo", steps=6, name="best", checkpoint={"every": 3})
    values |= {"recipe": "best_of_n", "trainer": {"ranks": 1, "threads": 1, "optimizer": {"lr": 1e-2}}}
    del values["loss"]
    file = write(tmp_path, values)
    planned = lockstep("train", str(file), "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert "policy-0" in planned.stdout and "engine-0" in planned.stdout
    done = lockstep("train", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "runs" / "best" / "metrics.jsonl").read_text().splitlines()
    losses = [row["policy/loss"] for row in map(json.loads, lines) if "policy/loss" in row]
    assert len(losses) == 6 and losses[-1] < losses[0]
    more = lockstep("train", "--resume", str(tmp_path / "runs" / "best"), "steps=8")
    assert more.returncode == 0 and "after 8 of 8 steps" in more.stdout + more.stderr, more.stdout + more.stderr
