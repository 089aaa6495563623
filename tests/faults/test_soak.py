"""Healthy but slow or disturbed processes: none is confirmed to hang. `benchmarks.soak` is the long version."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.runner import ROOT
from benchmarks.soak.activities import JUDGE
from benchmarks.soak.bare_processes import Site
from benchmarks.soak.disturbances import Disturber
from benchmarks.soak.finding_counts import Tally
from benchmarks.soak.http_judge import thinking
from benchmarks.soak.load import busy
from lockstep.watch.diagnosis.verdict import StallThresholds

SEED = 18
"""With this seed the first activities of both followers are long: one starves, the child of the other reads."""
PATIENCE = StallThresholds(notice_s=0.75, still_s=4.0)
NASTIEST = ("starved", "judge_that_streams", "child_reads")
"""Activities with little CPU, with bytes that are not counted for the process, and in a child."""


BOUND_S = 120.0


def long_acts(site: Site) -> int:
    """The number of finished activities longer than the threshold for inactivity."""
    record = site.folder / "acts.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    return sum(json.loads(line).get("took_s", 0.0) > 3 * PATIENCE.still_s for line in lines)


@pytest.fixture
def one_core() -> Iterator[None]:
    """Bind this process and its children to one core, which loads it without loading the machine."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.slow
def test_the_hardest_activities_of_the_soak_confirm_no_process(tmp_path: Path, one_core: None) -> None:
    """One follower per activity, on one core with two busy loops; all processes, agent and supervisor included, are
    briefly stopped."""
    tally = Tally("site")
    with thinking() as judge:
        environment = {JUDGE: judge, "SOAK_DISK": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        site = Site(tmp_path / "site", PATIENCE, SEED, tally, environment, ("policy-1", "policy-2"), NASTIEST)
        with busy(2), site, Disturber(site.process_ids, PATIENCE.notice_s, SEED) as disturber:
            end = time.monotonic() + BOUND_S
            while long_acts(site) < 2 and time.monotonic() < end:
                site.soak(0.5)
    tally.disturbed(disturber.done, disturber.late, "")
    assert tally.longest_s > 3 * PATIENCE.still_s and tally.notices > 0, "nothing was tested"
    assert tally.wrong == [] and tally.troubles == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_minutes_of_soak_confirm_no_process() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "2", "--seed", "20261122"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
