"""Renders explanations and verdicts: in the terminal, and as a self-contained HTML page."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lockstep.base.secure_html import with_strict_policy
from lockstep.base.text import format_duration, terminal_safe
from lockstep.watch.diagnosis.verdict import (
    Culprit,
    Fact,
    Verdict,
    VerdictKind,
    VerdictLevel,
    advice_rows,
    labeled_rows,
)

if TYPE_CHECKING:
    from lockstep.doctor.judge.log_diagnosis import Explanation


def render_explanation(explained: "Explanation") -> RenderableType:
    """Renders an explanation: the text, then culprits, collective, evidence and fix."""
    verdict = explained.verdict
    title = Text.assemble(
        (explanation_title(explained), "bold green" if verdict.cause == "benign" else "bold red"),
        f"  {verdict.cause}, confidence {verdict.confidence:.2f}",
    )
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in explanation_rows(verdict):
        table.add_row(name, Text(text))
    return Group(title, Padding(Text(verdict.explanation), (1, 0)), table)


def explanation_title(explained: "Explanation") -> str:
    """Returns the title of the failure class."""
    about = explained.rules.about.get(explained.verdict.cause)
    return about.title if about else "The logs do not show the cause"


def explanation_rows(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yields name and text of each row of an explanation; only the first of several rows has the name."""
    yield from labeled_rows("structure", [str(verdict.kind)] if verdict.kind is not VerdictKind.UNKNOWN else [])
    yield from labeled_rows("culprit", [culprit_text(each) for each in verdict.culprits])
    if verdict.collective is not None:
        number = f" #{verdict.collective.seq}" if verdict.collective.seq >= 0 else ""
        yield "collective", f"{verdict.collective.operation or 'collective'}{number}"
    waiting = [f"{each.who} waits for {each.on}: {each.what}" for each in verdict.waiting[:6]]
    yield from labeled_rows("waiting", waiting)
    yield from labeled_rows("evidence", [fact_text(each) for each in verdict.evidence])
    yield from advice_rows(verdict)


def culprit_text(culprit: Culprit) -> str:
    """Describes a culprit: `rank 3 (host a) in step() at train.py:7`."""
    name = culprit.name or (culprit.role if culprit.rank is None else f"rank {culprit.rank}") or culprit.host
    host = f" (host {culprit.host})" if culprit.host and culprit.host != name else ""
    return f"{name}{host}{f' in {culprit.where}' if culprit.where else ''}"


def fact_text(fact: Fact) -> str:
    """Returns the text of a fact, with the file and line that it comes from."""
    location = f"{fact.file}:{fact.line}" if fact.line is not None else fact.file or fact.source
    return f"{fact.text}  [{location}]" if location else fact.text


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; color: {{ colour }}; }
th { text-align: left; vertical-align: top; color: #666; font-weight: normal; padding-right: 1rem; }
td { white-space: pre-wrap; overflow-wrap: anywhere; }
code { color: #666; }
</style></head><body>
<h1>{{ title }}</h1>
<p><code>{{ verdict.cause }}</code>, confidence {{ "%.2f" | format(verdict.confidence) }}</p>
<p>{{ verdict.explanation }}</p>
<table>{% for name, text in rows %}<tr><th>{{ name }}</th><td>{{ text }}</td></tr>{% endfor %}</table>
</body></html>
"""


def explanation_page(explained: "Explanation") -> str:
    """Renders an explanation as an HTML page; text of logs is escaped."""
    from jinja2 import Environment, select_autoescape  # only `--html` needs it

    verdict = explained.verdict
    environment = Environment(autoescape=select_autoescape(default_for_string=True, default=True))
    page = environment.from_string(_PAGE).render(
        title=terminal_safe(explanation_title(explained)),
        colour="#186a3b" if verdict.cause == "benign" else "#922b21",
        verdict=verdict,
        rows=[(name, terminal_safe(text)) for name, text in explanation_rows(verdict)],
    )
    return with_strict_policy(page)


_LEVEL_COLOURS = {VerdictLevel.NOTICE: "yellow", VerdictLevel.CONFIRMED: "bold red", VerdictLevel.ACT: "bold red"}
_MAX_EVIDENCE = 12
"""Maximum number of pieces of evidence that are shown."""


def render_verdict(verdict: Verdict) -> RenderableType:
    """Renders a recorded verdict: the text, then culprits, collective, waiting processes, evidence and fix."""
    colour = "green" if verdict.cause == "benign" else _LEVEL_COLOURS[verdict.level]
    title = Text.assemble((str(verdict.kind), colour), f"  {verdict.level}, confidence {verdict.confidence:.2f}")
    if verdict.cause not in ("", "unknown"):
        title.append(f", class {verdict.cause}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _verdict_rows(verdict):
        table.add_row(name, Text(text))
    return Group(title, Padding(Text(verdict.explanation), (1, 0)), table)


def _verdict_rows(verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield from labeled_rows("culprit", [_verdict_culprit(each) for each in verdict.culprits])
    if verdict.collective is not None:
        each = verdict.collective
        site = f", called at {each.call_site}" if each.call_site else ""
        yield "collective", f"{each.operation or 'collective'} #{each.seq} on {each.communicator}{site}"
    waiting = []
    for link in verdict.waiting:
        awaited = f" for {link.on}" if link.on else ""
        if link.since_s is None:
            waiting.append(f"{link.who} waits{awaited}: {link.what}")
        else:
            waiting.append(f"{link.who} has waited{awaited} for {format_duration(link.since_s)}: {link.what}")
    yield from labeled_rows("waiting", waiting)
    shown = [fact_text(fact) for fact in verdict.evidence[:_MAX_EVIDENCE]]
    if len(verdict.evidence) > _MAX_EVIDENCE:
        shown.append(f"and {len(verdict.evidence) - _MAX_EVIDENCE} more")
    yield from labeled_rows("evidence", shown)
    yield from advice_rows(verdict)


def _verdict_culprit(culprit: Culprit) -> str:
    name = culprit.name or (culprit.role if culprit.rank is None else f"rank {culprit.rank}")
    about = [culprit.role if culprit.rank is not None else "", f"host {culprit.host}" if culprit.host else "",
             f"pid {culprit.pid}" if culprit.pid else ""]  # fmt: skip
    known = ", ".join(part for part in about if part)
    return f"{name}{f' ({known})' if known else ''}{f' in {culprit.where}' if culprit.where else ''}"
