"""Shows the table of `lockstep top`: every process of a run, its stage, progress and waits."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from lockstep.base import waits
from lockstep.base.text import format_duration
from lockstep.config.roles import ROLE_OF_PROCESSES
from lockstep.report.safe_console import FILE_WIDTH
from lockstep.watch.attach.run_observer import RunObserver
from lockstep.watch.beacon import beacon_table
from lockstep.watch.beacon.beacon_table import CounterRow, ProcessRow
from lockstep.watch.devices.device_samples import DeviceSample
from lockstep.watch.diagnosis.evidence_types import WaitAlias
from lockstep.watch.diagnosis.verdict import Verdict, VerdictLevel
from lockstep.watch.supervisor.incident import verdict_headline

_STALE_HEARTBEAT_S = 5.0
_LONG_WAIT_S = 10.0
_SMOOTHING_S = 5.0
"""Rates are averages over about this long, the latest weighing most."""


@dataclass(slots=True)
class _Column:
    """A column of the table. Its width is that of its widest content so far, so that columns do not move."""

    heading: str
    least: int
    """Width before any content, which most content fits."""
    most: int | None
    """The widest that it gets; longer content is cut, and repeated below the row. None: content is never cut."""
    right: bool = False
    width: int = 0

    def fit(self, content: Text) -> None:
        wanted = max(self.least, self.width, content.cell_len)
        self.width = wanted if self.most is None else min(wanted, self.most)


DeviceTable = Mapping[int, Sequence[DeviceSample]]
"""The GPUs of each process, by pid."""

_DEVICE_COLUMN = 6
_GAP = 2
_INDENT = 4


class TopTable:
    """The table of `lockstep top`, over all refreshes: it remembers widths of columns and smoothed rates.

    The columns stand in the order of their importance. Those that do not fit the terminal follow below their row, so
    that at any width each process shows its name, its pid, and what it waits for.
    """

    def __init__(self) -> None:
        self._columns = [
            _Column("process", 12, 28), _Column("pid", 7, None, right=True), _Column("state", 13, None),
            _Column("stage", 10, 24), _Column("time", 6, None, right=True), _Column("progress", 28, None),
            _Column("collectives", 24, None), _Column("waits for", 40, None),
        ]  # fmt: skip
        self._with_devices = False
        self._before: beacon_table.BeaconSnapshot | None = None
        self._rates: dict[tuple[int, str], float] = {}
        """By pid and counter."""

    def rows(self, now: beacon_table.BeaconSnapshot) -> list[ProcessRow]:
        """The rows of a snapshot, with rates since the one before, smoothed."""
        before, self._before = self._before, now
        seconds = 0.0 if before is None else (now.at_ns - before.at_ns) / 1e9
        found = beacon_table.process_rows(now, before)
        return [
            replace(row, counters=tuple(self._smoothed(row.pid, each, seconds) for each in row.counters))
            for row in found
        ]

    def _smoothed(self, pid: int, counter: CounterRow, seconds: float) -> CounterRow:
        if counter.rate is None:
            self._rates.pop((pid, counter.name), None)
            return counter
        known = self._rates.get((pid, counter.name), counter.rate)
        rate = known + (counter.rate - known) * (1 - math.exp(-seconds / _SMOOTHING_S))
        self._rates[pid, counter.name] = rate
        return replace(counter, rate=rate)

    def render(
        self, rows: Sequence[ProcessRow], width: int, run: str = "", verdicts: Sequence[Verdict] = (),
        devices: DeviceTable | None = None,
    ) -> RenderableType:  # fmt: skip
        """Renders the rows, suspects first, with verdicts above them and a summary of waits below. There is a column
        for GPUs once one of them has been sampled."""
        if not rows:
            return Text(f"no process of {run or 'the run'} was found on this host", style="yellow")
        suspects = {each.pid for verdict in verdicts for each in verdict.culprits}
        ordered = sorted(rows, key=lambda row: row.pid not in suspects)
        if devices and not self._with_devices:
            self._with_devices = True
            self._columns.insert(_DEVICE_COLUMN, _Column("gpu", 18, None))
        cells = [_cells(row, rows, row.pid in suspects) for row in ordered]
        if self._with_devices:
            for row, each in zip(ordered, cells, strict=True):
                each.insert(_DEVICE_COLUMN, _devices((devices or {}).get(row.pid, ())))
        for each in cells:
            for column, cell in zip(self._columns, each, strict=True):
                column.fit(cell)
        shown = self._shown(width)
        headings = [Text(column.heading, style="bold dim") for column in self._columns]
        lines: list[RenderableType] = [_line(shown, headings)]
        for row, each in zip(ordered, cells, strict=True):
            indented = [*self._below(shown, each), *_parts(row)]
            lines += [_line(shown, each), *(Padding(text, (0, 0, 0, min(_INDENT, width // 4))) for text in indented)]
        above = [_verdict_line(verdict) for verdict in verdicts]
        return Group(*above, *([Text("")] if above else []), *lines, Text(""), _waits_summary(rows))

    def _shown(self, width: int) -> list[_Column]:
        """The columns that fit, at least the first two."""
        shown = self._columns[:2]
        left = width - sum(column.width + _GAP for column in shown)
        for column in self._columns[2:]:
            if column.width > left:
                break
            shown = [*shown, column]
            left -= column.width + _GAP
        excess = sum(column.width for column in shown) + _GAP * (len(shown) - 1) - width
        if excess > 0:  # a narrow terminal: the name is cut
            shown = [replace(shown[0], width=max(1, shown[0].width - excess)), *shown[1:]]
        return shown

    def _below(self, shown: Sequence[_Column], cells: Sequence[Text]) -> list[Text]:
        """A line with what the line of a process lacks: contents that are cut or whose columns do not fit."""
        cut = [cell for column, cell in zip(shown, cells, strict=False) if cell.cell_len > column.width]
        missing = [*cut, *(cell for cell in cells[len(shown) :] if cell)]
        if not missing:
            return []
        if len(shown) < len(self._columns) and cells[-1]:
            missing[-1] = Text("waits for ").append_text(cells[-1])
        return [Text(", ").join(missing)]


def render_processes(
    rows: Sequence[ProcessRow], run: str = "", verdicts: Sequence[Verdict] = (), width: int = FILE_WIDTH
) -> RenderableType:
    """Renders a table once."""
    return TopTable().render(rows, width, run, verdicts)


def follow_processes(run: str, console: Console, every_s: float = 1.0, refreshes: int | None = None) -> None:
    """Shows the table and refreshes it in place until Ctrl-C, or `refreshes` times."""
    table, observer = TopTable(), run_observer(run)
    with contextlib.closing(observer), Live(console=console, auto_refresh=False, screen=False, transient=False) as live:
        shown = 0
        try:
            while refreshes is None or shown < refreshes:
                rows = table.rows(beacon_table.take_snapshot(run))
                verdicts = observer.poll()
                live.update(table.render(rows, console.width, run, verdicts, observer.devices()), refresh=True)
                shown += 1
                if refreshes is None or shown < refreshes:
                    waits.sleep(every_s, "next refresh of the table")
        except KeyboardInterrupt:
            return


def print_processes(run: str, console: Console, pause: Callable[[], None] | None = None) -> None:
    """Prints the table once. `pause`, if given, is called between two readings, so that counters have rates."""
    table, observer = TopTable(), run_observer(run)
    with contextlib.closing(observer):
        observer.await_devices()
        if pause is not None:
            table.rows(beacon_table.take_snapshot(run))
            observer.poll()
            pause()
        rows, verdicts = table.rows(beacon_table.take_snapshot(run)), observer.poll()
        console.print(table.render(rows, console.width, run, verdicts, observer.devices()))


def _cells(row: ProcessRow, rows: Sequence[ProcessRow], suspect: bool) -> list[Text]:
    """The contents of a process's columns."""
    return [
        Text(row.name, style="bold red" if suspect else "bold"),
        Text(str(row.pid), style="dim"),
        Text(row.state, style=_colour(row)),
        Text(row.stage or "-", style="cyan" if row.stage else "dim"),
        Text(format_duration(row.stage_s) if row.stage else "", style="dim"),
        _progress(row.counters),
        _collectives(row, rows),
        _longest_wait_text(row),
    ]


def _devices(samples: Sequence[DeviceSample]) -> Text:
    """`3 98% 61/80 GiB 612 W`: the number, the time with a kernel, memory and power of each GPU of a process."""
    text = Text()
    for each in samples:
        text.append(", " if text else "")
        text.append(str(each.index) if each.instance is None else f"{each.index}.{each.instance}", style="dim")
        if each.lost:
            text.append(f" {each.lost}", style="bold red")
            continue
        text.append("" if each.busy is None else f" {each.busy}%", style="green" if each.busy else "default")
        if each.memory_used is not None and each.memory_total:
            text.append(f" {each.memory_used / 2**30:.0f}/{each.memory_total / 2**30:.0f} GiB", style="default")
        text.append("" if each.power_w is None else f" {each.power_w:.0f} W", style="dim")
        text.append(f" {', '.join(each.throttled)}" if each.throttled else "", style="bold yellow")
    return text


def _parts(row: ProcessRow) -> list[Text]:
    """One line for each part of a process that waits, is in a collective, or is no longer there."""
    found = []
    for part in row.parts:
        is_inside = any(each.operation for each in part.communicators)
        if part.waits or is_inside or part.state not in ("running", "sleeping"):
            cells = [Text(part.state, style=_colour(part)), _collectives(part, row.parts), _longest_wait_text(part)]
            found.append(Text(f"child {part.pid}: ").append_text(Text(", ").join(cell for cell in cells if cell)))
    return found


def _line(columns: Sequence[_Column], cells: Sequence[Text]) -> Text:
    """One line of the table; the last column is not padded."""
    line = Text(no_wrap=True)
    for number, (column, cell) in enumerate(zip(columns, cells, strict=False)):
        last = number == len(columns) - 1
        content = cell.copy()
        content.truncate(column.width, overflow="ellipsis")
        gap = column.width - content.cell_len
        line.append(" " * (gap if column.right else 0))
        line.append_text(content)
        line.append("" if last else " " * ((0 if column.right else gap) + _GAP))
    return line


def run_observer(run: str) -> RunObserver:
    """Observes a run of this host with the names that its waits use."""
    # The aliases resolve a wait for a role, such as "trainer ranks", to all processes of that role.
    return RunObserver(run, aliases={name: WaitAlias(role) for name, role in ROLE_OF_PROCESSES.items()})


def _colour(row: ProcessRow) -> str:
    if not row.alive:
        return "bold red"
    if row.state in ("stopped", "traced") or (row.beat_s is not None and row.beat_s > _STALE_HEARTBEAT_S):
        return "bold yellow"
    return "green" if row.state == "running" else "default"


def _progress(counters: Sequence[CounterRow]) -> Text:
    text = Text()
    for counter in counters[:3]:
        text.append(", " if text else "")
        text.append(f"{counter.name} {counter.value:,}", style="default")
        if counter.total is not None:
            text.append(f"/{counter.total:,}", style="dim")
        if counter.rate:
            text.append(f" {counter.rate:,.0f}/s", style="green")
    return text


def _collectives(row: ProcessRow, rows: Sequence[ProcessRow]) -> Text:
    """Shows the number of the last collective on each communicator. A rank behind the others is highlighted."""
    text = Text()
    for each in row.communicators[:3]:
        newest = max(
            other.entered for other_row in rows for other in other_row.communicators if other.label == each.label
        )
        text.append(", " if text else "")
        text.append(f"{each.label} ", style="dim")
        text.append(
            f"#{each.entered}" if each.entered >= 0 else "?", style="red" if each.entered < newest else "default"
        )
        if each.operation:
            text.append(f" in {each.operation} {format_duration(each.inside_s)}", style="yellow")
    return text


def _verdict_line(verdict: Verdict) -> Text:
    text = Text(f"{verdict.level}: ", style="bold red" if verdict.level != VerdictLevel.NOTICE else "bold yellow")
    return text.append(verdict_headline(verdict), style="default")


def _longest_wait_text(row: ProcessRow) -> Text:
    if not row.waits:
        return Text("")
    wait = row.waits[0]
    style = "yellow" if wait.stalled_s >= _LONG_WAIT_S else "default"
    text = Text(f"{wait.waits_for}", style=f"bold {style}")
    text.append(f" {format_duration(wait.since_s)} ({wait.kind}): {wait.why}", style=style)
    if wait.left_s is not None:
        text.append(f" [at most {format_duration(max(0.0, wait.left_s))} more]", style="dim")
    if len(row.waits) > 1:
        text.append(f" and {len(row.waits) - 1} more", style="dim")
    return text


def _waits_summary(rows: Sequence[ProcessRow]) -> Text:
    dead = [row.name for row in rows if not row.alive]
    edges = beacon_table.wait_edges(rows)
    text = Text()
    if dead:
        text.append(f"dead: {', '.join(dead)}. ", style="bold red")
    awaited = {waits_for for _, waits_for, _ in edges}
    for name in sorted(awaited):
        waiters = [waiter for waiter, waits_for, _ in edges if waits_for == name]
        longest = max(since for _, waits_for, since in edges if waits_for == name)
        text.append(f"{', '.join(sorted(set(waiters)))} wait{'s' if len(set(waiters)) == 1 else ''} for ")
        text.append(name, style="bold")
        text.append(f" ({format_duration(longest)}). ", style="dim")
    if not text:
        text.append("no process waits", style="dim")
    return text
