"""The report of `lockstep check`: printed section by section on the terminal, or as JSON at the end."""

import json
from collections.abc import Iterable

import typer
from rich.console import Console

from lockstep.doctor.output.findings import CheckReport, Finding
from lockstep.doctor.output.findings_table import covers_several_hosts, render_section, report_summary


class LiveReport(CheckReport):
    """Prints every section as soon as it is complete.

    Args:
        as_json: print the whole report at the end instead, as one object.
    """

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._json, self._console = as_json, Console(soft_wrap=False)

    def add(self, name: str, title: str, findings: Iterable[Finding], seconds: float = 0.0) -> None:
        """Adds a section."""
        CheckReport.add(self, name, title, findings, seconds)
        if not self._json and self.rungs[-1].findings:
            self._console.print(render_section(self.rungs[-1], covers_several_hosts(self)))

    def end(self) -> None:
        """Prints the summary in one line, or the whole report as JSON."""
        if self._json:
            typer.echo(json.dumps(self.json(), indent=2))
        else:
            self._console.print(report_summary(self))

    def break_off(self, error: BaseException) -> None:
        """Ends a report after an error; prints nothing if no section is complete."""
        if self.rungs:
            seen = f"the remaining checks were not run: {str(error) or type(error).__name__}"
            self.add("ended", "Not checked", [Finding("check-ended", "unchecked", "", seen)])
            self.end()
