"""Generation ahead of training on the demo: the same run synchronously and one step ahead, with a core for each side.

    python -m benchmarks.staleness_demo --model runs/demo/sort-sft/export --data runs/demo/data

`script/demo` creates the model and the data. Engine and trainer rank have one thread each in both runs; with `--pin`
the engine is bound to one core and all other processes to another. The largest possible gain is (generation + rest) /
max(generation, rest)."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lockstep.ledger.ledger import Ledger
from lockstep.run.run_id import RUN_ID_FILE
from lockstep.watch.beacon.reader import read_beacons

WARM = 3
"""Number of first steps that are not counted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run."""

    max_staleness: int
    steps_per_s: float
    rollout_s: float
    """Mean time of a step in which the controller waited for completions."""
    step_s: float
    staleness: float
    accuracy: float
    """Accuracy at the end, on held-out prompts."""
    load: float


def command(model: Path, data: Path, folder: Path, steps: int, staleness: int) -> list[str]:
    return [
        sys.executable, "-m", "lockstep", "train", "examples/grpo_sort.yaml", f"folder={folder}",
        f"name=ahead-{staleness}", f"model.path={model}", f"data.path={data}/grpo.jsonl",
        f"evaluation.data.path={data}/eval.jsonl", "evaluation.every=0", "checkpoint.every=0",
        "checkpoint.export=false", "report.html=false", f"steps={steps}", "trainer.ranks=1", "trainer.threads=1",
        "rollout.engine.threads=1", f"rollout.max_staleness={staleness}",
    ]  # fmt: skip


def pin(run: Path, controller: int) -> bool:
    """Bind the engine to the first core of this process, and the others to the second. Returns whether all processes
    existed."""
    if not (run / RUN_ID_FILE).exists():
        return False
    first, second, *_ = sorted(os.sched_getaffinity(0))
    pids = {state.name: state.pid for state in read_beacons((run / RUN_ID_FILE).read_text().strip())}
    if not {"engine-0", "policy-0", "scorer-0"} <= set(pids):
        return False
    for name, pid in {**pids, "controller": controller}.items():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {first if name == "engine-0" else second})
    return True


def timed(model: Path, data: Path, folder: Path, steps: int, staleness: int, pinned: bool) -> Outcome:
    load = os.getloadavg()[0]
    run = folder / f"ahead-{staleness}"
    with (folder / f"ahead-{staleness}.log").open("wb") as log:
        process = subprocess.Popen(command(model, data, folder, steps, staleness), stdout=log, stderr=log)
        done = not pinned
        while process.poll() is None:
            done = done or pin(run, process.pid)
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit((folder / f"ahead-{staleness}.log").read_text())
    with Ledger.reader(run) as ledger:
        rows = [row.values for row in ledger.metrics_rows()][WARM:]
        accuracy = ledger.evaluations()[-1].metrics["eval/exact_match"]
    step_s = statistics.fmean(row["time/step_s"] for row in rows)
    rollout_s = statistics.fmean(row["time/rollout_s"] for row in rows)
    stale = statistics.fmean(row["rollout/staleness_mean"] for row in rows)
    return Outcome(staleness, 1 / step_s, rollout_s, step_s, stale, accuracy, load)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="what supervised fine-tuning has exported")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--pin", action="store_true", help="bind the engine to one core and the rest to another")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    options = parser.parse_args(arguments)
    found: list[Outcome] = []
    for _ in range(options.repeats):
        for staleness in (0, 1):
            with tempfile.TemporaryDirectory(prefix="lockstep-ahead-") as scratch:
                given = options.model.resolve(), options.data.resolve(), Path(scratch)
                found.append(timed(*given, options.steps, staleness, options.pin))
            print(found[-1], flush=True)
    sync, ahead = ([each for each in found if each.max_staleness == staleness] for staleness in (0, 1))
    gain = statistics.median(e.steps_per_s for e in ahead) / statistics.median(e.steps_per_s for e in sync)
    print(f"one step ahead: {gain:.2f}x the steps per second")
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in found], indent=2) + "\n")


if __name__ == "__main__":
    main()
