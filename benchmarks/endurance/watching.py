"""What is measured of a run from outside: growth of its processes, verdicts on the innocent, equal weights."""

import itertools
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import load_file

from benchmarks.launched_run import LaunchedRun
from lockstep.ledger.ledger import Ledger

EVERY_S = 0.25
FEWEST = 40
"""Samples of a process in the last half of a run; with fewer its growth is not judged."""
MORE_MEMORY, MORE_BYTES, MORE_FILES = 0.05, 16 << 20, 2
"""Growth from the third quarter of a run to the last that counts as growth: of memory by both, and of open files."""
CLOSE = 1e-5
NEW = "told"
"""The change of an event that begins a verdict."""


@dataclass
class _Samples:
    at: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)


class Growth:
    """Samples memory and open files of all processes of a run, from a thread."""

    def __init__(self, run: LaunchedRun) -> None:
        self.run = run
        self._samples: dict[tuple[str, int], _Samples] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._go, daemon=True)

    def __enter__(self) -> "Growth":
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(30)

    def _go(self) -> None:
        while not self._end.wait(EVERY_S):
            for state in self.run.beacons():
                try:
                    process = psutil.Process(state.pid)
                    memory, files = process.memory_info().rss, process.num_fds()
                except psutil.Error:
                    continue
                samples = self._samples.setdefault((state.name, state.pid), _Samples())
                samples.at.append(time.monotonic())
                samples.memory.append(memory)
                samples.files.append(files)

    def found(self) -> list[dict[str, Any]]:
        """Growth of each process that lived for the last half of the run: of the median of the last quarter over that
        of the third, in bytes and files."""
        end = max((each.at[-1] for each in self._samples.values()), default=0.0)
        half, quarter = (end - (end - self._began) * share for share in (0.5, 0.25))
        rows = []
        for (name, _), each in self._samples.items():
            third = [i for i, at in enumerate(each.at) if half <= at < quarter]
            last = [i for i, at in enumerate(each.at) if at >= quarter]
            if len(third) + len(last) < FEWEST or each.at[0] > half or each.at[-1] < end - 5.0:
                continue
            memory = [statistics.median(each.memory[i] for i in part) for part in (third, last)]
            files = [statistics.median(each.files[i] for i in part) for part in (third, last)]
            rows.append(
                {"process": name, "memory": int(memory[0]), "more_memory": int(memory[1] - memory[0]),
                 "files": int(files[0]), "more_files": int(files[1] - files[0])}
            )  # fmt: skip
        return rows


def grown(disturbed: Sequence[dict[str, Any]], undisturbed: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The processes of a run with faults and of the one without that grew in their last half. Files count beyond those
    of the same process in the run without faults: a controller that has lost a host has fewer until it has another."""
    usual = {row["process"]: row["files"] for row in undisturbed}
    rows = [(row, max(row["files"], usual.get(row["process"], 0))) for row in disturbed]
    rows += [(row, row["files"]) for row in undisturbed]
    return [row for row, files in rows if _grows(row, files)]


def _grows(row: dict[str, Any], files: int) -> bool:
    more = row["more_memory"]
    much = more > MORE_BYTES and more > MORE_MEMORY * row["memory"]
    return much or row["files"] + row["more_files"] > files + MORE_FILES


@dataclass(frozen=True, slots=True)
class Accusable:
    """The processes that verdicts may name because of a fault."""

    at: float
    """Wall time, in the run's processes, of the fault, and of the moment when its effects were over."""
    until: float
    names: tuple[str, ...]


def stalls(run: Path) -> list[dict[str, Any]]:
    """The supervisor's confirmed verdicts."""
    with Ledger.reader(run) as ledger:
        found = [event.fields for event in ledger.events() if event.kind == "stall"]
    return [each for each in found if each["level"] == "confirmed" and each["change"] != "withdrawn"]


def false_alarms(found: Sequence[dict[str, Any]], accusable: Sequence[Accusable]) -> list[str]:
    """Confirmed verdicts that name a process to which no fault was done, or a death more often than it was caused."""
    wrong, deaths = list[str](), Counter[str]()
    for each in found:
        near = [i for i, one in enumerate(accusable) if one.at - 1 <= each["said_at"] <= one.until + 15]
        allowed = {name for i in near for name in accusable[i].names}
        innocent = sorted(set(each["who"]) - allowed)
        if innocent:
            wrong.append(f"{', '.join(innocent)}: {each['text']}")
        elif each["change"] == NEW and each["verdict"] == "dead":
            deaths.update(each["who"])
            before = accusable[: near[-1] + 1]  # by order, since a fault moves the clock that dates them
            faults = Counter(name for one in before for name in one.names)
            again = sorted(name for name in each["who"] if deaths[name] > faults[name])
            wrong += [f"once more {', '.join(again)}: {each['text']}"] if again else []
    return wrong


def seconds_until_named(found: Sequence[dict[str, Any]], fault: Accusable) -> float | None:
    """From a fault to the confirmed verdict that names its process; None without one."""
    times = [
        each["said_at"] - fault.at
        for each in found
        if set(each["who"]) & set(fault.names) and fault.at - 1 <= each["said_at"] <= fault.until + 15
    ]
    return round(max(0.0, min(times)), 3) if times else None


def missing_steps(run: Path, steps: int) -> list[int]:
    """Steps without a row of metrics, or with more than one."""
    with Ledger.reader(run) as ledger:
        rows = [row.step for row in ledger.metrics_rows()]
    return [step + 1 for step in range(steps) if rows.count(step) != 1]


def typical_step_s(run: Path) -> float:
    """The median time from one commit to the next: what a step takes on this machine while nothing is wrong. Faults,
    and jumps of the clock by which commits are dated, are in few of them."""
    with Ledger.reader(run) as ledger:
        at = [row.at for row in ledger.commits()]
    return statistics.median(after - before for before, after in itertools.pairwise(at))


def used_prompts(run: Path) -> dict[str, int]:
    with Ledger.reader(run) as ledger:
        return ledger.prompts_used()


def recovery_events(run: Path) -> list[dict[str, Any]]:
    with Ledger.reader(run) as ledger:
        return [event.fields for event in ledger.events() if event.kind == "recovery"]


def difference(run: Path, other: Path) -> float:
    """The largest relative difference of a tensor of two runs' exported models, and critics; 0 if they are bitwise
    the same."""
    names = ["export", *(["critic/export"] if (other / "critic" / "export").exists() else [])]
    worst = 0.0
    for name in names:
        one, two = (folder / name / "model.safetensors" for folder in (run, other))
        if one.read_bytes() == two.read_bytes():
            continue
        found, expected = load_file(one), load_file(two)
        if found.keys() != expected.keys():
            return float("inf")
        for key, tensor in expected.items():
            norm = float(np.linalg.norm(tensor)) or 1.0
            worst = max(worst, float(np.linalg.norm(found[key] - tensor)) / norm, 1e-12)
    return worst
