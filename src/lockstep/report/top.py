"""The table of `lockstep top`: every process of a run, what it does, how fast, whom it waits for; suspects on top."""

from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lockstep.config.roles import TOGETHER
from lockstep.watch import state, waits
from lockstep.watch.assemble import Alias
from lockstep.watch.incident import headline
from lockstep.watch.looking import Onlooker
from lockstep.watch.state import CounterRow, Row
from lockstep.watch.verdict import Level, Verdict

_STALE_BEAT_S = 5.0
_LONG_WAIT_S = 10.0


def render(rows: Sequence[Row], run: str = "", verdicts: Sequence[Verdict] = ()) -> RenderableType:
    """A table of processes, suspects on top, and below it who everybody waits for. With verdicts, these first."""
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
            Text(duration(row.stage_s) if row.stage else "", style="dim"),
            _progress(row.counters),
            *((_collectives(row, rows),) if collective else ()),
            _waits(row),
        )
    told = [_told(verdict) for verdict in verdicts]
    return Group(*told, *([Text("")] if told else []), table, Text(""), _conclusion(rows))


def follow(run: str, console: Console, every_s: float = 1.0, turns: int | None = None) -> None:
    """Shows the table until Ctrl-C (or for a number of turns), refreshed in place; KeyboardInterrupt ends it."""
    before: state.Reading | None = None
    onlooker = _onlooker(run)
    with Live(console=console, auto_refresh=False, screen=False, transient=False) as live:
        turn = 0
        try:
            while turns is None or turn < turns:
                now = state.take_reading(run)
                live.update(render(state.rows(now, before), run, onlooker.look()), refresh=True)
                before, turn = now, turn + 1
                if turns is None or turn < turns:
                    waits.sleep(every_s, "next look at the beacons")
        except KeyboardInterrupt:
            return


def once(run: str, console: Console, settle: Callable[[], None] | None = None) -> None:
    """Prints the table once. With `settle` (a short pause) between two readings, counters have rates."""
    onlooker = _onlooker(run)
    before = state.take_reading(run)
    if settle is not None:
        onlooker.look()
        settle()
    now = state.take_reading(run)
    console.print(render(state.rows(now, before if settle is not None else None), run, onlooker.look()))


def _onlooker(run: str) -> Onlooker:
    return Onlooker(run, aliases={name: Alias(role) for name, role in TOGETHER.items()})


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


def _collectives(row: Row, rows: Sequence[Row]) -> Text:
    """Entered (and completed, where that is less) of each communicator; who is behind the others stands out."""
    text = Text()
    for each in row.communicators[:3]:
        ahead = max(other.entered for one in rows for other in one.communicators if other.label == each.label)
        text.append(", " if text else "")
        text.append(f"{each.label} ", style="dim")
        text.append(
            f"#{each.entered}" if each.entered >= 0 else "?", style="red" if each.entered < ahead else "default"
        )
        if each.operation:
            text.append(f" in {each.operation} {duration(each.inside_s)}", style="yellow")
    return text


def _told(verdict: Verdict) -> Text:
    text = Text(f"{verdict.level}: ", style="bold red" if verdict.level != Level.NOTICE else "bold yellow")
    return text.append(headline(verdict), style="default")


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
