"""How the report of a check reaches who waits for it: rung by rung on the terminal, or whole as JSON."""

import json
from collections.abc import Iterable

import typer
from rich.console import Console

from lockstep.doctor.finding import Finding, Report
from lockstep.doctor.render import is_of_several, render_rung, summary


class Told(Report):
    """A report whose rungs are printed as they are climbed.

    Args:
        as_json: all at the end instead, as one object.
    """

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._json, self._console = as_json, Console(soft_wrap=False)

    def add(self, name: str, title: str, findings: Iterable[Finding], seconds: float = 0.0) -> None:
        """One rung more."""
        Report.add(self, name, title, findings, seconds)
        if not self._json and self.rungs[-1].findings:
            self._console.print(render_rung(self.rungs[-1], is_of_several(self)))

    def end(self) -> None:
        """The answer in one line, or the whole report as JSON."""
        if self._json:
            typer.echo(json.dumps(self.json(), indent=2))
        else:
            self._console.print(summary(self))

    def break_off(self, error: BaseException) -> None:
        """Ends a report whose next rung could not be climbed; nothing where there is none yet."""
        if self.rungs:
            said = f"the rungs that come after these were not climbed: {str(error) or type(error).__name__}"
            self.add("ended", "Not climbed", [Finding("check-ended", "unchecked", "", said)])
            self.end()
