"""Lengths with and without the value of truncated completions: both settings run, and differ in nothing else."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from benchmarks.response_length import MAX_TOKENS, PLOT, RESULTS, SEEDS, SETTINGS, draw, table
from benchmarks.runner import ROOT, environment
from benchmarks.workloads import Side


def line(bootstrap, seed, length, steps=40):
    shares = {"truncated": [0.5] * steps, "exact": [0.25] * steps}
    return {"bootstrap_truncated": bootstrap, "seed": seed, "load": 1.5, "length": [length] * steps, **shares}


def test_the_table_has_means_and_the_range_of_the_seeds():
    lines = [line(False, 1, 6.0), line(True, 1, 10.0), line(False, 2, 8.0), line(True, 2, 14.0)]
    text = "\n".join(table(lines))
    assert "| 1 to 10 | 7.00 (6.00 to 8.00) | 12.00 (10.00 to 14.00) | 0.50" in text
    assert text.count("\n| 31 to 40 |") == 1 and "Means of 2 seeds over 10 steps" in text


def test_the_committed_results_are_of_all_seeds_of_both_settings():
    lines = [json.loads(each) for each in RESULTS.read_text().splitlines()]
    found = {(each["bootstrap_truncated"], each["seed"]) for each in lines}
    assert found == {(bootstrap, seed) for bootstrap in SETTINGS.values() for seed in SEEDS}
    assert all(max(each["length"]) <= MAX_TOKENS and min(each["truncated"]) >= 0 for each in lines)


@pytest.mark.slow
def test_the_plot_has_every_seed_of_both_settings(tmp_path):
    draw([line(False, 1, 6.0), line(True, 1, 10.0)], tmp_path / "plot.svg")
    for path in (tmp_path / "plot.svg", PLOT):
        text = "".join(ET.parse(path).getroot().itertext())
        for label in ("mean tokens of a response", "share truncated", "exact match", "bootstrap_truncated on"):
            assert label in text, path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_few_steps_of_both_settings(tmp_path):
    out = tmp_path / "lengths.jsonl"
    command = [sys.executable, "-m", "benchmarks.response_length", "--quick", "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(Side("here", "lockstep")), capture_output=True, text=True, timeout=880
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    off, on = (json.loads(each) for each in out.read_text().splitlines())
    assert (off["bootstrap_truncated"], on["bootstrap_truncated"]) == (False, True)
    assert len(off["length"]) == len(on["length"]) == 6 and off["length"][0] == on["length"][0]
