"""Compares the speed of two checkouts of Lockstep, to check that a change costs no speed.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.revisions /tmp/before                  every workload, five repeats
    python -m benchmarks.revisions /tmp/before fixed sft        some of them

Both checkouts run in this environment, each from its own sources, one repeat after the other in turns; the first side
alternates. Compare only ratios within one run: medians of CPU seconds and of wall time per step.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.resource_usage import usage
from benchmarks.runner import ROOT, environment, ordered
from benchmarks.side_process import SideProcess
from benchmarks.workloads import MODEL, TOY, WORKS, Side, Work, quick
from lockstep.models.tiny_model import TinyModel

LIMIT = 1.03
"""A change that should cost nothing may have at most this median ratio."""


@dataclass(frozen=True, slots=True)
class Pair:
    """CPU and wall seconds per step of one repeat: this checkout and the other."""

    cpu_s: tuple[float, float]
    wall_s: tuple[float, float]


def measure(work: Work, roots: Sequence[Path], repeats: int, scratch: Path, model: TinyModel) -> list[Pair]:
    """Run repeats of a workload from both checkouts in turns."""
    side = work.sides[0]
    steps = 2 + repeats * side.steps
    with ExitStack() as stack:
        processes = []
        for number, root in enumerate(roots):
            folder = scratch / work.name / str(number)
            command = ordered(work, side, folder, steps, model)
            process = SideProcess(command, _environment(side, root), folder.with_suffix(".log"))
            processes.append(stack.enter_context(process))
            process.ready()
            process.go(1)
        return [_repeat(processes, side, flipped=bool(repeat % 2)) for repeat in range(repeats)]


def _repeat(processes: Sequence[SideProcess], side: Side, flipped: bool) -> Pair:
    spent: dict[int, tuple[float, float]] = {}
    for index in (1, 0) if flipped else (0, 1):
        before, began = usage(processes[index].pid), time.monotonic()
        processes[index].go(side.steps)
        wall, cpu = time.monotonic() - began, usage(processes[index].pid).cpu_s - before.cpu_s
        spent[index] = (cpu / side.steps, wall / side.steps)
    return Pair((spent[0][0], spent[1][0]), (spent[0][1], spent[1][1]))


def _environment(side: Side, root: Path) -> dict[str, str]:
    """The workload's environment, with the sources and benchmarks of one checkout before everything installed."""
    path = [str(root / "src"), str(root), os.environ.get("PYTHONPATH", "")]
    return environment(side) | {"PYTHONPATH": os.pathsep.join(part for part in path if part), "PYTHONSAFEPATH": "1"}


def row(work: Work, pairs: Sequence[Pair]) -> str:
    """One line of the table, in Markdown."""
    cpu = statistics.median(pair.cpu_s[0] / pair.cpu_s[1] for pair in pairs)
    wall = statistics.median(pair.wall_s[0] / pair.wall_s[1] for pair in pairs)
    this, other = (statistics.median(pair.cpu_s[side] for pair in pairs) for side in (0, 1))
    met = "yes" if cpu <= LIMIT else "**no**"
    return f"| {work.title} | {this:.3f} | {other:.3f} | {cpu:.3f} | {wall:.3f} | {met} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("works", nargs="*", metavar="WORK", choices=[[], *WORKS], help=f"of {', '.join(WORKS)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one tiny repeat of everything")
    options = parser.parse_args()
    works = [WORKS[name] for name in options.works or WORKS]
    model, repeats = (TOY, 1) if options.quick else (MODEL, options.repeats)
    lines = [
        "| workload | CPU s a step, this | other | median ratio CPU | wall | at most 1.03 |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(prefix="lockstep-revisions-") as scratch:
        for work in works:
            pairs = measure(
                quick(work) if options.quick else work, (ROOT, options.other.resolve()), repeats, Path(scratch), model
            )
            lines.append(row(work, pairs))
            print(lines[-1], file=sys.stderr, flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
