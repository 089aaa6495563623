"""Runs real runs with a fault in every tenth step, for as long as given: `python -m benchmarks.endurance`.

    python -m benchmarks.endurance --hours 6                        continues benchmarks/results/cpu/endurance.jsonl
    python -m benchmarks.endurance --hours 1 --record FILE          a file of its own; any machine continues it
    python -m benchmarks.endurance --only 3                         one episode, without a line in the file
    python -m benchmarks.endurance --schedule 24                    the faults of the next episodes, and nothing else
    python -m benchmarks.endurance --table                          what the file says

GRPO, PPO, DPO and GRPO with images; local processes, Ray, and Ray on two hosts; FSDP2 and DeepSpeed. An episode is a
run of 100 steps with nine faults beside the same run without any. Seed and number of an episode decide its faults. What
cannot be made on a machine (most faults of disks and hosts need root) is reported as skipped. SIGTERM or Ctrl-C ends
the benchmark at once, and the interrupted episode is run again by the next one. Exit code 1 if an expectation was not
met; the runs' folders are in FOLDER/failures with what `lockstep explain` says.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from benchmarks.endurance.disturbed_run import Stopped
from benchmarks.endurance.episodes import run_episode
from benchmarks.endurance.record import Record
from benchmarks.endurance.schedule import episode
from benchmarks.endurance.settings import prepare
from benchmarks.endurance.summary import summary
from benchmarks.runner import ROOT

RECORD = ROOT / "benchmarks" / "results" / "cpu" / "endurance.jsonl"
SEED = 72


def main() -> None:
    options = arguments()
    record = Record(options.record)
    seed = record.seed if record.seed is not None else options.seed
    if options.table:
        print("\n".join(summary(record.lines)))
        return
    if options.schedule:
        for number in range(record.next_episode, record.next_episode + options.schedule):
            each = episode(seed, number)
            faults = ", ".join(f"{step} {fault.name}" for step, fault in each.faults)
            print(f"episode {number} {each.variant.name} (seed {each.seed}): {faults}")
        return
    sys.exit(endure(record, seed, options))


def endure(record: Record, seed: int, options: argparse.Namespace) -> int:
    """Run episodes; the exit code."""
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stopping.append(number))
    began, end = time.monotonic(), time.monotonic() + 3600 * options.hours
    home: Path = options.folder.resolve()
    home.mkdir(parents=True, exist_ok=True)
    prepare(home)
    if options.only is None:
        record.open(seed)
    bad = 0
    while time.monotonic() < end and not stopping:
        each = episode(seed, record.next_episode if options.only is None else options.only)

        def tell(text: str, name: str = f"episode {each.number} {each.variant.name}") -> None:
            print(f"{(time.monotonic() - began) / 60:6.1f} of {60 * options.hours:g} min  {name}: {text}", flush=True)

        try:
            line = run_episode(each, home, tell, lambda: bool(stopping))
        except Stopped:
            tell("stopped; the next benchmark runs this episode again")
            break
        if options.only is None:
            record.append(line)
        bad += bool(line.get("failures"))
        tell(said(line))
        if options.only is not None:
            break
    return 1 if bad else 0


def said(line: dict[str, object]) -> str:
    """The end of an episode, in a few words."""
    if "skipped" in line:
        return f"skipped, {line['skipped']}"
    failures = line["failures"]
    assert isinstance(failures, list)
    if failures:
        return "NOT AS EXPECTED: " + "; ".join(f"{each['expectation']}: {each['found']}" for each in failures)
    return f"as expected, in {line['wall_s']} s"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.endurance", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--hours", type=float, default=1.0, help="no episode begins later (default 1)")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE", help="results, and where to continue")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "endurance", help="models, runs and failures")
    parser.add_argument("--seed", type=int, default=SEED, help=f"of a new file (default {SEED})")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run this episode and write no line")
    parser.add_argument("--schedule", type=int, metavar="COUNT", help="print the next episodes")
    parser.add_argument("--table", action="store_true", help="print the summary of the file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
