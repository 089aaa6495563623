"""When a run, and each of its processes, was in which stage: the bars of the dashboard's Gantt chart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.report.dashboard.metric_history import MetricHistory
from lockstep.report.timeline_capture_reader import capture_files, read_timeline

MOST_SPANS = 4000
"""Spans of one answer; neighbours are merged beyond."""
CAPTURED_BYTES = 64 << 20
"""Of the newest captures, how much is read."""
NEWEST_STEPS = 20
"""Without a time, those of the newest steps are shown."""
NO_STAGES = ("step", "recovery", "again")
"""Durations in the metrics that are none of a stage."""
CLOCK = "at"
"""The column with the end of each step, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class StageSpan:
    """A process, or the whole run, was in a stage. Times are seconds since the epoch."""

    stage: str
    start: float
    end: float
    state: str = "done"
    """`done`, `running`, or `merged`: several of them, named after the stage that took most of the time."""
    count: int = 1


@dataclass(frozen=True, slots=True)
class StageRow:
    """The spans of one process, by their start."""

    name: str
    role: str
    rank: int | None
    spans: Sequence[StageSpan]


def shown_times(clock: MetricHistory, start: float | None, end: float | None, now: float) -> tuple[float, float]:
    """The times to show: those asked for, or those of the newest steps and what follows."""
    _, ends = clock.arrays(CLOCK)
    if start is None:
        start = float(ends[-NEWEST_STEPS - 1]) if len(ends) > NEWEST_STEPS else 0.0
    return start, now if end is None else end


def run_row(metrics: MetricHistory, clock: MetricHistory, start: float, end: float, most: int) -> StageRow:
    """The stages of the controller: those of each step one after another, as the ledger has only their durations.

    Args:
        clock: the end of each step.
        start, end: the times to show.
    """
    steps, ends = clock.arrays(CLOCK)
    names = [name for name in metrics.names if name.startswith("time/") and name.endswith("_s")]
    stages = [name.removeprefix("time/").removesuffix("_s") for name in names]
    names = [name for name, stage in zip(names, stages, strict=True) if stage not in NO_STAGES]
    stages = [stage for stage in stages if stage not in NO_STAGES]
    if not names:
        return StageRow("run", "run", None, ())
    first, last = int(np.searchsorted(ends, start, "left")), int(np.searchsorted(ends, end, "right")) + 1
    steps, ends = steps[first:last], ends[first:last]
    durations = np.zeros((len(names), len(steps)))
    for row, name in enumerate(names):
        known, values = metrics.arrays(name)
        _, here, there = np.intersect1d(steps, known, assume_unique=True, return_indices=True)
        durations[row, here] = np.nan_to_num(values[there], nan=0.0, posinf=0.0, neginf=0.0).clip(0.0)
    begins = ends - durations.sum(axis=0)
    size = max(1, -(-int((durations > 0).sum()) // max(1, most)))
    if size > 1:  # whole steps are merged: the order of stages within one says nothing any more
        size = -(-len(steps) // max(1, most))
        spans = [
            _merged_steps(stages, durations[:, at : at + size], begins[at : at + size], ends[at : at + size])
            for at in range(0, len(steps), size)
        ]
    else:
        starts = begins + np.vstack([np.zeros(len(steps)), durations.cumsum(axis=0)[:-1]])
        spans = [
            StageSpan(stages[row], float(starts[row, at]), float(starts[row, at] + durations[row, at]))
            for at in range(len(steps))
            for row in np.flatnonzero(durations[:, at] > 0).tolist()
        ]
    return StageRow("run", "run", None, [each for each in spans if each.end >= start and each.start <= end])


def _merged_steps(stages: Sequence[str], durations: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> StageSpan:
    longest = int(durations.sum(axis=1).argmax())
    return StageSpan(stages[longest], float(begins[0]), float(ends[-1]), "merged", int((durations > 0).sum()))


def merged_spans(spans: Sequence[StageSpan], most: int) -> Sequence[StageSpan]:
    """At most `most` spans: neighbours become one, named after the stage that took most of their time."""
    if len(spans) <= most:
        return spans
    found, size = [], -(-len(spans) // max(1, most))
    for at in range(0, len(spans), size):
        part = spans[at : at + size]
        seconds: dict[str, float] = {}
        for each in part:
            seconds[each.stage] = seconds.get(each.stage, 0.0) + each.end - each.start
        stage = max(seconds, key=lambda name: seconds[name])
        count = sum(each.count for each in part)
        found.append(StageSpan(stage, part[0].start, max(each.end for each in part), "merged", count))
    return found


def gantt(run: StageRow, processes: Sequence[StageRow], clock: MetricHistory, most: int = MOST_SPANS) -> dict[str, Any]:
    """The rows and their spans as JSON; `row` of a span counts rows from 0."""
    rows = [row for row in (run, *processes) if row.spans]
    left = max(len(processes), most - len(run.spans))
    share = max(1, left // max(1, len(processes)))
    steps, ends = clock.arrays(CLOCK)
    spans = []
    for number, row in enumerate(rows):
        kept = row.spans if row is run else merged_spans(row.spans, share)
        middles = np.array([(each.start + each.end) / 2 for each in kept])
        done = np.searchsorted(ends, middles, "left")
        for each, place in zip(kept, done.tolist(), strict=True):
            step = int(steps[place]) if place < len(steps) else (int(steps[-1]) if len(steps) else 0) + 1
            more = {"count": each.count} if each.count > 1 else {}
            spans.append({
                "row": number, "stage": each.stage, "step": step, "start": round(each.start, 4),
                "end": round(each.end, 4), "state": each.state, **more,
            })  # fmt: skip
    names = [{"role": row.role, "name": row.name} | ({} if row.rank is None else {"rank": row.rank}) for row in rows]
    return {"rows": names, "spans": spans}


class CapturedStages:
    """The stages of processes in the captured timelines of a run, which are read again when there are others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, tuple[tuple[int, int], list[StageRow]]] = {}

    def rows(self) -> list[StageRow]:
        """The stages in the newest captures, by process."""
        chosen: dict[Path, tuple[int, int]] = {}
        left = CAPTURED_BYTES
        for file in reversed(_existing(capture_files(self._folder))):
            facts = file.stat()
            left -= facts.st_size
            if left < 0:
                break
            chosen[file] = facts.st_mtime_ns, facts.st_size
        self._read = {file: each for file, each in self._read.items() if chosen.get(file) == each[0]}
        for file, signature in chosen.items():
            if file not in self._read:
                self._read[file] = signature, _captured(file)
        return joined_rows(row for _, rows in self._read.values() for row in rows)


def joined_rows(rows: Iterable[StageRow]) -> list[StageRow]:
    """One row per process, by role and rank. A span that several captures have is taken once."""
    first: dict[str, StageRow] = {}
    spans: dict[str, dict[tuple[str, int], StageSpan]] = {}
    for row in rows:
        first.setdefault(row.name, row)
        known = spans.setdefault(row.name, {})
        for each in row.spans:
            key = each.stage, round(each.start * 50)
            if key not in known or known[key].state == "running":
                known[key] = each
    joined = [
        StageRow(row.name, row.role, row.rank, sorted(spans[name].values(), key=lambda each: each.start))
        for name, row in first.items()
    ]
    return sorted(joined, key=lambda row: (row.role, row.rank if row.rank is not None else -1, row.name))


def within(rows: Iterable[StageRow], start: float, end: float) -> list[StageRow]:
    """The rows with what they did between two times."""
    found = []
    for row in rows:
        spans = [each for each in row.spans if each.end >= start and each.start <= end]
        if spans:
            found.append(StageRow(row.name, row.role, row.rank, spans))
    return found


def _captured(file: Path) -> list[StageRow]:
    try:
        timeline = read_timeline([file])
    except (OSError, ValueError):  # no capture, or one that was removed meanwhile
        return []
    return [
        StageRow(
            each.name, each.role, each.rank,
            [
                StageSpan(one.name, one.began_ns / 1e9, one.ended_ns / 1e9)
                for one in each.slices
                if one.track == "stages"
            ],
        )
        for each in timeline.processes
    ]  # fmt: skip


def _existing(files: Iterable[Path]) -> list[Path]:
    return [file for file in files if file.is_file()]
