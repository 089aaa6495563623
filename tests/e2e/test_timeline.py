"""`lockstep timeline` on real jobs: a run of two ranks, while it trains and afterwards, and a watched torchrun."""

import gzip
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness import LOCKSTEP, Launched, config, task, write
from typer.testing import CliRunner

from benchmarks.perfetto_page import INSIDE, MISSING, perfetto_page
from lockstep.cli import app
from lockstep.report.timeline_capture_reader import capture_files, has_ended

pytestmark = [pytest.mark.xdist_group("timeline"), pytest.mark.timeout(600), pytest.mark.slow]


def lockstep(*arguments: object) -> str:
    """Run a command that must succeed; returns its standard output."""
    result = CliRunner(env={"COLUMNS": "250"}).invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def read_trace(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return trace


def names(trace: dict[str, Any], kind: str) -> set[str]:
    return {each["args"]["name"] for each in trace["traceEvents"] if each["ph"] == "M" and each["name"] == kind}


def slices(trace: dict[str, Any], category: str) -> list[dict[str, Any]]:
    return [each for each in trace["traceEvents"] if each["ph"] == "X" and each["cat"] == category]


def check_nesting(trace: dict[str, Any]) -> None:
    """No slice of a row overlaps another, or is inside of it, no time is negative, and every arrow has both ends."""
    rows, inside, ends = defaultdict(list), defaultdict(list), defaultdict(set)
    for each in trace["traceEvents"]:
        assert each["ph"] in "XMCisf" and each.get("ts", 0) >= 0, each
        if each["ph"] == "X":
            kind = inside if each["cat"] == INSIDE else rows
            kind[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
        elif each["ph"] in "sf":
            ends[each["id"]].add(each["ph"])
    for row in rows.values():
        row.sort()
        assert all(before[1] <= after[0] + 0.002 for before, after in pairwise(row))
    for place, row in inside.items():
        for began, ended in row:
            assert any(first < began < ended <= last + 0.002 for first, last in rows[place])
    assert all(found == {"s", "f"} for found in ends.values())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of which steps 3 and 4 were captured by its config, and more by the command."""
    home = task(tmp_path_factory.mktemp("timeline"))
    values = config(home, "grpo", steps=40, evaluation=None, report={"timeline": {"first_step": 3, "last_step": 4}})
    values["trainer"]["profile"] = {"first_step": 2, "last_step": 3, "ranks": [0, 1]}
    launched = Launched.start(home / "runs" / "grpo", str(write(home, values)))
    launched.wait_for("train", 1)
    print(lockstep("timeline", launched.folder, "--steps", 2, "--output", home / "steps.json.gz"))
    print(lockstep("timeline", launched.folder, "--output", home / "now.json.gz"))
    assert launched.process.wait(400) == 0, launched.text()
    return launched.folder


def test_a_living_run_is_captured_for_some_steps(run: Path) -> None:
    trace = read_trace(run.parent.parent / "steps.json.gz")
    check_nesting(trace)
    processes = " ".join(sorted(names(trace, "process_name")))
    for each in ("controller", "policy-0", "policy-1", "engine-0"):
        assert each in processes
    tracks = names(trace, "thread_name")
    assert {"stages", "micro-batches", "requests"} <= tracks and any(each.startswith("collectives") for each in tracks)
    steps = {each["args"]["value"] for each in trace["traceEvents"] if each["ph"] == "C" and each["name"] == "step"}
    assert max(steps) - min(steps) >= 2  # two whole ones; the counter is sampled, so short steps may be missing
    assert {"rollout", "train", "publish"} <= {each["name"] for each in slices(trace, "stages")}
    assert all(each["args"]["tokens"] > 0 for each in slices(trace, "requests"))


def test_collectives_have_sizes_sites_bandwidths_and_arrows(run: Path) -> None:
    trace = read_trace(run.parent.parent / "steps.json.gz")
    found = slices(trace, "collectives")
    assert {each["pid"] for each in found} and len({each["pid"] for each in found}) == 2
    gathered = [each["args"] for each in found if each["name"] == "all_gather_into_tensor"]
    assert gathered and all(each["bytes"] > 0 and ".py:" in each["call site"] for each in gathered)
    assert any("lockstep/train/fsdp/" in each["args"]["call site"] for each in found)  # no path is taken for a secret
    assert any(each.get("bus bandwidth (GB/s)", 0) > 0 for each in gathered)
    arrows = [each for each in trace["traceEvents"] if each["ph"] == "s"]
    assert arrows and {each["pid"] for each in arrows} <= {each["pid"] for each in found}


def test_a_capture_by_config_has_its_steps_and_is_complete(run: Path) -> None:
    (file,) = (run / "timeline").glob("steps-3-4-*.jsonl")
    assert has_ended(file) and file in capture_files(run)
    values = [json.loads(line) for line in file.read_text().splitlines()]
    assert values[-1]["end"] == "complete"
    counters = [each["counters"] for line in values for each in line.get("processes", ())]
    steps = {each["step"][0] for each in counters if "step" in each}  # counted from 0
    assert 2 <= min(steps) <= 3 and max(steps) >= 4
    trace = read_trace(Path(lockstep("timeline", file, "--output", run / "steps.json.gz").strip()))
    assert len([each for each in slices(trace, "stages") if each["name"] == "rollout"]) >= 2


def test_what_a_process_has_just_done_is_there_without_options(run: Path) -> None:
    trace = read_trace(run.parent.parent / "now.json.gz")
    check_nesting(trace)
    assert {"train", "rollout"} <= {each["name"] for each in slices(trace, "stages")}


def test_an_ended_run_has_the_timeline_of_all_captures(run: Path) -> None:
    printed = lockstep("timeline", run)
    assert printed.strip() == str(run / "timeline.json.gz")
    trace = read_trace(run / "timeline.json.gz")
    check_nesting(trace)
    assert slices(trace, "collectives")
    result = CliRunner().invoke(app, ["timeline", str(run), "--seconds", "1"])
    assert result.exit_code != 0 and "has no process on this host" in result.output


def test_chosen_steps_of_both_ranks_are_profiled(run: Path) -> None:
    files = sorted((run / "profiles").iterdir())
    assert [each.name for each in files] == [f"policy-rank{rank}-steps-2-3.json.gz" for rank in (0, 1)]
    for each in files:
        recorded = {event.get("name", "") for event in read_trace(each)["traceEvents"]}
        assert {"ProfilerStep#1", "aten::mm"} <= recorded and any("reduce_scatter" in name for name in recorded)


@pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
def test_perfetto_opens_the_timelines_and_profiles_of_a_run(run: Path) -> None:
    """Its page and its trace processor: no problems, and nothing else than what stands in the file."""
    lockstep("timeline", run, "--output", run / "all.json.gz")
    home = run.parent.parent
    with perfetto_page() as perfetto:
        for file in (home / "steps.json.gz", home / "now.json.gz", run / "all.json.gz"):
            perfetto.open(file)
            assert perfetto.differences(read_trace(file)) == [], file
        (counts,) = perfetto.query(
            "select (select count(*) from slice) as slices, (select count(*) from flow) as arrows"
        )
        assert counts["slices"] > 1000 and counts["arrows"] > 10
        for file in sorted((run / "profiles").iterdir()):
            perfetto.open(file)
            assert perfetto.query("select count(*) as n from slice where name = 'aten::mm'")[0]["n"] > 0
            assert perfetto.problems() == [], file


WATCHED = """
    import time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    print("ready", dist.get_rank(), flush=True)
    end = time.monotonic() + 25
    while True:
        left = torch.tensor(float(time.monotonic() < end))
        dist.all_reduce(left, op=dist.ReduceOp.MIN)
        if not left.item():
            break
        time.sleep(0.05 * (1 + dist.get_rank()))
"""


def test_a_watched_torchrun_is_captured(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(WATCHED))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*LOCKSTEP, "watch", "--", *words], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        ready = [line for _, line in zip(range(2), watching.stdout, strict=False)]
        assert len(ready) == 2
        pids = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit() and _is_rank(each, script)]
        lockstep("timeline", pids[0], "--seconds", 2, "--output", tmp_path / "watched.json.gz")
        assert watching.wait(60) == 0
    trace = read_trace(tmp_path / "watched.json.gz")
    check_nesting(trace)
    if not MISSING:
        with perfetto_page() as perfetto:
            perfetto.open(tmp_path / "watched.json.gz")
            assert perfetto.differences(trace) == []
    calls = [each for each in slices(trace, "collectives") if each["name"] == "all_reduce"]
    assert len({each["pid"] for each in calls}) == 2
    waited = [each["args"].get("waited for the last member (us)", 0.0) for each in calls]
    assert max(waited) > 20_000  # rank 0 sleeps 50 ms less than rank 1
    assert all(each["args"]["bytes"] == 4 for each in calls)
    shutil.rmtree(tmp_path / "incidents", ignore_errors=True)


def _is_rank(process: Path, script: Path) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(script).encode() in words and b"torch.distributed.run" not in words and b"watch" not in words
