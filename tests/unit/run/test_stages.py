"""Stages: times add up within a step and over the run."""

import pytest

from lockstep.run.stages import Stages
from lockstep.watch import waits


def test_times_of_a_stage_add_up_within_a_step() -> None:
    stages = Stages()
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
    stages = Stages()
    with pytest.raises(ValueError, match="boom"), stages("train"):
        raise ValueError("boom")
    assert stages.current == ""
    assert "train" in stages.take()


def test_stages_do_not_nest() -> None:
    stages = Stages()
    with stages("train"), pytest.raises(RuntimeError, match="inside stage 'train'"), stages("reward"):
        pass
