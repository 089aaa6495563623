"""Renders answers and verdicts in the terminal."""

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lockstep.base.text import format_duration
from lockstep.doctor.output.job_answer import JobAnswer, OtherCause
from lockstep.watch.diagnosis.verdict import Culprit, Fact, Verdict, VerdictKind, VerdictLevel

_LEVEL_COLOURS = {VerdictLevel.NOTICE: "yellow", VerdictLevel.CONFIRMED: "bold red", VerdictLevel.ACT: "bold red"}
_MAX_EVIDENCE = 12
"""Maximum number of pieces of evidence that are shown."""


def render_answer(answer: JobAnswer) -> RenderableType:
    """Renders an answer: title, text, then culprits, collective, evidence, alternatives and fix."""
    verdict = answer.verdict
    if answer.recorded:
        title = _title_of_recorded(verdict)
    else:
        title = Text.assemble(
            (answer.title, "bold green" if answer.healthy else "bold red"),
            f"  {verdict.cause}, confidence {verdict.confidence:.2f}",
        )
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in answer_rows(answer):
        table.add_row(name, Text(text))
    return Group(title, Padding(Text(verdict.explanation), (1, 0), expand=False), table)


def _title_of_recorded(verdict: Verdict) -> Text:
    colour = "green" if verdict.cause == "benign" else _LEVEL_COLOURS[verdict.level]
    title = Text.assemble((str(verdict.kind), colour), f"  {verdict.level}, confidence {verdict.confidence:.2f}")
    if verdict.cause not in ("", "unknown"):
        title.append(f", class {verdict.cause}")
    return title


def answer_rows(answer: JobAnswer) -> Iterator[tuple[str, str]]:
    """Yields name and text of each row of an answer; only the first of several rows has the name."""
    verdict = answer.verdict
    if not answer.recorded:
        yield from _labeled("structure", [str(verdict.kind)] if verdict.kind is not VerdictKind.UNKNOWN else [])
    yield from _labeled("culprit", [culprit_text(each, full=answer.recorded) for each in verdict.culprits])
    if verdict.collective is not None:
        yield "collective", _collective_text(verdict)
    yield from _labeled("waiting", _waiting_texts(verdict))
    if answer.run is not None:
        yield from _labeled("results", [f"{name}: {value}" for name, value in answer.run.results.items()])
    yield from _labeled("evidence", evidence_texts(verdict))
    yield from _labeled("alternatives", [other_text(each) for each in answer.others])
    yield from _labeled("fix", [verdict.fix] if verdict.fix else [])
    yield from _labeled("next steps", verdict.collect)


def _labeled(name: str, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    for at, text in enumerate(texts):
        yield name if at == 0 else "", text


def _collective_text(verdict: Verdict) -> str:
    each = verdict.collective
    assert each is not None
    number = f" #{each.seq}" if each.seq >= 0 else ""
    communicator = f" on {each.communicator}" if each.communicator else ""
    site = f", called at {each.call_site}" if each.call_site else ""
    return f"{each.operation or 'collective'}{number}{communicator}{site}"


def _waiting_texts(verdict: Verdict) -> list[str]:
    found = []
    for link in verdict.waiting[:_MAX_EVIDENCE]:
        awaited = f" for {link.on}" if link.on else ""
        if link.since_s is None:
            found.append(f"{link.who} waits{awaited}: {link.what}")
        else:
            found.append(f"{link.who} has waited{awaited} for {format_duration(link.since_s)}: {link.what}")
    return found


def evidence_texts(verdict: Verdict) -> list[str]:
    """Returns the pieces of evidence, as many as are shown."""
    shown = [fact_text(fact) for fact in verdict.evidence[:_MAX_EVIDENCE]]
    if len(verdict.evidence) > _MAX_EVIDENCE:
        shown.append(f"and {len(verdict.evidence) - _MAX_EVIDENCE} more")
    return shown


def other_text(other: OtherCause) -> str:
    """Describes an alternative and what would distinguish it: `host_oom (0.30), The host ran out of memory. To tell:
    dmesg of the host`."""
    title = f", {other.title}" if other.title else ""
    telling = f". To tell: {'; '.join(other.distinguish)}" if other.distinguish else ""
    return f"{other.cause} ({other.confidence:.2f}){title}{telling}"


def culprit_text(culprit: Culprit, full: bool = False) -> str:
    """Describes a culprit: `rank 3 (host a) in step() at train.py:7`.

    Args:
        full: Also name role and pid, which a recorded verdict knows.
    """
    name = culprit.name or (culprit.role if culprit.rank is None else f"rank {culprit.rank}") or culprit.host
    about = [f"host {culprit.host}"] if culprit.host and culprit.host != name else []
    if full:
        about = [
            *([culprit.role] if culprit.rank is not None and culprit.role else []),
            *about,
            *([f"pid {culprit.pid}"] if culprit.pid else []),
        ]
    known = f" ({', '.join(about)})" if about else ""
    return f"{name}{known}{f' in {culprit.where}' if culprit.where else ''}"


def place_of(fact: Fact) -> str:
    """Returns file and line of a fact, or its source; "" if it has none."""
    return f"{fact.file}:{fact.line}" if fact.line is not None else fact.file or fact.source


def fact_text(fact: Fact) -> str:
    """Returns the text of a fact, with the file and line that it comes from."""
    location = place_of(fact)
    return f"{fact.text}  [{location}]" if location else fact.text
