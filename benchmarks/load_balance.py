"""What re-balancing by measured speed gains on two ranks of which one has half a core:
`python -m benchmarks.load_balance`.

Rank 1 is stopped (SIGSTOP) for half of every ten milliseconds, as a CPU quota of such a period would do. A period
longer than the time between two collectives would show nothing: a rank would find its peer either stopped or at full
speed. A supervised run with `trainer.rank_speeds: measured` first measures the speeds. Then it is resumed, and in
every other step the ledger has equal speeds instead of the measured ones, so that both kinds of steps alternate in
one run, under the same load. `--share 1` slows nothing down: then the measured speeds are equal, and there is nothing
to compare.
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
from lockstep.ledger.rank_loads import SPEED_STEPS, measured_speeds
from lockstep.models.tiny_model import make_tiny
from lockstep.watch.beacon.reader import read_beacon

ROOT = Path(__file__).resolve().parent.parent
BOUND_S = 900.0
PERIOD_S = 0.01
MEASURED = 12
"""Steps in which the speeds are measured."""


@contextmanager
def slowed(run: Path, name: str, share: float) -> Iterator[None]:
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
                time.sleep(PERIOD_S * (1 - share))
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return
            time.sleep(PERIOD_S * share)

    thread = threading.Thread(target=stop_and_go, daemon=True)
    if share < 1:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def train(folder: Path, share: float, steps: int, resume: bool) -> None:
    """Makes the run, or resumes it, until so many steps are done."""
    run = folder / "run"
    settings = [
        "name=run", f"folder={folder}", f"model.path={folder / 'model'}", f"data.path={folder / 'data' / 'sft.jsonl'}",
        f"steps={steps}", "batch_size=128", "token_budget=2048", "trainer.threads=1", "trainer.rank_speeds=measured",
        "checkpoint.every=0", "checkpoint.export=false", "evaluation=null", "report.console=false",
    ]  # fmt: skip
    command = [sys.executable, "-m", "lockstep", "train", str(ROOT / "examples" / "sft_sort.yaml"), *settings]
    with slowed(run, "policy-1", share):
        command += ["--resume", str(run)] if resume else []
        subprocess.run(command, check=True, timeout=BOUND_S, env={**os.environ, "HF_HUB_OFFLINE": "1"}, cwd=ROOT)


def figures_of(run: Path, first: int, equal: bool) -> dict[str, Any]:
    """The figures of the steps from `first` on that were divided equally, or by speed."""
    with Ledger.reader(run) as ledger:
        seconds = {row.step: row.values["time/train_s"] for row in ledger.metrics_rows()}
        rows = [each for each in ledger.rank_loads("policy") if each.step >= first]
    loads = {each.step: each.loads for each in rows if each.loads is not None and (each.speeds == [1.0, 1.0]) == equal}
    tokens = [sum(each.tokens[rank] for each in loads.values()) for rank in (0, 1)]
    return {
        "steps": len(loads),
        "median train s": round(statistics.median(seconds[step] for step in loads), 4),
        "share of tokens": [round(each / sum(tokens), 3) for each in tokens],
        "median work s": [round(statistics.median(each.work_s[rank] for each in loads.values()), 4) for rank in (0, 1)],
        "median blocked s": [
            round(statistics.median(each.blocked_s[rank] for each in loads.values()), 4) for rank in (0, 1)
        ],
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--share", type=float, default=0.5, help="of a core that rank 1 has")
    options.add_argument("--pairs", type=int, default=16, help="of steps")
    options.add_argument("--save", type=Path, help="a JSON file for the figures")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny(
            folder / "model", hidden=256, layers=4, heads=4, kv_heads=2, ffn=1024, max_length=64,
            alphabet="0123456789=", seed=11,
        )  # fmt: skip
        data = [sys.executable, ROOT / "examples" / "sort_data.py", folder / "data"]
        subprocess.run(data, check=True, timeout=BOUND_S)
        train(folder, given.share, MEASURED, resume=False)
        with Ledger.resume(folder / "run") as ledger:
            speeds = measured_speeds(ledger.rank_loads("policy", SPEED_STEPS), 2)
            if speeds == [1.0, 1.0]:
                sys.exit("both ranks are equally fast: the work is divided equally in every step")
            for step in range(MEASURED, MEASURED + 2 * given.pairs):
                ledger.record_rank_speeds(step, "policy", speeds if step % 2 else [1.0, 1.0])
        train(folder, given.share, MEASURED + 2 * given.pairs, resume=True)
        equal, measured = (figures_of(folder / "run", MEASURED, kind) for kind in (True, False))
    figures = {
        "share of a core of rank 1": given.share, "speeds": speeds, "load": round(os.getloadavg()[0], 1),
        "equal": equal, "measured": measured,
        "ratio": round(measured["median train s"] / equal["median train s"], 3),
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if given.save is not None:
        given.save.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
