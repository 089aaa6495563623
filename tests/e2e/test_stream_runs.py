"""A run whose weights are streamed from device to device; here without a GPU, over gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import config, task, train, weights, write


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_with_streamed_weights_gives_the_same_result(tmp_path: Path) -> None:
    home = task(tmp_path)
    engine = {"max_rows": 32, "threads": 1, "count": 2}
    changes = {"rollout": {"sampling": {"max_tokens": 4}, "engine": engine}, "steps": 3, "evaluation": None}
    plain = train(home, config(home, "grpo", **changes))
    values = config(home, "grpo", folder=str(tmp_path / "streamed"), **changes)
    script = Path(__file__).with_name("streamed_run.py")
    file = str(write(tmp_path / "streamed", values))
    done = subprocess.run(
        [sys.executable, script, "train", file], env={**os.environ}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "streamed" / "grpo"
    log = (run / "logs" / "controller.log").read_text()
    assert "weights are sent by nccl: a test says so" in log and "host memory\n" not in log
    for version, count, stream in ((0, 2, 1), (1, 2, 1), (2, 1, 2), (3, 2, 3)):
        assert f"version {version}: {count} of {count} engines have it over weights stream {stream}" in log
    assert weights(run) == weights(plain)
