"""The table of `lockstep top`: every process of a run, what it does and what it waits for."""

from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lockstep.base import waits
from lockstep.base.text import format_duration
from lockstep.config.roles import ROLE_OF_PROCESSES
from lockstep.watch.attach.run_observer import RunObserver
from lockstep.watch.beacon import beacon_table
from lockstep.watch.beacon.beacon_table import CounterRow, ProcessRow
from lockstep.watch.diagnosis.evidence_types import WaitAlias
from lockstep.watch.diagnosis.verdict import Verdict, VerdictLevel
from lockstep.watch.supervisor.incident import verdict_headline

_STALE_BEAT_S = 5.0
_LONG_WAIT_S = 10.0


def render_processes(rows: Sequence[ProcessRow], run: str = "", verdicts: Sequence[Verdict] = ()) -> RenderableType:
    """A table of processes, suspects first, with verdicts above it and a summary of waits below."""
    if not rows:
        return Text(f"no process of {run or 'the run'} has a beacon on this host", style="yellow")
    table = Table(box=None, header_style="bold dim", padding=(0, 2, 0, 0))
    suspects = {each.pid for verdict in verdicts for each in verdict.culprits}
    collective = any(row.communicators for row in rows)
    for heading, justify in (
        ("process", "left"), ("pid", "right"), ("state", "left"), ("stage", "left"), ("for", "right"),
        ("progress", "left"), *((("collectives", "left"),) if collective else ()), ("waits for", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, no_wrap=heading != "waits for")
    for row in sorted(rows, key=lambda row: row.pid not in suspects):
        table.add_row(
            Text(row.name, style="bold red" if row.pid in suspects else "bold"),
            Text(str(row.pid), style="dim"),
            Text(row.state, style=_colour(row)),
            Text(row.stage or "-", style="cyan" if row.stage else "dim"),
            Text(format_duration(row.stage_s) if row.stage else "", style="dim"),
            _progress(row.counters),
            *((_collectives(row, rows),) if collective else ()),
            _wait_text(row),
        )
    lines = [_verdict_line(verdict) for verdict in verdicts]
    return Group(*lines, *([Text("")] if lines else []), table, Text(""), _conclusion(rows))


def follow_processes(run: str, console: Console, every_s: float = 1.0, turns: int | None = None) -> None:
    """Shows the table until Ctrl-C (or `turns` times), refreshed in place."""
    before: beacon_table.BeaconSnapshot | None = None
    onlooker = _run_observer(run)
    with Live(console=console, auto_refresh=False, screen=False, transient=False) as live:
        turn = 0
        try:
            while turns is None or turn < turns:
                now = beacon_table.take_snapshot(run)
                live.update(
                    render_processes(beacon_table.process_rows(now, before), run, onlooker.poll()), refresh=True
                )
                before, turn = now, turn + 1
                if turns is None or turn < turns:
                    waits.sleep(every_s, "next look at the beacons")
        except KeyboardInterrupt:
            return


def print_processes(run: str, console: Console, settle: Callable[[], None] | None = None) -> None:
    """Prints the table once. With `settle` (a short pause) between two readings, counters have rates."""
    onlooker = _run_observer(run)
    before = beacon_table.take_snapshot(run)
    if settle is not None:
        onlooker.poll()
        settle()
    now = beacon_table.take_snapshot(run)
    console.print(
        render_processes(beacon_table.process_rows(now, before if settle is not None else None), run, onlooker.poll())
    )


def _run_observer(run: str) -> RunObserver:
    return RunObserver(run, aliases={name: WaitAlias(role) for name, role in ROLE_OF_PROCESSES.items()})


def _colour(row: ProcessRow) -> str:
    if not row.alive:
        return "bold red"
    if row.state in ("stopped", "traced") or (row.beat_s is not None and row.beat_s > _STALE_BEAT_S):
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
    """Sequence numbers entered on each communicator; a rank behind the others is highlighted."""
    text = Text()
    for each in row.communicators[:3]:
        ahead = max(other.entered for one in rows for other in one.communicators if other.label == each.label)
        text.append(", " if text else "")
        text.append(f"{each.label} ", style="dim")
        text.append(
            f"#{each.entered}" if each.entered >= 0 else "?", style="red" if each.entered < ahead else "default"
        )
        if each.operation:
            text.append(f" in {each.operation} {format_duration(each.inside_s)}", style="yellow")
    return text


def _verdict_line(verdict: Verdict) -> Text:
    text = Text(f"{verdict.level}: ", style="bold red" if verdict.level != VerdictLevel.NOTICE else "bold yellow")
    return text.append(verdict_headline(verdict), style="default")


def _wait_text(row: ProcessRow) -> Text:
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


def _conclusion(rows: Sequence[ProcessRow]) -> Text:
    dead = [row.name for row in rows if not row.alive]
    edges = beacon_table.wait_edges(rows)
    text = Text()
    if dead:
        text.append(f"gone: {', '.join(dead)}. ", style="bold red")
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
