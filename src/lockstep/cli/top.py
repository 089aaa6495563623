"""`lockstep top`: shows what every process of a run is doing."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import REFUSED, show_refusal


def command(
    run: Annotated[
        Path, typer.Argument(help="The run's folder, or the pid of one of its processes.", metavar="RUN|PID")
    ],
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between updates.", min=0.1)] = 1.0,
) -> None:
    """Show every process of a run: stage, progress, collectives and waits; suspects are at the top.

    It changes nothing in the run. Stop it with Ctrl-C."""
    from lockstep.report import top_table
    from lockstep.report.safe_console import SafeConsole
    from lockstep.watch.beacon.reader import read_beacons

    name = _run_name(run)
    if not read_beacons(name):
        typer.echo(_describe_ended(run))
    elif once:
        top_table.print_processes(name, SafeConsole())
    else:
        top_table.follow_processes(name, SafeConsole(), every)


def _run_name(run: Path) -> str:
    """The run id, after which the status files (beacons) of the processes are named. Exits if there is none."""
    from lockstep.watch.attach.run_observer import run_of_process

    file = run / "run-id"
    if file.is_file():
        return file.read_text().strip()
    run_id = run_of_process(int(run.name)) if run.name.isdigit() and not run.exists() else None
    if run_id is not None:
        return run_id
    problem = f"process {run} belongs to no run" if run.name.isdigit() else f"{run} is not the folder of a run"
    show_refusal(
        ValueError(f"{problem}: give the folder of a run started on this host, or the pid of one of its processes")
    )
    raise typer.Exit(REFUSED)


def _describe_ended(run: Path) -> str:
    """Describes, from its ledger, a run that has no process on this host."""
    from lockstep.ledger.ledger import Ledger

    with Ledger.reader(run) as ledger:
        done, steps = ledger.steps_done(), ledger.config()["steps"]
        reasons = [str(event.fields["reason"]) for event in ledger.events() if event.kind == "end"]
    reason = reasons[-1] if reasons else "killed before it began"
    return f"{run} has no process on this host; after {done} of {steps} steps: {reason}"
