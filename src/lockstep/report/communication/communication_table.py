"""Shows a communication summary: as plain tables for the terminal, and as rows for the HTML report."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.base.text import count_noun
from lockstep.ledger.errors import LedgerError
from lockstep.report.communication.communication_summary import communication_summary

log = logging.getLogger(__name__)

MOST_OPERATIONS = 12
MOST_PAIRS = 12
MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """How long one process waited for another."""

    text: str
    title: str
    level: float
    """0 to 1, relative to the largest cell: the depth of the colour."""
    own: bool
    """Whether it is on the diagonal."""


@dataclass(frozen=True, slots=True)
class CommunicationView:
    """What the report shows of a summary."""

    remarks: list[str]
    processes: list[str]
    matrix: list[tuple[str, list[MatrixCell], str]]
    """A row for each late process: its name, the cells, and the sum."""
    complete: bool
    operations: list[list[str]]
    pairs: list[list[str]]
    loads: list[list[str]]
    notes: list[str]


OPERATION_COLUMNS = (
    "communicator", "operation", "up to", "calls", "bytes", "waiting", "moving", "spread p50", "p99", "bus", "check",
)  # fmt: skip
PAIR_COLUMNS = ("communicator", "late", "waiting", "calls", "waited", "p50", "p99")
LOAD_COLUMNS = ("rank", "steps", "tokens", "work", "in collectives", "memory", "pace")


def communication_view(summary: Mapping[str, Any]) -> CommunicationView | None:
    """Returns what to show; None if nothing was measured."""
    if not summary["communicators"] and not summary["ranks"]:
        return None
    matrix, rows, processes = summary["matrix"], [], list[str]()
    if matrix is not None:
        processes = matrix["processes"]
        most = max(max(row) for row in matrix["seconds"])
        for name, row, waits in zip(processes, matrix["seconds"], matrix["wait_ms"], strict=True):
            cells = [_cell(name, *each, most) for each in zip(processes, row, waits, strict=True)]
            rows.append((name, cells, format_seconds(sum(row))))
    return CommunicationView(
        summary["remarks"], processes, rows, matrix is None or matrix["complete"], operation_rows(summary),
        pair_rows(summary), load_rows(summary), _notes(summary),
    )  # fmt: skip


def report_view(folder: Path) -> CommunicationView | None:
    """Returns what the report of a run shows; None if nothing was measured, or its files are damaged: a report must
    not fail by them."""
    try:
        return communication_view(communication_summary(folder))
    except (LedgerError, OSError, ValueError, LookupError, TypeError) as error:
        log.warning("the report leaves out the communication: %r", error)
        return None


def _cell(late: str, waiting: str, seconds: float, wait: Mapping[str, float] | None, most: float) -> MatrixCell:
    title = f"{waiting} waited {format_seconds(seconds)} for {late}"
    if wait is not None:
        title += f": p50 {_ms(wait['p50'])}, p99 {_ms(wait['p99'])} per call"
    return MatrixCell(format_seconds(seconds), title, seconds / most if most > 0 else 0.0, late == waiting)


def operation_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """The operations on which ranks waited the longest."""
    found = [(each, operation) for each in summary["communicators"] for operation in each["operations"]]
    found.sort(key=lambda item: -item[1]["waiting_s"])
    return [
        [
            each["name"], of["operation"], _bytes(of["size"]), f"{of['calls']:,}", _bytes(of["bytes"] or None),
            format_seconds(of["waiting_s"]) + ("" if of["waiting_share"] is None else f" ({of['waiting_share']:.0%})"),
            "-" if of["moving_s"] is None else format_seconds(of["moving_s"]),
            _ms(of["spread_ms"]["p50"]), _ms(of["spread_ms"]["p99"]), _rate(of["bus_gb_s"]), _rate(of["checked_gb_s"]),
        ]
        for each, of in found[:MOST_OPERATIONS]
    ]  # fmt: skip


def pair_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """The pairs with the longest waits."""
    found = [(each["name"], pair) for each in summary["communicators"] for pair in each["pairs"]]
    found.sort(key=lambda item: -item[1]["seconds"])
    return [
        [
            name, pair["late"], pair["waiting"], f"{pair['calls']:,}", format_seconds(pair["seconds"]),
            _ms(pair["wait_ms"]["p50"]), _ms(pair["wait_ms"]["p99"]),
        ]
        for name, pair in found[:MOST_PAIRS]
    ]  # fmt: skip


def load_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """The loads of ranks over all steps: of many ranks, those with the largest pace."""
    ranks = summary["ranks"]
    if len(ranks) > MOST_RANKS:
        ranks = sorted(ranks, key=lambda each: -(each["pace"] or 0.0))[:MOST_RANKS]
    return [
        [
            f"{each['role']}-{each['rank']}", f"{each['steps']:,}", f"{int(each['tokens']):,}",
            "-" if each["work_s"] is None else format_seconds(each["work_s"]),
            "-" if each["blocked_s"] is None else format_seconds(each["blocked_s"]),
            _bytes(int(each["memory"])), "-" if each["pace"] is None else f"{each['pace']:.2f}",
        ]
        for each in ranks
    ]  # fmt: skip


def _notes(summary: Mapping[str, Any]) -> list[str]:
    notes = []
    if any(each["on_device"] for each in summary["communicators"]):
        notes.append("operations on GPUs run after their calls: lateness is that of issuing them, moving is not known")
    if any(of["calls"] > of["sampled"] for each in summary["communicators"] for of in each["operations"]):
        notes.append("calls were sampled: counts and sums are estimates")
    if unmatched := sum(each["unmatched"] for each in summary["communicators"]):
        notes.append(f"{count_noun(unmatched, 'call')} left out, of which not all members' entries are known")
    if steps := summary["thinned_steps"]:
        first = count_noun(steps, "step")
        notes.append(f"of the first {first} the loads of every tenth are kept; the table sums up all steps")
    return notes


def render_text(summary: Mapping[str, Any]) -> str:
    """The summary as plain tables."""
    view = communication_view(summary)
    if view is None:
        return "no collectives of several ranks were recorded, and no loads of ranks"
    parts = [f"remark: {each}" for each in view.remarks]
    if view.operations:
        parts.append(_table(OPERATION_COLUMNS, view.operations, left=2))
    if view.matrix:
        what = "waited (column) for (row)"
        names = [what, *view.processes, "all"]
        cells = [[name, *("" if cell.own else cell.text for cell in row), total] for name, row, total in view.matrix]
        if len(view.processes) <= 16:
            parts.append(_table(names, cells, left=1))
    if view.pairs:
        parts.append(_table(PAIR_COLUMNS, view.pairs, left=3))
    if view.loads:
        parts.append(_table(LOAD_COLUMNS, view.loads, left=1))
    return "\n\n".join([*parts, *(f"note: {each}" for each in view.notes)])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Args:
    left: the number of columns of text, which are aligned to the left.
    """
    widths = [max(len(row[number]) for row in [columns, *rows]) for number in range(len(columns))]
    lines = [
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [columns, *rows]
    ]
    return "\n".join(lines)


def format_seconds(seconds: float) -> str:
    """`1.2 h`, `3.4 min`, `5.6 s`, `78 ms`, `0`."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 100:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.3g} ms" if seconds >= 5e-7 else "0"


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"


def _rate(gb_s: float | None) -> str:
    return "-" if gb_s is None else f"{gb_s:.3g} GB/s"


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.3g} {units[0]}" if value < 1000 else f"{value:.0f} {units[0]}"
