"""The profiler records the chosen steps of a rank and no others, whatever step the rank begins with."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from lockstep.config.trainer import ProfileConfig, TrainerConfig
from lockstep.train.step_profiler import StepProfiler


def train(folder: Path, steps: range, close: bool = False) -> list[Path]:
    profiler = StepProfiler(ProfileConfig(first_step=3, last_step=4), folder, "policy-rank0")
    for step in steps:
        with profiler.record(step):
            torch.ones(step, 7) @ torch.ones(7, 7)
    if close:
        profiler.close()
    return sorted((folder / "profiles").glob("*")) if (folder / "profiles").exists() else []


def recorded_rows(file: Path) -> set[int]:
    """The rows of the matrices that were multiplied, which are the numbers of the steps."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return {each["args"]["Input Dims"][0][0] for each in events if each.get("name") == "aten::mm"}


def test_the_chosen_steps_are_recorded(tmp_path: Path) -> None:
    (file,) = train(tmp_path, range(1, 8))
    assert file.name == "policy-rank0-steps-3-4.json.gz" and recorded_rows(file) == {3, 4}


def test_a_rank_that_begins_within_them_records_the_rest(tmp_path: Path) -> None:
    (file,) = train(tmp_path, range(4, 8))
    assert file.name == "policy-rank0-steps-4-4.json.gz" and recorded_rows(file) == {4}


def test_a_rank_that_begins_later_records_nothing(tmp_path: Path) -> None:
    assert train(tmp_path, range(5, 8)) == []


def test_a_run_that_ends_within_them_writes_what_there_is(tmp_path: Path) -> None:
    (file,) = train(tmp_path, range(1, 4), close=True)
    assert file.name == "policy-rank0-steps-3-3.json.gz" and recorded_rows(file) == {3}


def test_a_run_that_ends_in_the_step_before_them_writes_nothing(tmp_path: Path) -> None:
    assert train(tmp_path, range(1, 3), close=True) == []


def test_a_full_disk_fails_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profiles").write_text("a file in the way")
    profiler = StepProfiler(ProfileConfig(first_step=1, last_step=1), tmp_path, "policy-rank0")
    with profiler.record(1):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert "could not be written" in caplog.text


def test_steps_and_ranks_are_checked() -> None:
    with pytest.raises(ValidationError, match="last_step 2 is before first_step 3"):
        ProfileConfig(first_step=3, last_step=2)
    with pytest.raises(ValidationError, match="expected ranks from 0 to 1"):
        TrainerConfig(ranks=2, profile=ProfileConfig(first_step=1, last_step=1, ranks=(2,)))
