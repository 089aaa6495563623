"""The page of `lockstep dashboard` in a real browser: time to the first view, and how long its main thread is busy.

    python -m benchmarks.dashboard_page --ranks 1000 --steps 10000

Makes the folder of a run with that many steps, and beacons of that many processes, of which one makes all others wait;
serves it with `lockstep dashboard`, and opens each view in a fresh headless Chromium. Prints per view the milliseconds
until it is drawn, the longest task of the page's main thread, in milliseconds by the clock and on the CPU, and the
longest while the page is used: scrolled, zoomed and searched.
"""

import argparse
import contextlib
import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.chromium import BrowserPage, Chromium
from lockstep.base.folders import new_run_id, run_shm_dir
from lockstep.base.wait_state import WaitRecord
from lockstep.ledger import CompletionSample, Ledger
from lockstep.run.run_id import RUN_ID_FILE
from lockstep.watch.beacon.writer import close_beacon, open_beacon

VIEWS = ("curves", "stages", "waits", "hosts", "samples", "incidents", "config", "communication")
TOKEN = secrets.token_hex(32)
GOAL_FIRST_MS, GOAL_TASK_MS = 2000, 100
LATE = 17
"""The rank that the others wait for."""
LIMIT_S = 60.0
SETTLE_S = 3.0
"""How long a view is watched after it was drawn: events arrive meanwhile."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A view in the browser. Times in milliseconds."""

    view: str
    first: float
    longest_wall: float
    longest_cpu: float
    used_wall: float
    """The longest task while it was used."""
    used_cpu: float


def make_run(
    folder: Path, steps: int, metrics: int = 100, name: str = "scale", config: Mapping[str, Any] | None = None
) -> None:
    """The folder of a run with its curves and with one evaluation."""
    rng = np.random.default_rng(0)
    groups = ("reward", "policy", "rollout", "time", "critic")
    names = ["reward/mean", "policy/loss", "policy/kl", "rollout/length"]
    names += ["time/rollout_s", "time/reward_s", "time/train_s"]
    names += [f"{groups[at % len(groups)]}/extra_{at}_s" for at in range(len(names), metrics)]
    noise = rng.normal(size=(steps, len(names))) * 0.05
    settings = {"recipe": "grpo", "name": name, "steps": steps, "model": {"path": "tiny"}, "trainer": {"ranks": 2}}
    with Ledger.create(folder, settings | dict(config or {})) as ledger:
        samples = [
            CompletionSample(f"prompt {at}", f"answer {at}: " + "word " * 40, "word", float(at % 2), uid=f"uid-{at}")
            for at in range(64)
        ]
        for step in range(steps):
            shape = 1 - math.exp(-4 * step / steps)
            ledger.record_metrics(step, {key: abs(shape + noise[step, at]) for at, key in enumerate(names)})
            ledger.commit(step, {})
        ledger.record_evaluation(steps - 1, {"eval/exact_match": 0.5}, samples)


def make_processes(folder: Path, ranks: int) -> str:
    """Beacons of a policy's ranks and of rollout engines; all ranks wait for one. Returns the run's id."""
    run = new_run_id("dashboard")
    (folder / RUN_ID_FILE).write_text(run)
    now = time.monotonic_ns()
    for role, name, count in (("policy", "policy", ranks), ("engine", "engine", max(1, ranks // 8))):
        for rank in range(count):
            beacon = open_beacon(run, f"{name}-{rank}", role, rank)
            for stage in ("load", "rollout", "reward", "train", "publish", "train"):
                beacon.stage(stage)
                beacon.progress("steps", rank)
            if role == "policy" and rank != LATE:
                slot = beacon.take_wait_slot()
                assert slot is not None
                since, why = now - 40 * 10**9, "all_reduce #812 on 'dp'"
                wait = WaitRecord("collective", f"policy-{LATE}", why, since, None, since, os.getpid(), "MainThread")
                beacon.write_wait(slot, wait)
    return run


@contextlib.contextmanager
def served(*folders: Path, port: int = 0) -> Iterator[str]:
    """`lockstep dashboard` of these folders; the page's address, with its token."""
    command = [sys.executable, "-m", "lockstep", "dashboard", *map(str, folders), "--port", str(port), "--no-open"]
    with tempfile.TemporaryFile() as log:
        environment = os.environ | {"LOCKSTEP_DASHBOARD_TOKEN": TOKEN}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert process.stdout is not None
        try:
            line = next((each for each in process.stdout if "#token=" in each), "")
            if not line:
                log.seek(0)
                raise RuntimeError(f"no dashboard: {log.read().decode(errors='replace')[-2000:]}")
            yield line[line.index("http") :].strip()
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait(10)
            process.stdout.close()


def open_view(page: BrowserPage, address: str, view: str, more: str = "") -> float:
    """Opens a view, and returns after how many milliseconds it was drawn."""
    page.open(f"{address}&view={view}{more}")
    mark = f"performance.getEntriesByName('lockstep-{view}-shown')[0]?.startTime"
    return float(page.until(mark, LIMIT_S))


def run_ids(page: BrowserPage, address: str) -> dict[str, str]:
    """The ids by which addresses name runs, by the names of their folders. The page must be open at this address."""
    ask = f"{{ headers: {{ Authorization: 'Bearer {urlsplit(address).fragment.removeprefix('token=')}' }} }}"
    found = page.run(f"fetch('/api/runs', {ask}).then((each) => each.json())")
    return {Path(run["folder"]).name: run["id"] for run in found["runs"]}


def show_many_gpus(page: BrowserPage) -> None:
    """Fills the open view of hosts with invented figures of 1,000 GPUs."""
    page.run((Path(__file__).parent / "dashboard_gpus.js").read_text())
    page.until("view.element.querySelectorAll('.gpu').length >= 8")


def use(page: BrowserPage, view: str) -> None:
    """What somebody does with a view."""
    for at in range(4):
        page.run(f"window.scrollTo(0, {at * 700})")
        page.run(f"document.querySelector('.gantt')?.scrollTo(0, {at * 900})")
        time.sleep(0.2)
    page.run("window.scrollTo(0, 0)")
    if view == "curves":
        page.run("document.getElementById('curves-find').value = 'extra'")
        page.run("document.getElementById('curves-find').dispatchEvent(new Event('input'))")
        time.sleep(0.5)
        left, top, width = page.run(
            "(b => [b.left, b.top, b.width])(document.querySelector('.plot').getBoundingClientRect())"
        )
        page.drag((left + width * 0.4, top + 90), (left + width * 0.7, top + 90))
    if view == "stages":
        page.run("document.querySelectorAll('.chips button').forEach(b => b.click())")
    time.sleep(1)


def measure(address: str, view: str) -> Opened:
    """One view in a fresh browser."""
    with Chromium() as browser:
        page = browser.page()
        browser.trace()
        first = open_view(page, address, view)
        time.sleep(SETTLE_S)
        loaded = browser.traced_tasks()
        browser.trace()
        use(page, view)
        used = browser.traced_tasks()
    return Opened(view, first, *_longest(loaded), *_longest(used))


def _longest(tasks: list[tuple[float, float]]) -> tuple[float, float]:
    return max((wall for wall, _ in tasks), default=0.0), max((cpu for _, cpu in tasks), default=0.0)


def table(found: list[Opened]) -> str:
    """The measurements as Markdown."""
    lines = ["| view | first view | longest task: clock | CPU | while used: clock | CPU |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    lines += [
        f"| {each.view} | {each.first:.0f} ms | {each.longest_wall:.0f} ms | {each.longest_cpu:.0f} ms "
        f"| {each.used_wall:.0f} ms | {each.used_cpu:.0f} ms |"
        for each in found
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--views", default=",".join(VIEWS))
    chosen = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="lockstep-dashboard-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    run = ""
    try:
        make_run(root / "scale", chosen.steps)
        run = make_processes(root / "scale", chosen.ranks)
        with served(root) as address:
            found = [measure(address, view) for view in chosen.views.split(",")]
        load = os.getloadavg()[0]
        print(f"{chosen.ranks:,} ranks, {chosen.steps:,} steps, {os.cpu_count()} cores, load {load:.1f}\n")
        print(table(found))
        print(f"\ngoals: first view within {GOAL_FIRST_MS:,} ms, no task over {GOAL_TASK_MS} ms")
    finally:
        close_beacon()
        if run:
            shutil.rmtree(run_shm_dir(run), ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
