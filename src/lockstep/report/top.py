"""The table of `lockstep top`: every process of a run, what it does, how fast, and whom it waits for."""

from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lockstep.watch import state, waits
from lockstep.watch.state import CounterRow, Row

_STALE_BEAT_S = 5.0
_LONG_WAIT_S = 10.0


def render(rows: Sequence[Row], run: str = "") -> RenderableType:
    """A table of processes and, below it, one line that says who everybody waits for."""
    if not rows:
        return Text(f"no process of {run or 'the run'} has a beacon on this host", style="yellow")
    table = Table(box=None, header_style="bold dim", padding=(0, 2, 0, 0))
    for heading, justify in (
        ("process", "left"), ("pid", "right"), ("state", "left"), ("stage", "left"), ("for", "right"),
        ("progress", "left"), ("waits for", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify, no_wrap=heading != "waits for")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(
            Text(row.name, style="bold"),
            Text(str(row.pid), style="dim"),
            Text(row.state, style=_colour(row)),
            Text(row.stage or "-", style="cyan" if row.stage else "dim"),
            Text(duration(row.stage_s) if row.stage else "", style="dim"),
            _progress(row.counters),
            _waits(row),
        )
    return Group(table, Text(""), _conclusion(rows))


def follow(run: str, console: Console, every_s: float = 1.0, turns: int | None = None) -> None:
    """Shows the table until Ctrl-C (or for a number of turns), refreshed in place; KeyboardInterrupt ends it."""
    before: state.Reading | None = None
    with Live(console=console, auto_refresh=False, screen=False, transient=False) as live:
        turn = 0
        try:
            while turns is None or turn < turns:
                now = state.take_reading(run)
                live.update(render(state.rows(now, before), run), refresh=True)
                before, turn = now, turn + 1
                if turns is None or turn < turns:
                    waits.sleep(every_s, "next look at the beacons")
        except KeyboardInterrupt:
            return


def once(run: str, console: Console, settle: Callable[[], None] | None = None) -> None:
    """Prints the table once. With `settle` (a short pause) between two readings, counters have rates."""
    before = state.take_reading(run)
    if settle is not None:
        settle()
    now = state.take_reading(run)
    console.print(render(state.rows(now, before if settle is not None else None), run))


def duration(seconds: float) -> str:
    """`12ms`, `0.4s`, `12s`, `3m05s`, `2h07m`, `3d04h`."""
    if 0 < seconds < 0.0995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _colour(row: Row) -> str:
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


def _waits(row: Row) -> Text:
    if not row.waits:
        return Text("")
    wait = row.waits[0]
    style = "yellow" if wait.stalled_s >= _LONG_WAIT_S else "default"
    text = Text(f"{wait.whom}", style=f"bold {style}")
    text.append(f" {duration(wait.since_s)} ({wait.kind}): {wait.why}", style=style)
    if wait.left_s is not None:
        text.append(f" [at most {duration(max(0.0, wait.left_s))} more]", style="dim")
    if len(row.waits) > 1:
        text.append(f" and {len(row.waits) - 1} more", style="dim")
    return text


def _conclusion(rows: Sequence[Row]) -> Text:
    dead = [row.name for row in rows if not row.alive]
    edges = state.waiting_for(rows)
    text = Text()
    if dead:
        text.append(f"gone: {', '.join(dead)}. ", style="bold red")
    awaited = {whom for _, whom, _ in edges}
    for name in sorted(awaited):
        waiters = [who for who, whom, _ in edges if whom == name]
        longest = max(since for _, whom, since in edges if whom == name)
        text.append(f"{', '.join(sorted(set(waiters)))} wait{'s' if len(set(waiters)) == 1 else ''} for ")
        text.append(name, style="bold")
        text.append(f" ({duration(longest)}). ", style="dim")
    if not text:
        text.append("nobody waits", style="dim")
    return text
