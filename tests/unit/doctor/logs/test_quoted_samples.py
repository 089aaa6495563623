"""Printed samples are distinguished from log lines."""

from pathlib import Path

import pytest

from lockstep.doctor.judge.log_diagnosis import explain
from lockstep.doctor.logs.log_lines import is_quoted
from tests.unit.doctor.job_logs import raised, steps, write

_OOM = "Out of memory: Killed process 881 (python) total-vm:1kB"


@pytest.mark.parametrize(
    "before",
    [
        "completion: dmesg says: ",
        "sample 3 | prompt: ",
        "Generated text: ",
        "[response] the log says ",
        '{"step": 4, "completion": "it says ',
        "{'role': 'user', 'content': 'why ",
        "<|im_start|>user ",
        "\u2502 what is this? ",
        "(TaskRunner pid=3) completions = [",
    ],
)
def test_samples(before: str) -> None:
    at = len("(TaskRunner pid=3) ") if before.startswith("(") else 0
    assert is_quoted(before + _OOM, len(before), at)


@pytest.mark.parametrize(
    "before", ["[4411.2] ", "RuntimeError: ", "error while waiting for a completion: ", "response: ", "stderr output: "]
)
def test_lines_outside_samples(before: str) -> None:
    assert not is_quoted(before + _OOM, len(before))


def test_a_sample_is_neither_cause_nor_end(tmp_path: Path) -> None:
    sample = [f"[rank0] completion: dmesg says: {_OOM}", "completion: Training completed"]
    verdict = explain([write(tmp_path, train=[*steps(0, 9), *sample, *steps(0, 9, 9)])]).verdict
    assert verdict.cause == "benign" and verdict.confidence < 0.8, "nothing says that it ended"
    verdict = explain([write(tmp_path, train=[*steps(0, 9), *sample, *raised(0, "KeyError: 'label'")])]).verdict
    assert verdict.cause == "rank_exception_masked"


def test_a_sample_of_several_lines(tmp_path: Path) -> None:
    sample = ["[prompt] what does this mean?", _OOM, "[response] it means that", _OOM, "[ground_truth] memory"]
    verdict = explain([write(tmp_path, train=[*steps(0, 9), *sample, *steps(0, 2, 9)])]).verdict
    assert verdict.cause == "benign"
    verdict = explain([write(tmp_path, train=[*steps(0, 9), *sample, _OOM])]).verdict
    assert verdict.cause == "host_oom"
