"""The gain of `rollout.max_staleness`: the same run with generation 0, 1 and 2 steps ahead of training, in turns.

A run's first step has nothing to overlap with and its last steps nothing left to generate, so whole runs are timed,
from the first step's beginning to the last one's end: each generates and trains the same number of steps. Engine and
trainer have one thread each.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.comparison_table import Line, markdown_head
from benchmarks.resource_usage import usage
from benchmarks.runner import Tell, environment, ordered, write
from benchmarks.side_process import SideProcess
from benchmarks.workloads import MODEL, TOY, WORKS, Side, Work, quick
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import TinyModel

STALENESS = (0, 1, 2)
STEPS = 12
WORK_NAMES = ("fixed", "tail")


@dataclass(frozen=True, slots=True)
class Timed:
    """The measurements of one run."""

    ahead: str
    """Name of the workload."""
    max_staleness: int
    repeat: int
    steps: int
    wall_s: float
    cpu_s: float
    """CPU seconds of all processes of the run."""
    load: float
    """Load average over the last minute, as the run began."""
    staleness: float
    """Mean of `rollout/staleness_mean` over the steps."""
    ready: float
    """Mean of `rollout/ready`: share of completions that were finished when their step began."""


def run_ahead(repeats: int, scratch: Path, record: Path, tell: Tell, small: bool = False) -> None:
    """Time the runs; append a line of JSON for each to `record`."""
    steps, model = (3, TOY) if small else (STEPS, MODEL)
    works = [WORKS[name] for name in WORK_NAMES]
    for work in [quick(work) for work in works] if small else works:
        for repeat in range(repeats):
            for staleness in STALENESS:
                own = scratch / f"{work.name}-{repeat}-{staleness}"
                got = timed(work, staleness, repeat, steps, own, model)
                write(record, asdict(got))
                tell(
                    f"{work.name}, max_staleness {staleness}, {repeat + 1}/{repeats}: {got.wall_s / steps:.2f} s wall, "
                    f"{got.cpu_s / steps:.2f} CPU s a step, {got.ready:.0%} ready, load {got.load:.1f}"
                )


def timed(work: Work, staleness: int, repeat: int, steps: int, folder: Path, model: TinyModel = MODEL) -> Timed:
    """Time a run in a separate process, from its first step to its last."""
    side = Side(f"ahead {staleness}", "lockstep", {"rollout": {"max_staleness": staleness}})
    command = ordered(work, side, folder, steps, model)
    load = os.getloadavg()[0]
    with SideProcess(command, environment(side), folder.with_suffix(".log")) as process:
        process.ready()
        before, began = usage(process.pid), time.monotonic()
        process.go(steps)
        wall, after = time.monotonic() - began, usage(process.pid)
    with Ledger.reader(folder / "lockstep" / "run") as ledger:
        rows = [row.values for row in ledger.metrics_rows()]
    means = [
        statistics.fmean(row.get(name, 0.0) for row in rows) for name in ("rollout/staleness_mean", "rollout/ready")
    ]
    return Timed(work.name, staleness, repeat, steps, wall, after.cpu_s - before.cpu_s, load, *means)


def ahead_table(lines: Sequence[Line]) -> list[str]:
    """A line per workload and staleness: medians over the repeats, with the wall time relative to that of staleness
    0."""
    mine = [line for line in lines if "ahead" in line]
    if not mine:
        return []
    out = markdown_head(
        "workload", "`max_staleness`", "wall s / step", "against 0", "CPU s / step", "ready", "staleness", "repeats"
    )
    for name in dict.fromkeys(line["ahead"] for line in mine):
        for staleness in STALENESS:
            found = [line for line in mine if (line["ahead"], line["max_staleness"]) == (name, staleness)]
            first = [line for line in mine if (line["ahead"], line["max_staleness"]) == (name, 0)]
            if not found or not first:
                continue
            wall, base, cpu = _median(found, "wall_s"), _median(first, "wall_s"), _median(found, "cpu_s")
            ready, stale = (statistics.median(line[key] for line in found) for key in ("ready", "staleness"))
            out.append(
                f"| {WORKS[name].title} | {staleness} | {wall:.2f} | {base / wall:.2f}x | {cpu:.2f} | {ready:.0%} | "
                f"{stale:.2f} | {len(found)} |"
            )
    return out


def _median(lines: Sequence[Line], what: str) -> float:
    return statistics.median(line[what] / line["steps"] for line in lines)
