"""`lockstep report`: writes the HTML report of a run, or shows its communication."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import REFUSED, require_extra
from lockstep.report.command_events import TERMINAL


def command(
    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of the run, which may still be running. With --comm, also a file of lockstep watch "
            "--communication."
        ),
    ],
    comm: Annotated[
        bool,
        typer.Option("--comm", help="Show which rank waits for which, and how ranks are loaded, instead."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --comm: print only JSON.")] = False,
) -> None:
    """Write the HTML report of a run, finished or not, and list its incidents."""
    if as_json and not comm:
        TERMINAL.refuse(ValueError("--json shows the figures of --comm: add --comm, or leave out --json"))
        raise typer.Exit(REFUSED)
    if comm:
        _show_communication(run, as_json)
        return
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
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error


def _show_communication(run: Path, as_json: bool) -> None:
    from lockstep.ledger.errors import LedgerError
    from lockstep.report.communication.communication_summary import communication_summary
    from lockstep.report.communication.communication_table import render_text
    from lockstep.report.safe_console import SafeConsole

    try:
        if not run.exists():
            raise FileNotFoundError(f"{run} does not exist: give a run's folder, or a file of watch --communication")
        summary = communication_summary(run)
    except (LedgerError, OSError, ValueError, LookupError, TypeError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        SafeConsole(soft_wrap=True).print(render_text(summary), markup=False, highlight=False)
