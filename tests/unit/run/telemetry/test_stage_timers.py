"""Stages: times add up within a step and over the run."""

import pytest

from lockstep.base import waits
from lockstep.run.telemetry.run_reporter import StageTimers


def test_times_of_a_stage_add_up_within_a_step() -> None:
    stages = StageTimers()
    for _ in range(2):
        with stages("train"):
            waits.sleep(0.01, "test")
    first = stages.take()
    assert 0.02 <= first["train"] < 1
    assert stages.take() == {}
    with stages("train"):
        pass
    assert stages.totals["train"] >= first["train"]


def test_a_stage_ends_also_when_it_fails() -> None:
    stages = StageTimers()
    with pytest.raises(ValueError, match="boom"), stages("train"):
        raise ValueError("boom")
    assert stages.current == ""
    assert "train" in stages.take()


def test_stages_do_not_nest() -> None:
    stages = StageTimers()
    with stages("train"), pytest.raises(RuntimeError, match="inside stage 'train'"), stages("reward"):
        pass
