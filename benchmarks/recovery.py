"""How long a run is without its engine, or without its trainer, after one of them is killed.

    python -m benchmarks.recovery                three kills of each in the demo's GRPO run
    python -m benchmarks.recovery --repeats 1 --out FOLDER

Measured from SIGKILL by the processes' own beacons: until the engine's successor has made a token, and until a new
trainer rank has finished an optimizer step that the killed one had not. The run goes on to its end.
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
from collections.abc import Callable
from pathlib import Path

from benchmarks.runner import ROOT
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny import make_tiny
from lockstep.watch.beacon import BeaconState, read_beacon, run_dir

BOUND_S = 300.0
GOALS = {"engine": 20.0, "trainer": 25.0}


class Demo:
    """The demo's second part, from an untrained model."""

    def __init__(self, folder: Path, steps: int) -> None:
        make_tiny(
            folder / "model", hidden=128, layers=2, heads=4, kv_heads=2, ffn=512, max_length=64,
            alphabet="0123456789=", seed=11,
        )  # fmt: skip
        python = sys.executable
        subprocess.run([python, ROOT / "examples" / "sort_data.py", folder / "data"], check=True, timeout=BOUND_S)
        self.run, self.log = folder / "sort-grpo", folder / "output.txt"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [python, "-c", "from lockstep.cli import app; app()", "train", *self.arguments(folder, steps)],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}, stdout=output, stderr=output,
            )  # fmt: skip

    def arguments(self, folder: Path, steps: int) -> list[str]:
        changes = {
            "folder": folder, "steps": steps, "model.path": folder / "model", "data.path": folder / "data/grpo.jsonl",
            "evaluation.data.path": folder / "data/eval.jsonl", "evaluation.prompts": 32, "report.html": "false",
            "trainer.schedule.kind": "constant", "recovery.policy.max_restarts": 99,
            "recovery.rollout.max_restarts": 99,
        }  # fmt: skip
        return [str(ROOT / "examples" / "grpo_sort.yaml"), *(f"{name}={value}" for name, value in changes.items())]

    def beacon(self, name: str) -> BeaconState | None:
        try:
            run = (self.run / "run-id").read_text().strip()
        except OSError:
            return None
        return read_beacon(run_dir(run) / f"{name}.beacon") if run else None

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

    def kill(self, name: str) -> float:
        state = self.beacon(name)
        assert state is not None
        os.kill(state.pid, signal.SIGKILL)
        return time.monotonic()


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for results.json and the run; a temporary one when absent")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lockstep-recovery-") as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        demo = Demo(folder, steps=12 * options.repeats + 10)
        try:
            found = measure(demo, options.repeats)
            code = demo.process.wait(BOUND_S)
        finally:
            demo.process.terminate()
        print("killed      median  longest     goal   what came back")
        what = {"engine": "a token of its successor", "trainer": "an optimizer step that was not there"}
        for who, seconds in found.items():
            middle, longest = statistics.median(seconds), max(seconds)
            print(f"{who:<8} {middle:>7.1f} s {longest:>6.1f} s {GOALS[who]:>6.0f} s   {what[who]}")
        with Ledger.reader(demo.run) as ledger:
            rows = [row.values for row in ledger.metrics_rows()]
        lost = sum(row.get("time/recovery_s", 0.0) + row.get("time/again_s", 0.0) for row in rows)
        print(f"exit code {code}; recovery took {lost:.1f} s of the run's steps, load {os.getloadavg()[0]:.1f}")
        if options.out is not None:
            (folder / "results.json").write_text(json.dumps({"seconds": found, "load": os.getloadavg()[0]}) + "\n")


if __name__ == "__main__":
    main()
