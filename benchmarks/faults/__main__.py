"""Runs random faults on real ranks under a real agent and supervisor, and prints their verdicts. The ranks use gloo, or
a backend that behaves like NCCL on the CPU.

    python -m benchmarks.faults --cases 200 --seed 1          about ten minutes
    python -m benchmarks.faults --cases 200 --seed 1 --resume continues a stopped record
    python -m benchmarks.faults --backend emulated_nccl
    python -m benchmarks.faults --table                       the tables of the recorded cases
    python -m benchmarks.faults --only skips extra --cases 20

One JSON line per case is appended to the file; folders of cases with wrong verdicts are kept. The supervisor gives a
notice after 1 s and confirms after 2.5 s of inactivity, so that a case takes seconds.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.docs_markers import into_page
from benchmarks.faults.case_runner import run
from benchmarks.faults.cases import BACKENDS, FAULTS, cases
from benchmarks.faults.emulated_nccl import NAME as EMULATED_NCCL
from benchmarks.faults.grading import judge, matrix, numbers, wrong
from benchmarks.runner import ROOT, read, write

RESULTS = ROOT / "benchmarks" / "results" / "cpu"
RECORDS = {"gloo": "faults", EMULATED_NCCL: "faults-emulated-nccl"}
"""For each backend, the name of its record and of its place in the docs."""
WRONG = "\nwrong:"


def main() -> None:
    options = arguments()
    done = read(options.out)
    if done and not (options.resume or options.table):
        raise SystemExit(f"{options.out} has {len(done)} cases already: go on with --resume, or name another --out")
    if not options.table:
        known = {each["case"]["name"] for each in done}
        drawn = cases(options.seed, options.cases, options.only, options.backend)
        wanted = [each for each in drawn if each.name not in known]
        scratch = Path(tempfile.mkdtemp(prefix="lockstep-faults-"))
        began = time.monotonic()
        with ThreadPoolExecutor(options.jobs) as pool:
            futures = {pool.submit(run, each, scratch / each.name): each for each in wanted}
            for future in as_completed(futures):
                case, outcome = futures[future], future.result().json()
                write(options.out, outcome)
                done.append(outcome)
                said = wrong([judge(outcome)])
                if not said:
                    shutil.rmtree(scratch / case.name, ignore_errors=True)
                print(f"{time.monotonic() - began:6.0f} s  {case.name} {case.fault}: {said or 'right'}", flush=True)
    text = report(done)
    print(text)
    if options.docs:
        into_page(options.docs, text.split(WRONG)[0].strip(), RECORDS[options.backend])


def report(done: Sequence[dict[str, Any]]) -> str:
    """The tables in Markdown, and the wrong verdicts."""
    judged = [judge(each) for each in done]
    loads = sorted(each.load for each in judged) or [0.0]
    load = f"Load of the machine: {loads[0]:.1f} to {loads[-1]:.1f}, median {loads[len(loads) // 2]:.1f}."
    said = "\n".join(wrong(judged)) or "nothing was wrong"
    return f"{matrix(judged)}\n\n{numbers(judged)}\n\n{load}\n{WRONG}\n{said}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=len(FAULTS), help="default: one of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=(), choices=tuple(FAULTS), metavar="KIND")
    parser.add_argument("--backend", default="gloo", choices=BACKENDS)
    parser.add_argument("--jobs", type=int, default=2, help="cases at once (default 2)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: the record of the backend")
    parser.add_argument("--resume", action="store_true", help="leave out the cases that FILE has already")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="put the tables into this page, between its markers")
    options = parser.parse_args()
    options.out = options.out or RESULTS / f"{RECORDS[options.backend]}.jsonl"
    return options


if __name__ == "__main__":
    main()
