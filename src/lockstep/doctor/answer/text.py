"""An answer for the terminal."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lockstep.watch.rows import advice, beside
from lockstep.watch.verdict import Culprit, Fact, Kind, Verdict

if TYPE_CHECKING:
    from lockstep.doctor.explain import Explained

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def safe(text: str) -> str:
    """Without anything that a terminal obeys: what stands in a log may come from anybody."""
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


def render(explained: "Explained") -> RenderableType:
    """What it was, then, each under its name, who, in what, why that is believed, and what helps."""
    verdict = explained.verdict
    title = Text.assemble(
        (safe(headline(explained)), "bold green" if verdict.cause == "benign" else "bold red"),
        f"  {verdict.cause}, confidence {verdict.confidence:.2f}",
    )
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows(verdict):
        table.add_row(name, Text(safe(text)))
    return Group(title, Padding(Text(safe(verdict.explanation)), (1, 0)), table)


def headline(explained: "Explained") -> str:
    """The title of the class."""
    about = explained.rules.about.get(explained.verdict.cause)
    return about.title if about else "The logs do not tell"


def rows(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Name and text of each thing that is known; the name stands beside the first of its texts only."""
    yield from beside("structure", [str(verdict.kind)] if verdict.kind is not Kind.UNKNOWN else [])
    yield from beside("culprit", [culprit(each) for each in verdict.culprits])
    if verdict.collective is not None:
        number = f" #{verdict.collective.seq}" if verdict.collective.seq >= 0 else ""
        yield "collective", f"{verdict.collective.operation or 'collective'}{number}"
    waiting = [f"{each.who} waits for {each.on}: {each.what}" for each in verdict.waiting[:6]]
    yield from beside("waiting", waiting)
    yield from beside("evidence", [fact(each) for each in verdict.evidence])
    yield from advice(verdict)


def culprit(who: Culprit) -> str:
    """`rank 3 (host a) in step() at train.py:7`."""
    name = who.name or (who.role if who.rank is None else f"rank {who.rank}") or who.host
    host = f" (host {who.host})" if who.host and who.host != name else ""
    return f"{name}{host}{f' in {who.where}' if who.where else ''}"


def fact(said: Fact) -> str:
    """The line and where it stands."""
    place = f"{said.file}:{said.line}" if said.line is not None else said.file or said.source
    return f"{said.text}  [{place}]" if place else said.text
