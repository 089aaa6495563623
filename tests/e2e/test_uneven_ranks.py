"""Ranks of unequal speed learn the same, and a run that is resumed divides its steps as before."""

import json
import os
import signal
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest
from harness import LOCKSTEP, config, task, write

from lockstep.ledger.ledger import Ledger

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


def train(*arguments: str) -> None:
    done = subprocess.run([*LOCKSTEP, "train", *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_objective_and_its_gradient_do_not_depend_on_speeds(tmp_path: Path) -> None:
    task(tmp_path)
    file = write(tmp_path, config(tmp_path, "sft", steps=4))
    curves, shares = [], []
    for name, speeds in (("even", "equal"), ("uneven", "[1.0, 0.4]")):
        train(str(file), f"name={name}", f"trainer.rank_speeds={speeds}", "report.console=false")
        with Ledger.reader(tmp_path / "runs" / name) as ledger:
            curves.append(
                [(row.values["policy/loss"], row.values["policy/grad_norm"]) for row in ledger.metrics_rows()]
            )
            found = [each.loads for each in ledger.rank_loads("policy") if each.loads is not None]
        assert len(found) == 4 and all(min(each.work_s) > 0 for each in found)
        shares.append(sum(each.tokens[1] for each in found) / sum(sum(each.tokens) for each in found))
    for even, uneven in zip(*curves, strict=True):
        assert uneven == pytest.approx(even, rel=1e-4)
    assert shares[0] == pytest.approx(0.5, abs=0.1) and shares[1] < 0.4


def test_a_resumed_run_divides_its_steps_by_the_stored_speeds(tmp_path: Path) -> None:
    task(tmp_path)
    file = write(tmp_path, config(tmp_path, "sft", steps=12, checkpoint={"every": 4}))
    run = tmp_path / "runs" / "sft"
    options = ["trainer.rank_speeds=measured", "report.console=false"]
    with subprocess.Popen([*LOCKSTEP, "train", str(file), *options], start_new_session=True) as process:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
            if (run / "ledger.sqlite").exists():
                with Ledger.reader(run) as ledger:
                    if ledger.newest_checkpoint() is not None and ledger.last_committed_step() >= 5:
                        break
        os.killpg(process.pid, signal.SIGKILL)
    with Ledger.reader(run) as ledger:
        checkpoint, last = ledger.newest_checkpoint(), ledger.last_committed_step()
    assert checkpoint is not None
    again = range(checkpoint.step + 1, last + 1)
    with sqlite3.connect(run / "ledger.sqlite") as index:  # as if rank 1 had been slow then
        index.execute("UPDATE loads SET speeds = ? WHERE step > ?", (json.dumps([1.0, 0.3]), checkpoint.step))
    train("--resume", str(run))
    with Ledger.reader(run) as ledger:
        rows = {each.step: each for each in ledger.rank_loads("policy")}
        assert ledger.steps_done() == 12 and sorted(rows) == list(range(12))
    for step in again:
        loads = rows[step].loads
        assert rows[step].speeds == [1.0, 0.3] and loads is not None
        assert loads.tokens[1] < 0.4 * sum(loads.tokens)
