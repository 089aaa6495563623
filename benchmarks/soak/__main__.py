"""Counts the verdicts on healthy runs that are slowed down in many ways: `python -m benchmarks.soak`.

    python -m benchmarks.soak                        five minutes
    python -m benchmarks.soak --minutes 60 --seed 7 --out benchmarks/results/cpu/soak.jsonl
    python -m benchmarks.soak --sites --acts throttled slow_disk     bare jobs only, with these activities

Bare jobs (agent, supervisor, five processes without torch and two gloo ranks without Lockstep) and real GRPO runs (two
ranks, an engine, two scorers, an HTTP judge) run at the same time, on a machine that is loaded from time to time. Exit
code 1 if any process was confirmed to hang. Thresholds are short, so that a minute here is worth many at the defaults.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.soak.activities import ACTS, JUDGE, THROTTLE
from benchmarks.soak.bare_processes import Site
from benchmarks.soak.disturbances import Disturber
from benchmarks.soak.finding_counts import Tally, findings_table
from benchmarks.soak.http_judge import thinking
from benchmarks.soak.load import Load, cgroups
from benchmarks.soak.runs import Run
from lockstep.watch.diagnosis.verdict import StallThresholds

ROUND_S = 60.0


def main() -> None:
    options = arguments()
    patience = StallThresholds(notice_s=options.notice, still_s=options.floor)
    began, tallies = time.monotonic(), []
    with ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-soak-")))
        judge = stack.enter_context(thinking())
        environment = {JUDGE: judge, "SOAK_DISK": str(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
        environment |= stack.enter_context(cgroups(f"lockstep-soak-{os.getpid()}"))
        print(f"cgroups: {[name for name in environment if name in ('SOAK_QUOTA', 'SOAK_THROTTLE')]}", flush=True)
        chance, number = random.Random(options.seed), 0
        while time.monotonic() - began < 60 * options.minutes:
            number += 1
            left_s = 60 * options.minutes - (time.monotonic() - began)
            found = one_round(folder / str(number), patience, chance.randrange(1 << 30), environment, options, left_s)
            tallies += found
            said = "; ".join(
                f"{each.what}: {each.notices} notices, {each.silences.total()} silences, {len(each.wrong)} wrong"
                for each in found
            )
            print(f"{(time.monotonic() - began) / 60:6.1f} min  {said}", flush=True)
            if not any(each.wrong or each.troubles for each in found):
                shutil.rmtree(folder / str(number), ignore_errors=True)
    minutes = (time.monotonic() - began) / 60
    floors = {"notice_s": patience.notice_s, "still_s": patience.still_s}
    print(findings_table(tallies, minutes, floors, os.getloadavg()[0]))
    if options.out is not None:
        write(options.out, tallies, minutes, floors, options.seed)
    sys.exit(1 if any(each.wrong for each in tallies) else 0)


def one_round(
    folder: Path,
    patience: StallThresholds,
    seed: int,
    environment: dict[str, str],
    options: argparse.Namespace,
    left_s: float,
) -> list[Tally]:
    """Runs a GRPO run to its end and a bare job for as long; or only a bare job, for a minute."""
    site_tally, run_tally = Tally(f"site {seed}"), Tally(f"run {seed}")
    with ExitStack() as stack:
        folder.mkdir(parents=True)
        if not options.idle:
            stack.enter_context(Load(folder, seed))
        run = None if options.sites else stack.enter_context(
            Run(folder / "run", patience, seed, run_tally, environment)
        )  # fmt: skip
        site = stack.enter_context(
            Site(folder / "site", patience, seed, site_tally, environment, acts=options.acts, ranks=not options.acts)
        )  # fmt: skip

        def processes() -> Mapping[str, int]:
            of_run = {f"run {name}": pid for name, pid in run.process_ids().items()} if run is not None else {}
            return site.process_ids() | of_run

        disturber = stack.enter_context(Disturber(processes, patience.notice_s, seed, environment.get(THROTTLE)))
        end = time.monotonic() + min(ROUND_S, left_s)
        while time.monotonic() < end or (run is not None and not run.over()):
            site.soak(1.0)
    for tally, prefix in ((site_tally, ""), (run_tally, "run ")):
        tally.disturbed(disturber.done, disturber.late, prefix)
    return [site_tally] if run is None else [site_tally, run_tally]


def write(path: Path, tallies: Sequence[Tally], minutes: float, floors: Mapping[str, float], seed: int) -> None:
    """Append a line of JSON about this benchmark."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {
        "seed": seed, "minutes": round(minutes, 2), "floors": floors, "cores": os.cpu_count(),
        "at": time.strftime("%FT%TZ", time.gmtime()), "parts": [each.json() for each in tallies],
    }  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a line of JSON is added to this file")
    parser.add_argument("--notice", type=float, default=0.75, help="seconds (default 0.75)")
    parser.add_argument("--floor", type=float, default=4.0, help="confirmed after so many seconds (default 4)")
    parser.add_argument("--sites", action="store_true", help="bare sites only")
    parser.add_argument("--idle", action="store_true", help="no additional load")
    parser.add_argument("--acts", nargs="+", default=[], choices=sorted(ACTS), metavar="ACT", help="in bare sites")
    parser.add_argument("--keep", help="folder for the files of rounds with a confirmed verdict")
    return parser.parse_args()


if __name__ == "__main__":
    main()
