"""`lockstep export`: writes the model of a run's checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.base.text import count_noun
from lockstep.cli.terminal import REFUSED, print_text, require_extra
from lockstep.report.command_events import TERMINAL


def command(
    run: Annotated[Path, typer.Argument(help="Folder of the run, finished, interrupted or in progress.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    step: Annotated[
        str, typer.Option(help="Which checkpoint: last, best, or the number of steps done.", metavar="N|best|last")
    ] = "last",
    role: Annotated[
        str | None, typer.Option(help="Which trained model, such as critic; the policy by default.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter alone, for peft.")] = False,
) -> None:
    """Write the model of a run's checkpoint, for transformers, vLLM or the next run."""
    require_extra("train", "lockstep export")
    from lockstep.ledger.errors import LedgerError
    from lockstep.run.errors import RunRefused
    from lockstep.run.planning.working_folder import in_working_folder
    from lockstep.train.errors import CheckpointError

    out = out.absolute()
    try:
        with in_working_folder(run) as folder:
            from lockstep.run.trained_models.checkpoint_export import export_checkpoint  # imports torch

            done = export_checkpoint(folder, out, step, role, adapter)
    except (RunRefused, LedgerError, CheckpointError, ValueError, OSError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error
    print_text(f"{out}: the model of {run} after {count_noun(done, 'step')}")
