"""A report of checks for the terminal."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.doctor.answer.text import safe
from lockstep.doctor.finding import Finding, Report, Rung, Severity
from lockstep.watch.naming import some

_MARKS: dict[Severity, tuple[str, str]] = {
    "error": ("error", "bold red"),
    "warning": ("warning", "yellow"),
    "note": ("note", "cyan"),
    "ok": ("ok", "green"),
    "unchecked": ("unchecked", "dim"),
}
_ORDER: tuple[Severity, ...] = ("error", "warning", "note", "ok", "unchecked")


def render(report: Report) -> RenderableType:
    """Each rung with its findings, worst first, then the answer in one line."""
    parts = [render_rung(rung, is_of_several(report)) for rung in report.rungs if rung.findings]
    return Group(*parts, summary(report))


def is_of_several(report: Report) -> bool:
    """Whether it is about more than one host, so that each finding says about which."""
    return len({finding.host for finding in report.findings if finding.host}) > 1


def summary(report: Report) -> Text:
    """Whether anything is wrong, and what was not looked at."""
    counts = report.counts()
    if not report.passed:
        said = Text(_number(counts["error"], "error"), "bold red")
    elif counts["warning"]:
        said = Text(f"no errors, {_number(counts['warning'], 'warning')}", "yellow")
    else:
        said = Text("nothing is wrong", "bold green")
    others = [_number(counts["warning"], "warning")] if counts["warning"] and not report.passed else []
    others += [f"{counts['ok']} ok"] if counts["ok"] else []
    if counts["unchecked"]:
        others.append(f"{counts['unchecked']} could not be checked here")
    return Text.assemble(said, (f"  ({', '.join(others)})" if others else "", "dim"))


def _number(many: int, noun: str) -> str:
    return f"{many} {noun}{'s' if many != 1 else ''}"


def render_rung(rung: Rung, several: bool) -> RenderableType:
    """Its findings, worst first, under its title."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in sorted(rung.findings, key=lambda each: _ORDER.index(each.severity)):
        mark, style = _MARKS[finding.severity]
        table.add_row(Text(mark, style), Group(*_lines(finding, several)))
    took = f"  {rung.seconds:.1f} s" if rung.seconds >= 0.05 else ""
    return Group(Text.assemble((safe(rung.title), "bold"), (took, "dim")), table, Text(""))


def _lines(finding: Finding, several: bool) -> Iterator[Text]:
    host = f"{some(finding.host.split(','), 4)}: " if several and finding.host else ""
    yield Text(safe(host + finding.seen), "dim" if finding.severity == "unchecked" else "")
    if finding.why and finding.severity != "ok":
        yield Text(safe(finding.why), "dim")
    if finding.fix:
        yield Text.assemble(("fix: ", "bold"), safe(finding.fix))
    if finding.source and finding.severity in ("error", "warning"):
        yield Text(safe(finding.source), "dim")
