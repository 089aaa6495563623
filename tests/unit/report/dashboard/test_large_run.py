"""A run of 10,000 steps and 1,000 ranks: the first view within its bound, and memory that does not grow with looks."""

import resource
import time
from pathlib import Path

import pytest

from benchmarks.dashboard import CHARTS, LIMIT_S, make_large_run
from lockstep.report.dashboard.shown_run import ShownRun

MEMORY_MIB = 200


def test_a_made_run_is_one(tmp_path: Path) -> None:
    shown = ShownRun(make_large_run(tmp_path / "run", steps=60, ranks=20))
    overview = shown.feed.overview()
    assert (overview.state, overview.step) == ("finished", 60)
    assert len(shown.hosts()["hosts"]) == 3
    chart = shown.stages(None, None)
    assert len(chart["rows"]) == 21 and {span["step"] for span in chart["spans"]} >= {55, 60}


@pytest.mark.slow
def test_the_first_view_of_a_large_run_is_quick_and_small(tmp_path: Path) -> None:
    folder = make_large_run(tmp_path / "run")
    shown = ShownRun(folder)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    shown.feed.overview()
    names, steps = shown.feed.metric_names()
    curves = shown.feed.curves(names[:CHARTS], None, None, 600)
    chart = shown.stages(None, None)
    shown.waits()
    assert len(shown.hosts()["hosts"]) == 125 and shown.incidents() == []
    assert time.process_time() - began < LIMIT_S
    assert steps == 10_000 and all(len(curve["steps"]) == 600 for curve in curves.values() if len(curve["steps"]) > 60)
    assert len(chart["rows"]) == 1001 and len(chart["spans"]) <= 4001
    for _ in range(20):
        shown.feed.curves(names, None, None, 600)
        shown.stages(0.0, None)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MEMORY_MIB
