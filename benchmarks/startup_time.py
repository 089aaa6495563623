"""From the command to the first generated token, with a tiny model.

    python -m benchmarks.startup_time --model runs/demo/sort-sft/export --data runs/demo/data
    python -m benchmarks.startup_time --model runs/demo/sort-sft/export --data runs/demo/data cluster=ray
    rollout.engine=vllm

Starts `lockstep train` a few times, and reports when each process of the run appeared and when the engine's first token
was counted, in seconds from the start of the command. Arguments at the end are passed to the run: here it runs on Ray,
which is started if it is not running, and with vLLM.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.staleness_demo import command
from lockstep.run.run_id import RUN_ID_FILE
from lockstep.watch.beacon.reader import read_beacons

LIMIT_S = 300.0
FIRST = "first token"


def started(model: Path, data: Path, folder: Path, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Seconds until each process had a beacon, and until the first token."""
    run, found = folder / "ahead-0", dict[str, float]()
    with (folder / "log").open("wb") as log:
        began = time.monotonic()
        words = [*command(model, data, folder, 2, 0), *overrides]
        process = subprocess.Popen(words, stdout=log, stderr=log)
        while FIRST not in found and time.monotonic() - began < LIMIT_S and process.poll() is None:
            if (run / RUN_ID_FILE).exists():
                for state in read_beacons((run / RUN_ID_FILE).read_text().strip()):
                    found.setdefault(state.name, time.monotonic() - began)
                    tokens = state.counters.get("tokens")
                    if state.name == "engine-0" and tokens is not None and tokens.value:
                        found[FIRST] = time.monotonic() - began
            time.sleep(0.01)
        process.wait(LIMIT_S)
    if FIRST not in found:
        raise SystemExit((folder / "log").read_text())
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="of the run's config, as `cluster=ray`")
    options = parser.parse_args(arguments)
    model, data = options.model.resolve(), options.data.resolve()
    runs = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="lockstep-start-") as scratch:
            runs.append(started(model, data, Path(scratch), options.overrides))
    for name in sorted(runs[0], key=runs[0].__getitem__):
        print(f"{statistics.median(each[name] for each in runs if name in each):6.2f} s  {name}")


if __name__ == "__main__":
    main()
