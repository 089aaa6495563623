"""Shows the table of `lockstep top`: every process of a run, its stage, progress and waits."""

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

_STALE_HEARTBEAT_S = 5.0
_LONG_WAIT_S = 10.0


def render_processes(rows: Sequence[ProcessRow], run: str = "", verdicts: Sequence[Verdict] = ()) -> RenderableType:
    """Renders a table of processes, suspects first, with verdicts above it and a summary of waits below."""
    if not rows:
        return Text(f"no process of {run or 'the run'} was found on this host", style="yellow")
    table = Table(box=None, header_style="bold dim", padding=(0, 2, 0, 0))
    suspects = {each.pid for verdict in verdicts for each in verdict.culprits}
    collective = any(row.communicators for row in rows)
    for heading, justify in (
        ("process", "left"), ("pid", "right"), ("state", "left"), ("stage", "left"), ("time", "right"),
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
            _longest_wait_text(row),
        )
    lines = [_verdict_line(verdict) for verdict in verdicts]
    return Group(*lines, *([Text("")] if lines else []), table, Text(""), _waits_summary(rows))


def follow_processes(run: str, console: Console, every_s: float = 1.0, refreshes: int | None = None) -> None:
    """Shows the table and refreshes it in place until Ctrl-C, or `refreshes` times."""
    before: beacon_table.BeaconSnapshot | None = None
    observer = _run_observer(run)
    with Live(console=console, auto_refresh=False, screen=False, transient=False) as live:
        shown = 0
        try:
            while refreshes is None or shown < refreshes:
                now = beacon_table.take_snapshot(run)
                live.update(
                    render_processes(beacon_table.process_rows(now, before), run, observer.poll()), refresh=True
                )
                before, shown = now, shown + 1
                if refreshes is None or shown < refreshes:
                    waits.sleep(every_s, "next refresh of the table")
        except KeyboardInterrupt:
            return


def print_processes(run: str, console: Console, pause: Callable[[], None] | None = None) -> None:
    """Prints the table once. `pause`, if given, is called between two readings, so that counters have rates."""
    observer = _run_observer(run)
    before = beacon_table.take_snapshot(run)
    if pause is not None:
        observer.poll()
        pause()
    now = beacon_table.take_snapshot(run)
    console.print(
        render_processes(beacon_table.process_rows(now, before if pause is not None else None), run, observer.poll())
    )


def _run_observer(run: str) -> RunObserver:
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
