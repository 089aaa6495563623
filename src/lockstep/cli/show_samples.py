"""`lockstep samples`: shows completions of a run's step, with their rewards."""

import json
from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import REFUSED, require_extra
from lockstep.report.command_events import TERMINAL

SHOWN_CHARS = 1000
"""The most characters of each text without `--full`."""


def command(
    run: Annotated[Path, typer.Argument(help="Folder of the run, finished, interrupted or in progress.")],
    step: Annotated[int | None, typer.Option(min=1, help="Which step, from 1; the newest by default.")] = None,
    count: Annotated[int, typer.Option("--n", "-n", min=1, metavar="K", help="How many completions.")] = 4,
    best: Annotated[bool, typer.Option("--best", help="Those with the highest rewards.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest rewards.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Whole texts, with their line breaks.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON, with whole texts.")] = False,
) -> None:
    """Show completions of a run's step with their rewards: from the best to the worst, or only one end."""
    require_extra("train", "lockstep samples")
    from lockstep.ledger.errors import LedgerError
    from lockstep.ledger.ledger import Ledger
    from lockstep.ledger.step_samples import StepSamples, read_samples
    from lockstep.report.completion_samples import sample_record, sample_text
    from lockstep.report.safe_console import SafeConsole

    def show(found: StepSamples) -> None:
        console = SafeConsole(soft_wrap=True)
        where = f"from {found.file}" if found.file else "kept by the run; the step file is deleted"
        head = f"step {found.number}: {len(found.samples)} of {found.total} completions, {where}"
        console.print(head, style="bold", markup=False)
        for sample in found.samples:
            console.print()
            console.print(sample_text(sample, None if full else SHOWN_CHARS))

    try:
        if best and worst:
            raise typer.BadParameter("--best and --worst exclude each other: take one, or neither for both ends")
        with Ledger.reader(run) as ledger:
            found = read_samples(ledger, step, count, "best" if best else "worst" if worst else "spread")
    except (LedgerError, ValueError, OSError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error
    if as_json:
        samples = [sample_record(sample) for sample in found.samples]
        file = None if found.file is None else str(found.file)
        typer.echo(
            json.dumps(
                {"step": found.number, "file": file, "completions": found.total, "samples": samples}, default=str
            )
        )
    else:
        show(found)
