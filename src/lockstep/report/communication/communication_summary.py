"""Sums up the communication of a run and how evenly its ranks were loaded, for `lockstep report --comm`, the report and
the dashboard. It reads what supervisor and ledger have written, and needs no torch.

`communication_summary(folder)` returns JSON with these fields (seconds and milliseconds as floats):

    source, written: the file of the totals and when it was written; null if there is none
    communicators: [{name, backend, processes, on_device, unmatched, all_pairs,
        operations: [{operation, size, calls, sampled, bytes, waiting_s, moving_s, waiting_share, spread_ms, moving_ms,
            bus_gb_s, checked_gb_s}],
        ranks: [{process, last, caused_s, waited_s, late_ms}],
        pairs: [{late, waiting, calls, seconds, wait_ms}]}]
    matrix: {processes, seconds: [[s, ...], ...], wait_ms: [[{p50, p99} or null, ...], ...], complete}: row: who was
        late; column: who waited for it, over all communicators; null without calls or beyond `MOST_CELLS` processes
    windows: [{began, ended, waited_s: {process: s}, caused_s: {process: s}}]
    loads: [{role, step, speeds, tokens, work_s, blocked_s, memory}], lists by rank; of at most `MOST_STEPS` steps
    thinned_steps: of so many first steps the ledger keeps every tenth one's loads, and the sums; 0 in a short run
    ranks: [{role, rank, steps, tokens, work_s, blocked_s, memory, pace}]: over all steps; `pace` is the time for the
        same work relative to the median rank
    devices: the objects of devices.json
    remarks: [text]

`spread_ms` (last entry after the first), `moving_ms`, `late_ms` and `wait_ms` are {p50, p99}. Fields that are not known
are null: `moving_s` and `bus_gb_s` where calls do not block, `checked_gb_s` without the bandwidth of `lockstep check`.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.base.json_text import read_json
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.load_blocks import LoadSums
from lockstep.ledger.rank_loads import FALSE_REMARKS, REMARK_STEPS, RankLoadRow, relative_paces, slow_ranks
from lockstep.ledger.run_folder import INDEX_FILE
from lockstep.report.device_rows import device_totals
from lockstep.watch.communication.arrival_totals import COMMUNICATION_FILE, FORMAT, CommunicatorTotals
from lockstep.watch.communication.time_histogram import TimeHistogram

CHECK_FILE = "check.json"
"""The output of `lockstep check CONFIG --json`, if it was saved in the run's folder."""
MOST_STEPS = 200
MOST_CELLS = 64
LATE_SHARE = 0.05
"""A process is remarked upon as persistently late only if the others waited for it for this share of the time."""


def communication_summary(folder: Path) -> dict[str, Any]:
    """Returns the summary of a run's folder, or of a file that `lockstep watch --communication` wrote; see above.

    Raises:
        ValueError: the file is none of these.
        LedgerError: the run's ledger cannot be read.
        OSError: the file cannot be read.
    """
    path = folder / COMMUNICATION_FILE if folder.is_dir() else folder
    totals = _read_totals(path) if path.is_file() or not folder.is_dir() else None  # a pipe would block
    communicators = [CommunicatorTotals.parse(each) for each in totals["communicators"]] if totals else []
    checked = _checked_bandwidth(folder / CHECK_FILE)
    windows = [_window(each) for each in totals["windows"]] if totals else []
    loads = _loads(folder)
    return {
        "source": str(path) if totals else None,
        "written": totals["written"] if totals else None,
        "communicators": [_communicator(each, checked) for each in communicators],
        "matrix": _matrix(communicators),
        "windows": windows,
        "loads": [_load(each) for each in loads.shown],
        "thinned_steps": loads.thinned,
        "ranks": _rank_totals(loads),
        "devices": device_totals(folder),
        "remarks": [str(each) for each in slow_ranks(loads.recent)] + _late_processes(windows),
    }


def _read_totals(path: Path) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(
            f"{path} is no file of collectives: give the folder of a run, or a file that lockstep watch "
            "--communication wrote"
        )
    return values


def _communicator(totals: CommunicatorTotals, checked: Mapping[tuple[str, int], tuple[float, int]]) -> dict[str, Any]:
    names, members = totals.processes, len(totals.processes)
    operations = []
    for (operation, size), each in sorted(totals.operations.items(), key=lambda item: -item[1].waiting_ns):
        known = each.moving_calls > 0
        # Of calls that do not block it is not known how long they move data; their share is taken to be the same.
        moving_s = each.moving_ns / each.moving_calls * each.calls / 1e9 if known else None
        waiting_s = each.waiting_ns / 1e9
        whole = waiting_s + (moving_s or 0.0)
        operations.append({
            "operation": operation, "size": size, "calls": each.calls, "sampled": each.sampled, "bytes": each.nbytes,
            "waiting_s": waiting_s, "moving_s": moving_s,
            "waiting_share": waiting_s / whole if known and whole > 0 else None,
            "spread_ms": _quantiles(each.spread), "moving_ms": _quantiles(each.moving) if known else None,
            "bus_gb_s": each.bus_bytes / each.bus_ns if each.bus_ns else None,
            "checked_gb_s": _comparable(checked.get((_family(operation), members)), size),
        })  # fmt: skip
    ranks = [
        {"process": name, "last": each.last, "caused_s": each.caused_ns / 1e9, "waited_s": each.waited_ns / 1e9,
         "late_ms": _quantiles(each.lateness)}
        for name, each in zip(names, totals.ranks, strict=True)
    ]  # fmt: skip
    pairs = [
        {"late": names[late], "waiting": names[rank], "calls": each.calls, "seconds": each.ns / 1e9,
         "wait_ms": _quantiles(each.waits)}
        for (late, rank), each in sorted(totals.pairs.items(), key=lambda item: -item[1].ns)
    ]  # fmt: skip
    return {
        "name": totals.name, "backend": totals.backend, "processes": list(names), "on_device": totals.on_device,
        "unmatched": totals.unmatched, "all_pairs": totals.all_pairs, "operations": operations, "ranks": ranks,
        "pairs": pairs,
    }  # fmt: skip


def _quantiles(histogram: TimeHistogram) -> dict[str, float]:
    return {"p50": histogram.quantile(0.5) / 1e6, "p99": histogram.quantile(0.99) / 1e6}


def _family(operation: str) -> str:
    """The operation as `lockstep check` names it."""
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        if operation.startswith(name):
            return name
    return operation


def _comparable(checked: tuple[float, int] | None, size: int | None) -> float | None:
    """The bandwidth that was checked, for calls that are not limited by latency instead."""
    return checked[0] if checked is not None and size is not None and size * 8 >= checked[1] else None


def _checked_bandwidth(path: Path) -> dict[tuple[str, int], tuple[float, int]]:
    """The bus bandwidth in GB/s that `lockstep check` measured, and with how many bytes, by operation and number of
    members."""
    found: dict[tuple[str, int], tuple[float, int]] = {}
    if not path.is_file():  # a pipe would block
        return found
    try:
        for finding in read_json(path)["findings"]:
            measured = finding.get("measured") or {}
            for operation, rate in measured.get("bus_mb_per_s", {}).items():
                found[str(operation), int(measured["members"])] = float(rate) / 1000, int(measured["bytes"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}
    return found


def _matrix(communicators: Sequence[CommunicatorTotals]) -> dict[str, Any] | None:
    names = list(dict.fromkeys(name for each in communicators for name in each.processes))
    if not names or len(names) > MOST_CELLS:
        return None
    places = {name: number for number, name in enumerate(names)}
    seconds = [[0.0] * len(names) for _ in names]
    waits: dict[tuple[int, int], TimeHistogram] = {}
    for each in communicators:
        for (late, rank), pair in each.pairs.items():
            cell = places[each.processes[late]], places[each.processes[rank]]
            seconds[cell[0]][cell[1]] += pair.ns / 1e9
            waits.setdefault(cell, TimeHistogram()).merge(pair.waits)
    wait_ms = [
        [_quantiles(waits[row, column]) if (row, column) in waits else None for column in range(len(names))]
        for row in range(len(names))
    ]
    complete = all(each.all_pairs for each in communicators)
    return {"processes": names, "seconds": seconds, "wait_ms": wait_ms, "complete": complete}


def _window(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "began": values["began"], "ended": values["ended"],
        "waited_s": {name: ns / 1e9 for name, ns in dict(values["waited_ns"]).items()},
        "caused_s": {name: ns / 1e9 for name, ns in dict(values["caused_ns"]).items()},
    }  # fmt: skip


def _late_processes(windows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A remark on a process for which the others waited the most in nearly every window: in so many that processes
    without a difference are so with probability `FALSE_REMARKS` at most."""
    whole = [each for each in windows if each["ended"] > each["began"]]
    names = sorted({name for each in whole for name in [*each["waited_s"], *each["caused_s"]]})
    most = [max(each["caused_s"], key=each["caused_s"].__getitem__) for each in whole if each["caused_s"]]
    found = []
    for name in names:
        count = most.count(name)
        chance = _binomial_tail(count, len(most), 1 / max(len(names), 2)) * len(names)
        if not most or chance > FALSE_REMARKS:
            continue
        own = [each for each in whole if each["caused_s"]]
        # The waits of all others are summed up: per process that waits, and second.
        waits = [each["caused_s"].get(name, 0.0) / (each["ended"] - each["began"]) for each in own]
        share = statistics.median(waits) / max(len(names) - 1, 1)
        if share >= LATE_SHARE:
            found.append(
                f"the others wait for {name} for {share:.0%} of the time (the longest in {count} of the last "
                f"{len(most)} windows of time)"
            )
    return found


def _binomial_tail(successes: int, tries: int, chance: float) -> float:
    """The probability of at least so many successes."""
    return sum(
        math.comb(tries, number) * chance**number * (1 - chance) ** (tries - number)
        for number in range(successes, tries + 1)
    )


@dataclass(frozen=True, slots=True)
class _Loads:
    """What a run's ledger has of the loads of its ranks."""

    shown: list[RankLoadRow]
    """Those of some steps."""
    recent: list[RankLoadRow]
    """Those of the last steps."""
    sums: dict[str, LoadSums]
    thinned: int


def _loads(folder: Path) -> _Loads:
    if not (folder / INDEX_FILE).is_file():
        return _Loads([], [], {}, 0)
    with Ledger.reader(folder) as ledger:
        sums = ledger.rank_load_sums()
        recent = [row for role in sums for row in ledger.rank_loads(role, REMARK_STEPS)]
        return _Loads(ledger.rank_loads(most=MOST_STEPS), recent, sums, ledger.thinned_load_steps())


def _load(row: RankLoadRow) -> dict[str, Any]:
    loads = row.loads
    return {
        "role": row.role, "step": row.step + 1, "speeds": row.speeds, "tokens": loads.tokens, "work_s": loads.work_s,
        "blocked_s": loads.blocked_s, "memory": loads.memory,
    }  # fmt: skip


def _rank_totals(loads: _Loads) -> list[dict[str, Any]]:
    found = []
    for role, sums in loads.sums.items():
        ranks = len(sums.known)
        recent = [each.loads for each in loads.recent if each.role == role and len(each.loads.work_s) == ranks]
        paces = [each for of_step in recent if (each := relative_paces(of_step)) is not None]
        for rank in range(ranks):
            found.append({
                "role": role, "rank": rank, "steps": sums.steps, "tokens": round(sums.tokens[rank]),
                "work_s": sums.work_s[rank] if sums.known[rank] else None,
                "blocked_s": sums.blocked_s[rank] if sums.known[rank] else None,
                "memory": sums.memory[rank],
                "pace": math.exp(statistics.median(step[rank] for step in paces)) if paces else None,
            })  # fmt: skip
    return found
