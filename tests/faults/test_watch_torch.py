"""`lockstep watch` around jobs of plain torch. With ranks that compile, a compiler at work is progress, and one that
hangs is not. With DDP, whose collectives come from C++, a rank that runs out of batches is named."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from test_watch_command import ROOT, finish, torchrun, watch

from lockstep.watch.attach.watched_command import STALL_EXIT_CODE

JOB = str(ROOT / "benchmarks" / "faults" / "attached_job.py")
OPTIONS = ("--notice-after", "1", "--confirm-after", "1.5", "--on-stall", "kill")
"""A rank that is busy in one line is confirmed after 15 s."""
BOUND_S = 240.0


def job(folder: Path, fault: str, loop: str = "plain") -> list[str]:
    (folder / "go").touch()
    return torchrun(JOB, loop, fault, "1", str(folder), ranks=3)


def confirmed(folder: Path, *words: str) -> dict[str, Any]:
    """The verdict for which the command is ended."""
    code, _, errors = finish(watch(folder, *words, options=OPTIONS))
    assert code == STALL_EXIT_CODE, errors
    (file,) = (folder / "incidents").glob("*/verdict.json")
    verdict: dict[str, Any] = json.loads(file.read_text())
    assert [each["rank"] for each in verdict["culprits"]] == [1], errors
    return verdict


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
    assert confirmed(tmp_path, *job(tmp_path, "hung compiler"))["kind"] == "absent"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_rank_without_batches_is_named_where_the_others_are_in_ddp(tmp_path: Path) -> None:
    verdict = confirmed(tmp_path, *job(tmp_path, "uneven", "ddp"))
    assert verdict["kind"] == "mismatch" and "called barrier where the others called" in verdict["explanation"]
