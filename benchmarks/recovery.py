"""How long a run is without its engine, or without its trainer, after one of them is killed; and what is left of its
time with a fault in every tenth step.

    python -m benchmarks.recovery                three kills of each in the demo's GRPO run
    python -m benchmarks.recovery --repeats 1 --out FOLDER
    python -m benchmarks.recovery often          the same run with and without faults: the share of time that trains

Measured from SIGKILL by the processes' own beacons: until the engine's successor has made a token, and until a new
trainer rank has finished an optimizer step that the killed one had not. The run goes on to its end.

`often` has larger batches, so that a step takes seconds. In every tenth step, in turn: the engine is killed, a trainer
rank is killed, a trainer rank is frozen, the engine is frozen. The share is the time of the undisturbed run's steps
over that of the disturbed run's.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.runner import ROOT
from lockstep.base.folders import run_shm_dir
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny
from lockstep.watch.beacon.beacon_records import BeaconState
from lockstep.watch.beacon.reader import read_beacon

BOUND_S = 600.0
GOALS = {"engine": 20.0, "trainer": 25.0}


class Demo:
    """The demo's second part, from an untrained model."""

    def __init__(self, folder: Path, steps: int, **more: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        make_tiny(
            folder / "model", hidden=128, layers=2, heads=4, kv_heads=2, ffn=512, max_length=64,
            alphabet="0123456789=", seed=11,
        )  # fmt: skip
        python = sys.executable
        subprocess.run([python, ROOT / "examples" / "sort_data.py", folder / "data"], check=True, timeout=BOUND_S)
        self.steps = steps
        self.run, self.log = folder / "sort-grpo", folder / "output.txt"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [python, "-c", "from lockstep.cli import app; app()", "train", *self.arguments(folder, steps, more)],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}, stdout=output, stderr=output,
            )  # fmt: skip

    def arguments(self, folder: Path, steps: int, more: dict[str, Any]) -> list[str]:
        changes = {
            "folder": folder, "steps": steps, "model.path": folder / "model", "data.path": folder / "data/grpo.jsonl",
            "evaluation.data.path": folder / "data/eval.jsonl", "evaluation.prompts": 32, "report.html": "false",
            "trainer.schedule.kind": "constant", "recovery.policy.max_restarts": 99,
            "recovery.rollout.max_restarts": 99, **more,
        }  # fmt: skip
        return [str(ROOT / "examples" / "grpo_sort.yaml"), *(f"{name}={value}" for name, value in changes.items())]

    def beacon(self, name: str) -> BeaconState | None:
        try:
            run = (self.run / "run-id").read_text().strip()
        except OSError:
            return None
        return read_beacon(run_shm_dir(run) / f"{name}.beacon") if run else None

    def count(self, name: str, counter: str) -> int:
        state = self.beacon(name)
        found = state.counters.get(counter) if state is not None else None
        return 0 if found is None else found.value

    def until(self, there: Callable[[], bool], what: str) -> float:
        """When it was so, on the monotonic clock."""
        deadline = time.monotonic() + BOUND_S
        while not there():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"never {what}:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.002)
        return time.monotonic()

    def stage(self, name: str, after: int) -> int:
        """Returns in this stage of a later step than `after`; the step."""

        def there() -> bool:
            state = self.beacon("controller")
            return state is not None and state.stage == name and self.count("controller", "step") > after

        self.until(there, f"in {name} after step {after}")
        return self.count("controller", "step")

    def kill(self, name: str, number: int = signal.SIGKILL) -> float:
        state = self.beacon(name)
        assert state is not None
        os.kill(state.pid, number)
        return time.monotonic()

    def rows(self) -> list[dict[str, float]]:
        """The metrics of all steps."""
        with Ledger.reader(self.run) as ledger:
            return [row.values for row in ledger.metrics_rows()]


def measure(demo: Demo, repeats: int) -> dict[str, list[float]]:
    """Seconds of each kill, by who was killed."""
    found: dict[str, list[float]] = {"engine": [], "trainer": []}
    step = 1
    for life in range(repeats):
        suffix = f".{life}" if life else ""
        step = demo.stage("rollout", step)
        killed = demo.kill(f"engine-0{suffix}")
        back = demo.until(lambda: demo.count(f"engine-0.{life + 1}", "tokens") > 0, "generating again")  # noqa: B023
        found["engine"].append(back - killed)
        step = demo.stage("train", step)
        done = demo.count(f"policy-0{suffix}", "optimizer steps")
        killed = demo.kill(f"policy-1{suffix}")
        back = demo.until(
            lambda: demo.count(f"policy-0.{life + 1}", "optimizer steps") > done, "training again"  # noqa: B023
        )  # fmt: skip
        found["trainer"].append(back - killed)
    return found


def show_returns(folder: Path, repeats: int) -> dict[str, Any]:
    demo = Demo(folder, steps=12 * repeats + 10)
    try:
        found = measure(demo, repeats)
        code = demo.process.wait(BOUND_S)
    finally:
        demo.process.terminate()
    print("killed      median  longest     goal   what came back")
    what = {"engine": "a token of its successor", "trainer": "an optimizer step that was not there"}
    for who, seconds in found.items():
        middle, longest = statistics.median(seconds), max(seconds)
        print(f"{who:<8} {middle:>7.1f} s {longest:>6.1f} s {GOALS[who]:>6.0f} s   {what[who]}")
    lost = sum(row.get("time/recovery_s", 0.0) + row.get("time/again_s", 0.0) for row in demo.rows())
    print(f"exit code {code}; recovery took {lost:.1f} s of the run's steps, load {os.getloadavg()[0]:.1f}")
    return {"seconds": found}


TURNS = (
    ("rollout", "engine-0", signal.SIGKILL),
    ("train", "policy-1", signal.SIGKILL),
    ("train", "policy-1", signal.SIGSTOP),
    ("rollout", "engine-0", signal.SIGSTOP),
)
LARGE = {"prompts_per_step": 384, "group_size": 16, "evaluation.every": 1000, "checkpoint.every": 20}
EVERY = 10


def show_share(folder: Path, steps: int) -> dict[str, Any]:
    calm = Demo(folder / "calm", steps, **LARGE)
    span = _span(calm, lambda: None)
    hit = Demo(folder / "hit", steps, **LARGE)
    told: list[str] = []

    def faults() -> None:
        lives: Counter[str] = Counter()
        for turn, after in enumerate(range(EVERY - 1, steps - 1, EVERY)):
            stage, name, number = TURNS[turn % len(TURNS)]
            step = hit.stage(stage, after - 1)
            hit.kill(f"{name}.{lives[name]}" if lives[name] else name, number)
            lives[name] += 1
            told.append(f"step {step}: {name} {signal.Signals(number).name}")

    disturbed = _span(hit, faults)
    rows = hit.rows()
    lost, again = (sum(row.get(f"time/{what}_s", 0.0) for row in rows) for what in ("recovery", "again"))
    print("\n".join(told))
    print(f"{steps} steps of {span / steps:.1f} s, {len(told)} faults: {span:.1f} s without, {disturbed:.1f} s with")
    print(f"{span / disturbed:.1%} of the time trains (goal 90 %); recovery {lost:.1f} s, trained again {again:.1f} s")
    print(f"final weights differ by at most {_apart(calm.run, hit.run):.1e}; load {os.getloadavg()[0]:.1f}")
    return {"steps": steps, "calm_s": span, "disturbed_s": disturbed, "faults": told}


def _span(demo: Demo, meanwhile: Callable[[], None]) -> float:
    """Seconds from the first step's begin to the run's last."""
    try:
        demo.until(lambda: demo.count("controller", "step") > 0, "in a step")
        began = time.monotonic()
        meanwhile()
        demo.until(lambda: len(demo.rows()) >= demo.steps, "at the last step")
        span = time.monotonic() - began
        if demo.process.wait(BOUND_S):
            raise SystemExit(demo.log.read_text(errors="replace")[-3000:])
        return span
    finally:
        demo.process.terminate()


def _apart(one: Path, other: Path) -> float:
    """The largest difference of two runs' exported weights."""
    a, b = (load_file(folder / "export" / "model.safetensors") for folder in (one, other))
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("returns", "often"), default="returns")
    parser.add_argument("--repeats", type=int, default=3, help="kills of each")
    parser.add_argument("--steps", type=int, default=42, help="of `often`")
    parser.add_argument("--out", type=Path, help="folder for results.json and the run; a temporary one when absent")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-recovery-") as scratch:
        folder = options.out or Path(scratch)
        often = options.part == "often"
        found = show_share(folder, options.steps) if often else show_returns(folder, options.repeats)
        if options.out is not None:
            found["load"] = os.getloadavg()[0]
            (folder / "results.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
