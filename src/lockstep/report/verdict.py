"""A verdict in plain words for the terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lockstep.report.top import duration
from lockstep.watch.rows import advice, beside
from lockstep.watch.verdict import Culprit, Fact, Level, Verdict

_COLOURS = {Level.NOTICE: "yellow", Level.CONFIRMED: "bold red", Level.ACT: "bold red"}
_EVIDENCE = 12
"""Pieces of evidence that are shown."""


def render(verdict: Verdict) -> RenderableType:
    """What is wrong, then, each under its name, who, in what, who waits, why that is believed, and what helps."""
    colour = "green" if verdict.cause == "benign" else _COLOURS[verdict.level]
    title = Text.assemble((str(verdict.kind), colour), f"  {verdict.level}, confidence {verdict.confidence:.2f}")
    if verdict.cause not in ("", "unknown"):
        title.append(f", class {verdict.cause}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(verdict):
        table.add_row(name, Text(text))
    return Group(title, Padding(Text(verdict.explanation), (1, 0)), table)


def _rows(verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield from beside("culprit", [_culprit(each) for each in verdict.culprits])
    if verdict.collective is not None:
        each = verdict.collective
        site = f", called at {each.call_site}" if each.call_site else ""
        yield "collective", f"{each.operation or 'collective'} #{each.seq} on {each.communicator}{site}"
    waiting = []
    for link in verdict.waiting:
        since = "" if link.since_s is None else f" since {duration(link.since_s)}"
        waiting.append(f"{link.who} waits{f' for {link.on}' if link.on else ''}{since}: {link.what}")
    yield from beside("waiting", waiting)
    shown = [_fact(fact) for fact in verdict.evidence[:_EVIDENCE]]
    if len(verdict.evidence) > _EVIDENCE:
        shown.append(f"and {len(verdict.evidence) - _EVIDENCE} more")
    yield from beside("evidence", shown)
    yield from advice(verdict)


def _culprit(culprit: Culprit) -> str:
    who = culprit.name or (culprit.role if culprit.rank is None else f"rank {culprit.rank}")
    about = [culprit.role if culprit.rank is not None else "", f"host {culprit.host}" if culprit.host else "",
             f"pid {culprit.pid}" if culprit.pid else ""]  # fmt: skip
    known = ", ".join(part for part in about if part)
    return f"{who}{f' ({known})' if known else ''}{f' in {culprit.where}' if culprit.where else ''}"


def _fact(fact: Fact) -> str:
    place = f"{fact.file}:{fact.line}" if fact.line is not None else fact.file or fact.source
    return f"{fact.text}  [{place}]" if place else fact.text
