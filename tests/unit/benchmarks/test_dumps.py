"""`python -m benchmarks.dumps` works: small numbers, beside the real torchfrtrace."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.dump_cases import CASES
from benchmarks.dumps import torchfrtrace

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_read_the_same_dumps(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.dumps",
        "--quick",
        "beside",
        "many",
        "--out",
        str(tmp_path / "out.json"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((tmp_path / "out.json").read_text())
    assert [run["said"] for run in measured["beside"]["runs"].values()] == [
        "10 (absent)",
        "10 (missing)",
        "10 (absent)",
    ]
    assert {run["said"] for run in measured["many"]["runs"].values()} == {"21 (absent)"}
    assert measured["beside"]["faster"] > 1 and measured["beside"]["memory"] < 0.5


@pytest.mark.slow
def test_what_torchfrtrace_names_is_read_from_what_it_prints(tmp_path: Path) -> None:
    named = {}
    for name in ("a rank does not come", "another dtype", "the dump of an innocent is truncated"):
        (case,) = (each for each in CASES if each.name == name)
        case.make(tmp_path / name)
        named[name] = torchfrtrace(tmp_path / name)
    missing, mismatch, failed = named.values()
    assert missing["named"] == frozenset({5}) and "missing" in missing["said"]
    assert mismatch["named"] == frozenset({5}) and "mismatch" in mismatch["said"]
    assert failed["named"] is None and failed["said"].startswith("fails: ")
