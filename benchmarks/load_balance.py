"""What re-balancing by measured speed gains on two ranks of which one has half a core:
`python -m benchmarks.load_balance`.

The same supervised run is made with `trainer.rank_speeds: equal` and with `measured`, in turn. Rank 1 is stopped
(SIGSTOP) for half of every period, as a CPU quota would do. Compared are the medians of the steps' training times after
the first ones, in which speeds are not measured yet, and what each rank was given and how long it waited. `--share 1`
slows nothing down: then both should be alike.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.base.folders import run_shm_dir
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import make_tiny
from lockstep.watch.beacon.reader import read_beacon

ROOT = Path(__file__).resolve().parent.parent
BOUND_S = 900.0
WARM_UP = 8
"""Steps that are left out."""


@contextmanager
def slowed(run: Path, name: str, share: float, period_s: float = 0.1) -> Iterator[None]:
    """Lets a process of a run work for a share of the time only."""
    ended = threading.Event()

    def stop_and_go() -> None:
        pid = None
        while not ended.is_set():
            if pid is None:
                time.sleep(0.05)
                with suppress(OSError):
                    beacon = read_beacon(run_shm_dir((run / "run-id").read_text().strip()) / f"{name}.beacon")
                    pid = None if beacon is None or beacon.stage != "train" else beacon.pid
                continue
            try:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(period_s * (1 - share))
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return
            time.sleep(period_s * share)

    thread = threading.Thread(target=stop_and_go, daemon=True)
    if share < 1:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def train(folder: Path, speeds: str, share: float, steps: int) -> dict[str, Any]:
    """Makes one run and returns its figures."""
    run = folder / speeds
    settings = [
        f"name={run.name}", f"folder={folder}", f"model.path={folder.parent / 'model'}",
        f"data.path={folder.parent / 'data' / 'sft.jsonl'}", f"steps={steps}", "batch_size=128", "token_budget=2048",
        "trainer.threads=1", f"trainer.rank_speeds={speeds}", "checkpoint.every=0", "checkpoint.export=false",
        "evaluation=null", "report.console=false",
    ]  # fmt: skip
    command = [sys.executable, "-m", "lockstep", "train", str(ROOT / "examples" / "sft_sort.yaml"), *settings]
    with slowed(run, "policy-1", share):
        subprocess.run(command, check=True, timeout=BOUND_S, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=ROOT)
    with Ledger.reader(run) as ledger:
        seconds = [row.values["time/train_s"] for row in ledger.metrics_rows()][WARM_UP:]
        loss = [row.values["policy/loss"] for row in ledger.metrics_rows()][-1]
        rows = [each for each in ledger.rank_loads("policy") if each.loads is not None][WARM_UP:]
    loads = [each.loads for each in rows if each.loads is not None]
    tokens = [sum(each.tokens[rank] for each in loads) for rank in (0, 1)]
    return {
        "median train s": round(statistics.median(seconds), 4),
        "share of tokens": [round(each / sum(tokens), 3) for each in tokens],
        "median work s": [round(statistics.median(each.work_s[rank] for each in loads), 4) for rank in (0, 1)],
        "median blocked s": [round(statistics.median(each.blocked_s[rank] for each in loads), 4) for rank in (0, 1)],
        "last loss": round(loss, 6),
        "speeds": rows[-1].speeds,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--share", type=float, default=0.5, help="of a core that rank 1 has")
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--steps", type=int, default=32)
    options.add_argument("--save", type=Path, help="a JSON file for the figures")
    given = options.parse_args()
    figures: dict[str, Any] = {"share of a core of rank 1": given.share, "steps": given.steps, "pairs": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(
            folder / "model", hidden=256, layers=4, heads=4, kv_heads=2, ffn=1024, max_length=64,
            alphabet="0123456789=", seed=11,
        )  # fmt: skip
        subprocess.run(
            [sys.executable, ROOT / "examples" / "sort_data.py", folder / "data"], check=True, timeout=BOUND_S
        )
        for number in range(given.pairs):
            kinds = ("equal", "measured") if number % 2 == 0 else ("measured", "equal")
            pair = {kind: train(folder / str(number), kind, given.share, given.steps) for kind in kinds}
            pair["ratio"] = round(pair["measured"]["median train s"] / pair["equal"]["median train s"], 3)
            pair["load"] = round(os.getloadavg()[0], 1)
            print(json.dumps(pair))
            figures["pairs"].append(pair)
            figures["ratio"] = round(statistics.median(each["ratio"] for each in figures["pairs"]), 3)
            if given.save is not None:
                given.save.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"step time with trainer.rank_speeds measured: {figures['ratio']} of that with equal")


if __name__ == "__main__":
    main()
