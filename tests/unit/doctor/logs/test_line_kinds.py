"""Kinds of files and lines."""

import pytest

from lockstep.doctor.logs.log_lines import kind_of_file, kind_of_line


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("dmesg.log", "", "kernel"),
        ("x.txt", "Apr 13 14:01:40 lab-gpu10 kernel: [1.2] mce: x", "kernel"),
        ("x.txt", "[ 1234.567890] NVRM: Xid", "kernel"),
        ("x.txt", "[Fri Jul 11 10:31:02 2025] EXT4-fs error", "kernel"),
        ("pyspy_rank0.txt", "Process 12: python\nPython v3.11", "stack"),
        ("x.txt", "  PID STAT WCHAN   ELAPSED COMMAND\n1 S x", "process"),
        ("gpu_usage.csv", "a, b", "gpu"),
        ("train.log", "step 1", "log"),
        ("gpu-a100-052.log", "step 1", "log"),
    ],
)
def test_kind_of_a_file(name: str, head: str, kind: str) -> None:
    assert kind_of_file(name, head) == kind


def test_kind_of_a_line() -> None:
    assert kind_of_line("log", "Apr 13 14:01:40 lab kernel: NVRM: Xid") == "kernel"
    assert kind_of_line("stack", "x") == "stack"
