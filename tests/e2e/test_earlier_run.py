"""A run of an earlier version resumes under this one and ends with the same weights."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.ledger.ledger import Ledger

EARLIER = Path(__file__).with_name("earlier_run")


@pytest.mark.slow
def test_a_run_of_an_earlier_version_resumes_with_the_same_weights(tmp_path: Path) -> None:
    """Bitwise on the kind of machine that made the run; 1e-5 elsewhere, as other processors round differently."""
    here = tmp_path / "work"
    shutil.copytree(EARLIER, here)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "lockstep", "train", "--resume", "runs/begun"]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished after 24 of 24 steps" in done.stdout + done.stderr
    rows = [json.loads(line) for line in (here / "runs/begun/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(24)), "it continues to count from 0, without a gap"
    with Ledger.reader(here / "runs/begun") as ledger:
        assert ledger.step_path(23).name == "00000023.arrow" and ledger.rollouts(23) is not None
    resumed, expected = (
        load_file(path) for path in (here / "runs/begun/export/model.safetensors", here / "uninterrupted.safetensors")
    )
    assert resumed.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(resumed[name], weight, rtol=0, atol=1e-5)
