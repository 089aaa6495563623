"""`lockstep watch -- torchrun JOB` around ranks whose collectives return when they are enqueued, as with NCCL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.watch.attach.watched_command import STALL_EXIT_CODE

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("watch_jobs") / "device_job.py"
LOCKSTEP = str(Path(sys.executable).with_name("lockstep"))
OPTIONS = ("--notice-after", "1", "--confirm-after", "8", "--on-stall", "kill")
BOUND_S = 120.0


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("kernel", "device_lag"),
        pytest.param("stopped", "absent", marks=pytest.mark.slow),
        pytest.param("operation", "mismatch", marks=pytest.mark.slow),
    ],
)
def test_the_rank_whose_host_or_device_fails_is_named_alone(tmp_path: Path, fault: str, kind: str) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [LOCKSTEP, "watch", "--incidents", str(tmp_path), *OPTIONS, "--", *torchrun, str(JOB), fault]
    variables = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ENABLE_TIMING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env={**os.environ, **variables}, text=True, capture_output=True, timeout=BOUND_S)
    assert done.returncode == STALL_EXIT_CODE, done.stderr
    (file,) = tmp_path.glob("*/verdict.json")
    verdict = json.loads(file.read_text())
    assert (verdict["kind"], [each["rank"] for each in verdict["culprits"]]) == (kind, [1]), done.stderr
    assert not any("confirmed: rank 0" in line or "confirmed: rank 2" in line for line in done.stderr.splitlines())
