"""`lockstep train`: trains a model as configured."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.cli.terminal import REFUSED, require_extra, show_refusal


def command(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE.yaml", help="Config of the run; with --resume it may be omitted.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SECTION.KEY=VALUE",
            help="Overrides values of the file; an index selects an item of a list: reward.terms.0.weight=2.",
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Resume the run in this folder.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show config, processes, memory and collectives without starting anything."),
    ] = False,
    gpus: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --dry-run: plan for a host with N GPUs.")
    ] = None,
    submit: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Submit the run as a job to the Ray cluster with this dashboard address, and follow it.",
        ),
    ] = None,
) -> None:
    """Train a model: SFT or GRPO, as configured in the file.

    Examples:

        lockstep train examples/grpo_sort.yaml trainer.optimizer.lr=5e-4

        lockstep train --resume runs/sort-grpo

        lockstep train run.yaml folder=/shared/runs --submit http://127.0.0.1:8265
    """
    from lockstep.config.errors import ConfigError
    from lockstep.config.loader import load_config

    if gpus is not None and not dry_run:
        raise typer.BadParameter("requires --dry-run: a real run uses the GPUs of its host", param_hint="--gpus")
    if submit is not None and dry_run:
        raise typer.BadParameter("cannot be combined with --dry-run, which starts nothing", param_hint="--submit")
    values = list(overrides or [])
    if resume is not None and file is not None and "=" in file:
        values.insert(0, file)
        file = None
    try:
        config = load_config(Path(file), values) if file is not None else None
    except ConfigError as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    require_extra("train", "lockstep train")
    if submit is not None:
        from lockstep.cli.train_submit import submit_run

        raise typer.Exit(submit_run(submit, config, resume, values))
    # Imported only now, so that a misspelt key is reported without the seconds that importing torch takes.
    from lockstep.cli.train_run import run_training, show_plan

    if dry_run:
        from lockstep.report.safe_console import SafeConsole

        raise typer.Exit(show_plan(config, resume, values, SafeConsole(), gpus))
    raise typer.Exit(run_training(config, resume, values))
