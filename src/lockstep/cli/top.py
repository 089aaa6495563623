"""`lockstep top`: what every process of a run does now."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.cli.terminal import REFUSED, show_refusal


def command(
    run: Annotated[
        Path, typer.Argument(help="The run's folder, or the pid of one of its processes.", metavar="RUN|PID")
    ],
    once: Annotated[bool, typer.Option("--once", help="Print one table and leave.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 1.0,
) -> None:
    """Show every process of a run: stage, progress, collectives, who waits for whom, and who is suspected on top. Reads
    only; ends with Ctrl-C."""
    from lockstep.report import process_table
    from lockstep.watch.beacon.reader import read_beacons

    name = _run_name(run)
    if not read_beacons(name):
        typer.echo(_describe_ended(run))
    elif once:
        process_table.print_processes(name, Console())
    else:
        process_table.follow_processes(name, Console(), every)


def _run_name(run: Path) -> str:
    """The run's name among the beacons. Exits where there is none."""
    from lockstep.watch.attach.run_observer import run_of_process

    file = run / "run-id"
    if file.is_file():
        return file.read_text().strip()
    known = run_of_process(int(run.name)) if run.name.isdigit() and not run.exists() else None
    if known is not None:
        return known
    what = f"process {run} has no beacon" if run.name.isdigit() else f"{run} has no run-id"
    show_refusal(ValueError(f"{what}: give the folder of a run that was started on this host, or the pid of a process"))
    raise typer.Exit(REFUSED)


def _describe_ended(run: Path) -> str:
    """What there is to say of a run that has no process on this host."""
    from lockstep.ledger.ledger import Ledger

    with Ledger.reader(run) as ledger:
        done, wanted = ledger.done(), ledger.config()["steps"]
        ends = [str(event.fields["reason"]) for event in ledger.events() if event.kind == "end"]
    how = ends[-1] if ends else "killed before it began"
    return f"{run} has no process on this host; after {done} of {wanted} steps: {how}"
