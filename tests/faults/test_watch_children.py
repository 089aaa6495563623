"""`lockstep watch` around ranks with workers of their own: what a worker does or suffers is its rank's."""

import json
from pathlib import Path

import pytest
from test_watch_command import finish, torchrun, watch

from lockstep.watch.attach.watched_command import STALL_EXIT_CODE

JOB = str(Path(__file__).with_name("watch_jobs") / "nested_workers.py")
OPTIONS = ("--notice-after", "1", "--confirm-after", "4", "--on-stall", "kill")


@pytest.mark.parametrize(
    ("fault", "kind", "rank"),
    [
        ("hangs", "absent", 1),
        pytest.param("hangs", "absent", 0, marks=pytest.mark.slow),
        pytest.param("killed", "dead", 1, marks=pytest.mark.slow),
    ],
)
def test_a_worker_of_a_rank_is_named_as_its_rank(tmp_path: Path, fault: str, kind: str, rank: int) -> None:
    """The worker has rank 1 in its own communicator, and the other worker has rank 0: neither is a rank of the job."""
    job = torchrun(JOB, "--fault", fault, "--rank", str(rank), "--path", str(tmp_path / "store"))
    code, _, errors = finish(watch(tmp_path, *job, options=OPTIONS))
    assert code == STALL_EXIT_CODE, errors
    (file,) = (tmp_path / "incidents").glob("*/verdict.json")
    verdict = json.loads(file.read_text())
    assert [(each["name"], each["rank"]) for each in verdict["culprits"]] == [(f"rank-{rank}", rank)], errors
    assert verdict["kind"] == kind and "child" in verdict["explanation"], errors
    if fault == "hangs":
        assert "generate_forever() at nested_workers.py" in verdict["culprits"][0]["where"], errors
    said = [line for line in errors.splitlines() if "lockstep watch: " in line and "rank" in line]
    assert not any(f"rank {1 - rank} (" in line.partition(";")[0] for line in said), errors


@pytest.mark.slow
def test_workers_that_end_normally_are_no_fault(tmp_path: Path) -> None:
    job = torchrun(JOB, "--fault", "none", "--path", str(tmp_path / "store"))
    code, _, errors = finish(watch(tmp_path, *job, options=OPTIONS))
    assert code == 0 and "confirmed" not in errors, errors
    assert not (tmp_path / "incidents").exists()
