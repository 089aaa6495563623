"""`lockstep watch` around ranks that compile: a compiler at work is progress, one that hangs is not."""

import json
import time
from pathlib import Path

import pytest
from test_watch_command import ROOT, finish, torchrun, watch

from lockstep.watch.attach.watched_command import STALL_EXIT_CODE

JOB = str(ROOT / "benchmarks" / "faults" / "attached_job.py")
OPTIONS = ("--notice-after", "1", "--confirm-after", "1.5", "--on-stall", "kill")
"""A rank that is busy in one line is confirmed after 15 s."""
BOUND_S = 240.0


def job(folder: Path, fault: str) -> list[str]:
    (folder / "go").touch()
    return torchrun(JOB, "plain", fault, "1", str(folder), ranks=3)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rank_whose_compiler_works_is_not_confirmed(tmp_path: Path) -> None:
    """The main thread waits for compilers in one line, for longer than a busy loop would be confirmed after."""
    process = watch(tmp_path, *job(tmp_path, "builds"), options=OPTIONS)
    end = time.monotonic() + BOUND_S
    while not (tmp_path / "over-1").exists():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < end
        time.sleep(0.2)
    process.terminate()
    _, _, errors = finish(process)
    assert "confirmed" not in errors, errors


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rank_whose_compiler_hangs_is_confirmed(tmp_path: Path) -> None:
    code, _, errors = finish(watch(tmp_path, *job(tmp_path, "hung compiler"), options=OPTIONS))
    assert code == STALL_EXIT_CODE, errors
    (file,) = (tmp_path / "incidents").glob("*/verdict.json")
    verdict = json.loads(file.read_text())
    assert [each["rank"] for each in verdict["culprits"]] == [1] and verdict["kind"] == "absent", errors
