"""`lockstep top`: shows what every process of a run is doing."""

import os
from pathlib import Path
from typing import Annotated

import typer

from lockstep.base.text import count_noun
from lockstep.cli.terminal import REFUSED
from lockstep.report.command_events import TERMINAL


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

    name = run_name(run)
    if not read_beacons(name):
        SafeConsole(soft_wrap=True).print(describe_ended(run), markup=False)
    elif once:
        top_table.print_processes(name, SafeConsole())
    else:
        top_table.follow_processes(name, SafeConsole(), every)


def run_name(run: Path) -> str:
    """The run id, after which the status files (beacons) of the processes are named. Exits if there is none."""
    from lockstep.base.folders import read_run_id, run_shm_dir
    from lockstep.watch.attach.run_observer import run_of_process

    if (run / "run-id").is_file():
        try:
            name = read_run_id(run / "run-id")
        except (ValueError, OSError) as error:
            TERMINAL.refuse(error)
            raise typer.Exit(REFUSED) from error
        if not run_shm_dir(name).exists():
            show_runs_of(run.stat().st_uid)
        return name
    if run.name.isdigit() and (Path("/proc") / run.name).exists():
        show_runs_of((Path("/proc") / run.name).stat().st_uid)
    run_id = run_of_process(int(run.name)) if run.name.isdigit() and not run.exists() else None
    if run_id is not None:
        return run_id
    problem = f"process {run} belongs to no run" if run.name.isdigit() else f"{run} is not the folder of a run"
    TERMINAL.refuse(
        ValueError(f"{problem}: give the folder of a run started on this host, or the pid of one of its processes")
    )
    raise typer.Exit(REFUSED)


def show_runs_of(user: int) -> None:
    """For root: looks for the processes of runs where that user has them."""
    from lockstep.base.folders import shm_root

    if os.geteuid() == 0:
        os.environ.setdefault("LOCKSTEP_BEACONS", str(shm_root(user)))


def describe_ended(run: Path) -> str:
    """Describes, from its ledger, a run that has no process on this host. Exits if the ledger cannot be read."""
    from lockstep.ledger.errors import LedgerError
    from lockstep.ledger.ledger import Ledger

    try:
        with Ledger.reader(run) as ledger:
            done, steps = ledger.steps_done(), ledger.config()["steps"]
            reasons = [str(event.fields["reason"]) for event in ledger.events() if event.kind == "end"]
    except (LedgerError, OSError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error
    reason = reasons[-1] if reasons else "killed before it began"
    return f"{run} has no process on this host; after {done} of {count_noun(steps, 'step')}: {reason}"
