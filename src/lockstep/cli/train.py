"""`lockstep train`: trains a model as configured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.base.text import count_noun
from lockstep.cli import OWN_PROCESS
from lockstep.cli.terminal import REFUSED, LogFormatOption, require_extra
from lockstep.report.command_events import CommandEvents, LogFormat, open_events

if TYPE_CHECKING:
    from lockstep.config.run_config import RunConfig
    from lockstep.watch.agent.prepared_agent import PreparedAgent


def command(
    context: typer.Context,
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
    resume_from: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="RUN", help="Resume the run in this folder, or in this store: s3://bucket/prefix/NAME."
        ),
    ] = None,
    parent: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@STEP]",
            help="Start a new run from another run's checkpoint: a number of steps, best or last. Without a file, the "
            "new run has the other's config; give it a name=...",
        ),
    ] = None,
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
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Train a model as configured in the file: SFT, DPO, reward models, GRPO, PPO, online DPO, ...

    Examples:

        lockstep train examples/grpo_sort.yaml trainer.optimizer.lr=5e-4

        lockstep train --resume runs/sort-grpo

        lockstep train --from runs/sort-grpo@120 name=slower trainer.optimizer.lr=1e-4

        lockstep train run.yaml folder=/shared/runs --submit http://127.0.0.1:8265
    """
    from lockstep.ledger.store.object_store import is_store_url

    stored = resume_from is not None and is_store_url(resume_from)
    _check_options(
        stored=stored, resumes=resume_from is not None, parent=parent, dry_run=dry_run, gpus=gpus, submit=submit
    )
    values, events = list(overrides or []), open_events(log_format, "submit" if submit else "controller")
    if (resume_from is not None or parent is not None) and file is not None and "=" in file:
        values.insert(0, file)
        file = None
    config = None if file is None else _read_config(Path(file), values, events)
    require_extra("train", "lockstep train", events)
    resume = None if resume_from is None else _restored(resume_from, values, events) if stored else Path(resume_from)
    if submit is not None:
        from lockstep.cli.train_submit import submit_run

        raise typer.Exit(submit_run(submit, config, resume, values, events))
    if dry_run:
        from lockstep.cli.train_run import show_plan
        from lockstep.report.safe_console import SafeConsole

        raise typer.Exit(show_plan(config, resume, values, SafeConsole(), gpus, parent))
    if config is None or config.report.console:
        events.progress(f"{_described(config, resume, parent)}: loading libraries")
    agent = _prepared_agent(config, resume, values) if context.obj == OWN_PROCESS else None
    # Imported only now, so that a misspelt key is reported without the seconds that importing torch takes.
    from lockstep.cli.train_run import run_training

    raise typer.Exit(run_training(config, resume, values, agent, parent, events))


def _check_options(
    *, stored: bool, resumes: bool, parent: str | None, dry_run: bool, gpus: int | None, submit: str | None
) -> None:
    """Raises BadParameter if options exclude each other.

    Args:
        stored: whether the run to resume is in a store.
        resumes: whether a run is resumed.
    """
    if stored and (submit is not None or dry_run):
        raise typer.BadParameter("a run in a store cannot be resumed with --submit or --dry-run: restore it first",
                                 param_hint="--resume")  # fmt: skip
    if gpus is not None and not dry_run:
        raise typer.BadParameter("requires --dry-run: a real run uses the GPUs of its host", param_hint="--gpus")
    if submit is not None and dry_run:
        raise typer.BadParameter("cannot be combined with --dry-run, which starts nothing", param_hint="--submit")
    if parent is not None and (resumes or submit is not None):
        raise typer.BadParameter("cannot be combined with --resume or --submit", param_hint="--from")


def _read_config(file: Path, overrides: list[str], events: CommandEvents) -> "RunConfig":
    """The config in the file. Exits if it is invalid."""
    from lockstep.config.errors import ConfigError
    from lockstep.config.loader import load_config

    try:
        return load_config(file, overrides)
    except ConfigError as error:
        events.refuse(error)
        raise typer.Exit(REFUSED) from error


def _restored(url: str, overrides: list[str], events: CommandEvents) -> Path:
    """Makes the folder of a run from its store, and returns it. Exits if it cannot be."""
    from lockstep.ledger.errors import LedgerError
    from lockstep.ledger.store.restore import restore_run

    parents = [Path(each.removeprefix("folder=")) for each in overrides if each.startswith("folder=")]
    try:
        return restore_run(url, parents[-1] if parents else None, events.progress)
    except (LedgerError, OSError) as error:
        events.refuse(error)
        raise typer.Exit(REFUSED) from error


def _prepared_agent(config: "RunConfig | None", resume: Path | None, overrides: list[str]) -> "PreparedAgent | None":
    """A process that loads the run's libraries and becomes its agent; None if the config is not known yet."""
    chosen = _stored_config(resume, overrides) if config is None and resume is not None else config
    if chosen is None:
        return None
    from lockstep.run.planning.worker_preload import preload_and_prepare_agent

    return preload_and_prepare_agent(chosen)


def _stored_config(run: Path, overrides: list[str]) -> "RunConfig | None":
    """The config with which a run resumes, or None if it cannot be read, which preparing the run reports."""
    from lockstep.ledger.errors import LedgerError
    from lockstep.run.planning.resumed_run import stored_config

    try:
        return stored_config(run, overrides)
    except (LedgerError, ValueError, OSError):
        return None


def _described(config: "RunConfig | None", resume: Path | None, parent: str | None) -> str:
    """What is started, for the first line."""
    if config is None and parent is not None:
        return f"starting from {parent}"
    if config is None:
        return f"resuming {resume}"
    folder = resume or Path(config.folder) / config.name
    does = "starting" if resume is None else "resuming"
    return f"{does} {folder} ({config.recipe}, {count_noun(config.steps, 'step')})"
