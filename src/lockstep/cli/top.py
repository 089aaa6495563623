"""`lockstep top`: what every process of a run does now."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.cli.errors import REFUSED, show_refusal


def command(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    once: Annotated[bool, typer.Option("--once", help="Print one table and leave.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between looks.", min=0.1)] = 1.0,
) -> None:
    """Show every process of a run: stage, progress, and who waits for whom. Reads only; ends with Ctrl-C."""
    from lockstep.report import top
    from lockstep.watch.beacon import read_beacons

    file = run / "run-id"
    if not file.is_file():
        show_refusal(ValueError(f"{run} has no run-id: give the folder of a run that was started on this host"))
        raise typer.Exit(REFUSED)
    name = file.read_text().strip()
    if not read_beacons(name):
        typer.echo(_ended(run))
    elif once:
        top.once(name, Console())
    else:
        top.follow(name, Console(), every)


def _ended(run: Path) -> str:
    """What there is to say of a run that has no process on this host."""
    from lockstep.ledger.ledger import Ledger

    with Ledger.reader(run) as ledger:
        done, wanted = ledger.done(), ledger.config()["steps"]
        ends = [str(event.fields["reason"]) for event in ledger.events() if event.kind == "end"]
    how = ends[-1] if ends else "killed before it began"
    return f"{run} has no process on this host; after {done} of {wanted} steps: {how}"
