"""The whole command, small, where TRL is installed (script/benchmark puts it into build/peer)."""

import json
import subprocess
import sys

import pytest

from benchmarks.runner import ROOT, environment, peer_installed
from benchmarks.workloads import Side


def measured(work, folder, *options):
    """What the command printed and recorded."""
    command = [sys.executable, "-m", "benchmarks", "--quick", work, "--out", str(folder), *options]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(Side("here", "lockstep")), capture_output=True, text=True, timeout=580
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, [json.loads(line) for line in (folder / "raw.jsonl").read_text().splitlines()]


@pytest.mark.timeout(600)  # it starts eight processes
@pytest.mark.skipif(not peer_installed(), reason="TRL is not in build/peer: run script/benchmark once")
def test_one_tiny_repeat_of_both_sides(tmp_path):
    said, lines = measured("fixed", tmp_path)
    assert lines[0]["made"]["trl"] == "1.16.0"
    sides = {line["side"]: line for line in lines if "work" in line}
    assert set(sides) == {"lockstep", "trl"}
    assert sides["lockstep"]["by_process"]["engine-0"] >= 0
    assert sides["trl"]["cpu_s"] > 0
    details = next(line["ms"] for line in lines if "details" in line)
    assert {"rollout", "reward", "ledger", "pack", "train", "publish"} <= set(details)
    assert (tmp_path / "table.md").read_text() in said
    assert "Lockstep / peer" in said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not peer_installed(), reason="TRL is not in build/peer: run script/benchmark once")
def test_both_sides_train_on_the_same_images(tmp_path):
    _, lines = measured("vision", tmp_path)
    assert {line["side"] for line in lines if "work" in line} == {"lockstep", "trl", "trl default"}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("work", ["sft", "vision"])
def test_lockstep_alone_needs_no_trl(work, tmp_path):
    _, lines = measured(work, tmp_path, "--side", "lockstep")
    (line,) = [line for line in lines if "work" in line]
    assert line["cpu_s"] > 0
    assert (line["tokens"] > 0) == (work == "sft")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_ahead_of_training_need_no_trl(tmp_path):
    said, lines = measured("async", tmp_path)
    runs = {(line["ahead"], line["max_staleness"]): line for line in lines if "ahead" in line}
    assert set(runs) == {(work, staleness) for work in ("fixed", "tail") for staleness in (0, 1, 2)}
    for (_, staleness), line in runs.items():
        assert line["staleness"] <= staleness and (line["ready"] > 0) == (staleness > 0)
    assert "`max_staleness`" in said
