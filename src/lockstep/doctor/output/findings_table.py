"""Renders a report of findings for the terminal, as a whole or section by section while a check runs."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lockstep.base.text import count_noun, summarize_list
from lockstep.doctor.output.findings import CheckReport, CheckSection, Finding, Severity

_SEVERITY_STYLES: dict[Severity, tuple[str, str]] = {
    "error": ("error", "bold red"),
    "warning": ("warning", "yellow"),
    "note": ("note", "cyan"),
    "ok": ("ok", "green"),
    "unchecked": ("unchecked", "dim"),
}
_SEVERITY_ORDER: tuple[Severity, ...] = ("error", "warning", "note", "ok", "unchecked")


def render_report(report: CheckReport) -> RenderableType:
    """Renders each section with its findings, worst first, then a one-line summary."""
    parts = [render_section(section, covers_several_hosts(report)) for section in report.sections if section.findings]
    return Group(*parts, report_summary(report))


def covers_several_hosts(report: CheckReport) -> bool:
    """Whether the report covers several hosts, so that each finding must name its host."""
    return len({finding.host for finding in report.findings if finding.host}) > 1


def report_summary(report: CheckReport) -> Text:
    """Renders the summary: the number of problems, and the number of checks that could not be made."""
    counts = report.counts()
    if not report.passed:
        summary = Text(count_noun(counts["error"], "error"), "bold red")
    elif counts["warning"]:
        summary = Text(f"no errors, {count_noun(counts['warning'], 'warning')}", "yellow")
    else:
        summary = Text("no problems found", "bold green")
    others = [count_noun(counts["warning"], "warning")] if counts["warning"] and not report.passed else []
    others += [f"{counts['ok']} ok"] if counts["ok"] else []
    if counts["unchecked"]:
        others.append(f"{counts['unchecked']} could not be checked here")
    return Text.assemble(summary, (f"  ({', '.join(others)})" if others else "", "dim"))


def render_section(section: CheckSection, several: bool) -> RenderableType:
    """Renders the title of a section and its findings, worst first.

    Args:
        several: Whether the report covers several hosts, so that each finding names its host.
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in sorted(section.findings, key=lambda each: _SEVERITY_ORDER.index(each.severity)):
        mark, style = _SEVERITY_STYLES[finding.severity]
        table.add_row(Text(mark, style), Group(*_finding_lines(finding, several)))
    duration = f"  {section.seconds:.1f} s" if section.seconds >= 0.05 else ""
    return Group(Text.assemble((section.title, "bold"), (duration, "dim")), table, Text(""))


def _finding_lines(finding: Finding, several: bool) -> Iterator[Text]:
    host = f"{summarize_list(finding.host.split(','), 4)}: " if several and finding.host else ""
    yield Text(host + finding.seen, "dim" if finding.severity == "unchecked" else "")
    if finding.why and finding.severity != "ok":
        yield Text(finding.why, "dim")
    if finding.fix:
        yield Text.assemble(("fix: ", "bold"), finding.fix)
    if finding.source and finding.severity in ("error", "warning"):
        yield Text(finding.source, "dim")


class LiveReport(CheckReport):
    """A report that prints every section as soon as it is complete.

    Args:
        console: where to print.
        as_json: Print nothing before the end, and then the whole report as one JSON object.
        on_section: is called with every section as soon as it is complete.
    """

    def __init__(
        self, console: Console, as_json: bool, on_section: Callable[[CheckSection], None] | None = None
    ) -> None:
        super().__init__()
        self._json, self._console, self._on_section = as_json, console, on_section

    def add(self, name: str, title: str, findings: Iterable[Finding], seconds: float = 0.0) -> None:
        """Adds a section."""
        CheckReport.add(self, name, title, findings, seconds)
        if self._on_section is not None:
            self._on_section(self.sections[-1])
        if not self._json and self.sections[-1].findings:
            self._console.print(render_section(self.sections[-1], covers_several_hosts(self)))

    def finish(self) -> None:
        """Prints the summary in one line, or the whole report as JSON."""
        if self._json:
            sys.stdout.write(json.dumps(self.json(), indent=2) + "\n")
            sys.stdout.flush()
        else:
            self._console.print(report_summary(self))

    def finish_early(self, error: BaseException) -> None:
        """Finishes the report after an error; prints nothing if no section is complete."""
        if self.sections:
            seen = f"the remaining checks were not run: {str(error) or type(error).__name__}"
            self.add("ended", "Not checked", [Finding("check-ended", "unchecked", "", seen)])
            self.finish()
