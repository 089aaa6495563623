"""A rank of a DeepSpeed run that is stopped or killed is named, and the run continues to the same result."""

import os
import signal
from pathlib import Path

import pytest
from harness import PICTURES, Launched, picture_task, task, train, untimed_rows, weights, write
from test_deepspeed_runs import NEEDS_DEEPSPEED, STAGES, run_values
from test_recovery import log_of, pid_of, recoveries, reported_stalls, wait_for_restarts, why

pytestmark = [*NEEDS_DEEPSPEED, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("recipe", "stage"), [*(("sft", stage) for stage in STAGES), (f"{PICTURES}sft", 2), (f"{PICTURES}sft", 3)]
)
def test_stopped_and_killed_ranks_are_named_and_replaced(recipe: str, stage: int, tmp_path: Path) -> None:
    """A rank is stopped, so that its peer waits in a collective of DeepSpeed's: the verdict names it, and it is
    replaced. Then another rank is killed. Neither costs more than the step in which it happened."""
    home = (picture_task if recipe.startswith(PICTURES) else task)(tmp_path)
    values = {**run_values(home, recipe, stage), "steps": 6, "watch": {"notice_s": 2.0}}
    undisturbed = train(home, values | {"name": "undisturbed"})
    run = home / "runs" / "disturbed"
    hold = {"stage": "train", "seconds": 0.3, "at_end": False}
    launched = Launched.start(run, str(write(home, values | {"name": run.name})), hold=hold)
    launched.wait_for("train", 2)
    os.kill(pid_of(launched, "policy-1"), signal.SIGSTOP)
    wait_for_restarts(launched)
    launched.wait_for("train", 4)
    os.kill(pid_of(launched, "policy-0.1"), signal.SIGKILL)
    assert launched.finish() == 0, launched.text()
    assert launched.has_ended(2.0)
    assert reported_stalls(run, "confirmed") == [("absent", ["policy-1"]), ("dead", ["policy-0.1"])]
    assert why(run, "policy-1").startswith("confirmed: rank 1 (policy")
    assert "is stopped by a signal" in log_of(run, "policy-0")
    found = [(each["worker"], each["step"], each["restored"], each["again"]) for each in recoveries(run)]
    assert found == [("policy-1", 3, 2, 0), ("policy-0.1", 5, 4, 0)]
    assert weights(run) == weights(undisturbed)
    assert untimed_rows(run) == untimed_rows(undisturbed)
