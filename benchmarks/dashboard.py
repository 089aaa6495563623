"""How long the first view of `lockstep dashboard` takes for a large run.

    python -m benchmarks.dashboard                             10,000 steps, 1,000 ranks, in a temporary folder
    python -m benchmarks.dashboard --keep runs/large           keeps the folder, to open it in a browser
    python -m benchmarks.dashboard --steps 100000 --ranks 16

The run is made up, but its ledger, its captured timeline and its totals of GPUs have the form that a run writes. The
server is the real command in a process of its own. Measured is the time from its first request, at once after its
start, until it has answered everything that the page asks for at first, and again once the run is known.
"""

import argparse
import contextlib
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from lockstep.ledger import CompletionSample, Ledger
from lockstep.ledger.json_values import dumps
from lockstep.watch.supervisor.timeline_capture import CAPTURES_FOLDER, header_line

STEP_S = 6.0
STAGES = {"rollout": 0.5, "reward": 0.05, "ledger": 0.01, "logprobs": 0.1, "train": 0.3, "publish": 0.03}
"""Shares of a step."""
METRICS = 80
"""Metrics of a step besides those of its stages."""
CHARTS = 12
"""Curves of the first view."""
RANKS_PER_HOST = 8
CAPTURED_STEPS = 8
LIMIT_S = 2.0


def make_large_run(folder: Path, steps: int = 10_000, ranks: int = 1_000, seed: int = 0) -> Path:
    """Makes the folder of a run that has ended after `steps` steps. The ledger is written in one transaction."""
    chance, began = random.Random(seed), time.time() - steps * STEP_S
    config = {
        "recipe": "grpo", "name": folder.name, "folder": str(folder.parent), "seed": seed, "steps": steps,
        "model": {"path": "models/large"}, "trainer": {"ranks": ranks, "optimizer": {"lr": 1e-6}},
    }  # fmt: skip
    with Ledger.create(folder, config) as ledger:
        with ledger._index.transaction() as transaction:
            transaction.put("events", at=began, kind="start", fields=dumps({"ranks": ranks}))
            for step in range(steps):
                at = began + (step + 1) * STEP_S
                transaction.put("metrics", at=at, step=step, values=dumps(metrics_of(step, steps, chance)))
                transaction.put("commits", at=at, step=step, stats="{}")
            transaction.put("events", at=began + steps * STEP_S, kind="end", fields=dumps({"reason": "finished"}))
        for step in range(-1, steps, max(1, steps // 20)):
            score = 0.3 + 0.6 * (step + 1) / steps
            samples = [
                CompletionSample(f"prompt {number}", f"answer at {step}", uid=f"e:{number}") for number in range(8)
            ]
            ledger.record_evaluation(step, {"eval/exact_match": score}, samples)
    write_capture(folder, ranks, began + (steps - CAPTURED_STEPS) * STEP_S, chance)
    write_devices(folder, ranks, chance)
    return folder


def metrics_of(step: int, steps: int, chance: random.Random) -> dict[str, float]:
    """The row of a step: a few curves with noise, a spike now and then, and the stages."""
    learned = 1 / (1 + math.exp(-8 * (step / steps - 0.4)))
    row = {"reward/mean": learned + chance.gauss(0, 0.03), "policy/loss": 0.1 * (1 - learned) + chance.gauss(0, 0.01)}
    row |= {f"group{number % 8}/metric{number}": learned * number + chance.gauss(0, 1) for number in range(METRICS)}
    if chance.random() < 0.001:
        row["policy/grad_norm_spike"] = 1000.0
    row["policy/grad_norm"] = math.exp(chance.gauss(0, 0.3))
    row |= {f"time/{name}_s": share * STEP_S for name, share in STAGES.items()}
    return row | {"time/step_s": STEP_S}


def write_capture(folder: Path, ranks: int, began: float, chance: random.Random) -> None:
    """A captured timeline with the stages of all ranks, one answer of each host."""
    at_ns = 10**15
    lines = [header_line("large", began, at_ns, at_ns)]
    for host in range(-(-ranks // RANKS_PER_HOST)):
        processes = [
            {
                "name": f"policy-{rank}", "role": "policy", "rank": rank, "pid": 1000 + rank, "stage": ["", 0],
                "waits": [], "counters": {}, "communicators": [], "lost": 0,
                "spans": list(_rank_spans(at_ns, chance)),
            }
            for rank in range(host * RANKS_PER_HOST, min(ranks, (host + 1) * RANKS_PER_HOST))
        ]  # fmt: skip
        now = at_ns + int(CAPTURED_STEPS * STEP_S * 1e9)
        answer = {"host": f"node{host}", "offset_ns": 0, "now_ns": now, "texts": [], "processes": processes}
        lines.append(json.dumps(answer | {"devices": {}}) + "\n")
    path = folder / CAPTURES_FOLDER / "20261128-000000-001.jsonl"
    path.parent.mkdir()
    path.write_text("".join(lines))


def _rank_spans(at_ns: int, chance: random.Random) -> Iterator[list[Any]]:
    for step in range(CAPTURED_STEPS):
        start = at_ns + int(step * STEP_S * 1e9)
        for name, share in (("logprobs", 0.1), ("train", 0.3)):
            end = start + int(share * STEP_S * 1e9 * chance.uniform(0.9, 1.1))
            yield [1, name, start, end, 0, ""]
            start = end


def write_devices(folder: Path, ranks: int, chance: random.Random) -> None:
    """The totals of a GPU per rank."""
    rows = [
        {
            "host": f"node{rank // RANKS_PER_HOST}", "device": f"GPU {rank % RANKS_PER_HOST}", "name": "NVIDIA H100",
            "processes": [f"policy-{rank}"], "samples": 1000, "busy": chance.uniform(60, 99), "memory_busy": 30.0,
            "power_w": chance.uniform(400, 690), "power_limit_w": 700.0, "memory_used": 70 << 30,
            "memory_total": 80 << 30, "temperature_c": 60, "throttled": {}, "errors": [],
        }
        for rank in range(ranks)
    ]  # fmt: skip
    (folder / "devices.json").write_text(json.dumps(rows))


@contextlib.contextmanager
def served(*runs: Path) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    """The real command for these runs: a client with its address and token, and its process."""
    command = [sys.executable, "-m", "lockstep", "dashboard", *map(str, runs), "--no-open"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        found = re.search(r"(http://\S+)#token=(\S+)", process.stdout.readline())
        assert found is not None, process.communicate(timeout=10)
        headers = {"authorization": f"Bearer {found[2]}"}
        with httpx.Client(base_url=found[1], headers=headers, timeout=60) as client:
            yield client, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def first_view(client: httpx.Client) -> dict[str, float]:
    """The seconds of what a page asks for at first: some of it at once, as a browser does."""
    spent: dict[str, float] = {}

    def get(path: str) -> Any:
        began = time.perf_counter()
        answer = client.get(path)
        answer.raise_for_status()
        spent[path.partition("?")[0].rpartition("/")[2]] = time.perf_counter() - began
        return answer.json()

    began = time.perf_counter()
    client.get("/").raise_for_status()
    run = get("/api/runs")["runs"][0]["id"]
    names = [each["name"] for each in get(f"/api/runs/{run}/metrics")["names"]][:CHARTS]
    curves = "&".join(f"name={name}" for name in names)
    paths = [f"series?{curves}&points=600", "stages", "waits", "hosts", "incidents"]
    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(lambda path: get(f"/api/runs/{run}/{path}"), paths))
    return {"all": time.perf_counter() - began, **spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=1_000)
    parser.add_argument("--keep", type=Path, help="the folder of the run, which is kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch) / "large"
        if not folder.exists():
            make_large_run(folder.absolute(), options.steps, options.ranks)
        with served(folder) as (client, process):
            for title in ("first", "again"):
                spent = first_view(client)
                print(title, json.dumps({name: round(seconds, 3) for name, seconds in spent.items()}))
                used = process.cpu_times()
                memory = process.memory_info().rss / 2**20
                print(f"  server since its start: {used.user + used.system:.2f} s of CPU, {memory:.0f} MiB")
                if spent["all"] > LIMIT_S:
                    print(f"{spent['all']:.2f} s are more than {LIMIT_S:g} s")


if __name__ == "__main__":
    main()
