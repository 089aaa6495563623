"""`lockstep train`: run a recipe."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lockstep.cli.terminal import REFUSED, show_refusal
from lockstep.config.errors import ConfigError
from lockstep.config.loader import load_config


def command(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE.yaml", help="What to run; not needed with --resume.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SECTION.KEY=VALUE", help="Values in place of the file's; lists by number: reward.terms.0.weight=2."
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with the run in this folder.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show config, processes, memory and collectives; start nothing.")
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --dry-run: plan for a host with N GPUs.")
    ] = None,
    submit: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Run as a job of the Ray cluster whose dashboard is there, and follow it."
        ),
    ] = None,
) -> None:
    """Train a model: SFT or GRPO, as the file says.

    Examples:

        lockstep train examples/grpo_sort.yaml trainer.optimizer.lr=5e-4

        lockstep train --resume runs/sort-grpo

        lockstep train run.yaml folder=/shared/runs --submit http://127.0.0.1:8265
    """
    if gpus is not None and not dry_run:
        raise typer.BadParameter("goes with --dry-run: a run takes the GPUs that there are", param_hint="--gpus")
    if submit is not None and dry_run:
        raise typer.BadParameter("does not go with --dry-run: it starts the run", param_hint="--submit")
    values = list(overrides or [])
    if resume is not None and file is not None and "=" in file:
        values.insert(0, file)
        file = None
    try:
        config = load_config(Path(file), values) if file is not None else None
    except ConfigError as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    if submit is not None:
        from lockstep.cli.train_submit import submit_run

        raise typer.Exit(submit_run(submit, config, resume, values))
    # Imported only now: torch and transformers take seconds, and help or a misspelt key should not wait for them.
    from lockstep.cli.train_run import run_training, show_plan

    if dry_run:
        raise typer.Exit(show_plan(config, resume, values, Console(), gpus))
    raise typer.Exit(run_training(config, resume, values))
