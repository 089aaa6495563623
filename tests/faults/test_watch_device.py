"""`lockstep watch -- torchrun JOB` around ranks whose collectives return when they are enqueued, as with NCCL."""

import json
from pathlib import Path

import pytest
from test_watch_command import JOBS, ROOT, finish, torchrun, watch

from lockstep.watch.attach.watched_command import STALL_EXIT_CODE

OPTIONS = ("--notice-after", "1", "--confirm-after", "8", "--on-stall", "kill")


@pytest.mark.parametrize(
    ("loop", "fault", "kind"),
    [
        ("", "kernel", "device_lag"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("", "stopped", "absent"), ("", "operation", "mismatch"), ("ddp", "kernel", "device_lag"),
                ("ddp", "stopped", "absent"),
            ]
        ),
    ],
)  # fmt: skip
def test_the_rank_whose_host_or_device_fails_is_named_alone(tmp_path: Path, loop: str, fault: str, kind: str) -> None:
    job = torchrun(str(JOBS / "device_job.py"), fault, *([loop] if loop else []), ranks=3)
    variables = {"TORCH_NCCL_ENABLE_TIMING": "1", "PYTHONPATH": str(ROOT)}
    if loop == "ddp":
        variables["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    code, _, errors = finish(watch(tmp_path, *job, options=OPTIONS, **variables))
    assert code == STALL_EXIT_CODE, errors
    (file,) = (tmp_path / "incidents").glob("*/verdict.json")
    verdict = json.loads(file.read_text())
    assert (verdict["kind"], [each["rank"] for each in verdict["culprits"]]) == (kind, [1]), errors
    assert not any("confirmed: rank 0" in line or "confirmed: rank 2" in line for line in errors.splitlines())
