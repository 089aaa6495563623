"""`lockstep report`: writes the HTML report of a run."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import REFUSED, require_extra, show_refusal


def command(run: Annotated[Path, typer.Argument(help="Folder of the run, which may still be running.")]) -> None:
    """Write the HTML report of a run, finished or not, and list its incidents."""
    require_extra("train", "lockstep report")
    from lockstep.ledger.errors import LedgerError
    from lockstep.ledger.ledger import Ledger
    from lockstep.ledger.run_incidents import incidents_of
    from lockstep.report.html_report import write_report
    from lockstep.report.safe_console import SafeConsole

    console, notes = SafeConsole(soft_wrap=True), SafeConsole(stderr=True, soft_wrap=True)
    try:
        with Ledger.reader(run) as ledger:
            for each in incidents_of(ledger.events()):
                line = f"incident: {each.workers} ({each.what}), {each.outcome_text}  {each.folder}"
                notes.print(line.rstrip(), markup=False)
            console.print(str(write_report(ledger)), markup=False)
    except (LedgerError, OSError) as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
