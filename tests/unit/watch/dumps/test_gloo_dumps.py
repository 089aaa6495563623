"""Dumps of real gloo jobs (torch 2.13): `gloo_rank.py` made those in `files/`, and one is made anew here.

The paths in them were replaced by others of the same length, nothing else.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.watch.diagnosis.evidence import Evidence
from lockstep.watch.dumps.explain_dumps import read_dumps

HERE = Path(__file__).parent
COMMON = 6


def counts(evidence: Evidence) -> tuple[list[int], list[int]]:
    assert [about.description for about in evidence.communicators.info] == ["default_pg"]
    return evidence.communicators.entered.tolist(), evidence.communicators.completed.tolist()


@pytest.mark.parametrize(
    ("case", "entered", "completed"),
    [
        ("absent", [7, 7, 6], [6, 6, 6]), ("absent_json", [7, 7, 6], [6, 6, 6]), ("timed_out", [7, 7, 6], [6, 6, 6]),
        ("mismatch", [7, 7, 7], [6, 6, 6]), ("healthy", [7, 7, 7], [7, 7, 7]), ("recv", [8, 8, 7], [7, 7, 7]),
    ],
)  # fmt: skip
def test_the_progress_of_all_ranks(case: str, entered: list[int], completed: list[int]) -> None:
    evidence = read_dumps(HERE / "files" / f"gloo_{case}")
    assert counts(evidence) == (entered, completed)
    assert evidence.gaps == () and not evidence.edges
    assert evidence.communicators.uncertain is not None
    assert evidence.communicators.uncertain.tolist() == ([True, False, True] if case == "recv" else [False] * 3)


def test_calls_and_call_sites() -> None:
    calls = read_dumps(HERE / "files" / "gloo_mismatch").calls
    said = {
        int(m): calls.by_signature[int(s)]
        for m, n, s in zip(calls.membership, calls.seq, calls.signature, strict=True)
        if n == 7
    }
    assert [said[rank].operation for rank in range(3)] == ["all_reduce", "all_reduce", "all_gather"]
    assert (said[0].shapes, said[0].dtype) == ("[[4, 2]]", "Float")
    assert calls.sites[0, 7].endswith("in last_step") and calls.sites[0, 7] != calls.sites[2, 7]
    before = calls.seq < 7
    assert all(len(np.unique(calls.signature[before & (calls.seq == n)])) == 1 for n in range(1, 7))


def test_a_missing_rank_is_known_from_the_other_dumps(tmp_path: Path) -> None:
    for rank in (0, 2):
        name = f"nccl_trace_rank_{rank}"
        (tmp_path / name).write_bytes((HERE / "files" / "gloo_absent" / name).read_bytes())
    evidence = read_dumps(tmp_path)
    assert counts(evidence) == ([7, -1, 6], [6, -1, 6]) and evidence.gaps == ("no dump of rank 1",)


def test_a_job_of_the_installed_torch(tmp_path: Path) -> None:
    """One of two ranks does not enter the last collective."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "gloo_rank.py"), str(rank), "2", str(tmp_path), "absent"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "2000"},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=150) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    (tmp_path / "store").unlink()
    evidence = read_dumps(tmp_path)
    assert counts(evidence) == ([COMMON + 1, COMMON], [COMMON, COMMON])
    assert len(evidence.gaps) == 2 and all("has 2 dumps: read nccl_trace_rank_" in gap for gap in evidence.gaps)
    assert evidence.calls.sites[0, COMMON + 1].endswith("in last_step")
