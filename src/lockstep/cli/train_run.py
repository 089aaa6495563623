"""Implementation of `lockstep train`: prepares and runs the training, or shows its plan."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import yaml
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from lockstep.base.text import count_noun
from lockstep.cli.failure_message import show_failure, show_interruption
from lockstep.cli.terminal import FAILED, INTERRUPTED, REFUSED
from lockstep.cluster.placement.assignment import Assignment, group_alike
from lockstep.cluster.placement.bundles import abbreviate_names, make_bundles
from lockstep.config.cluster import PlacementConfig
from lockstep.config.loader import apply_overrides, check_config
from lockstep.config.run_config import RunConfig
from lockstep.ledger.errors import LedgerError
from lockstep.models.model_facts import ModelFacts
from lockstep.recipes import train
from lockstep.report.command_events import TERMINAL, CommandEvent, CommandEvents
from lockstep.run.errors import Interrupted, RunFinished, RunRefused
from lockstep.run.planning.parent_run import parent_config, split_parent
from lockstep.run.planning.prepare import DryRun, PreparedRun, dry_run, prepare_run
from lockstep.run.planning.run_plan import RunPlan
from lockstep.run.planning.working_folder import in_working_folder
from lockstep.watch.agent.prepared_agent import PreparedAgent

Config = RunConfig | None
PlanOrRun = TypeVar("PlanOrRun", PreparedRun, DryRun)
_PLACEMENT_COLUMNS = "node", "address", "processes", "CPUs", "GPUs"


def run_training(
    config: Config,
    resume: Path | None,
    overrides: Sequence[str],
    agent: PreparedAgent | None = None,
    parent: str | None = None,
    events: CommandEvents = TERMINAL,
) -> int:
    """Runs the training and returns the exit code. A resumed run continues in the folder in which it began.

    Args:
        agent: a process that waits to become the agent of a run on this host.
        events: where to report.
    """
    if config is None or config.report.console:
        events.progress("checking model, data and rewards")
    with ExitStack() as stack:

        def prepare() -> PreparedRun:
            run, found, place = _start_point(stack, config, resume, overrides, parent, events)
            return prepare_run(found, run, overrides, parent=place)

        prepared = _prepare_or_exit_code(prepare, events)
        if isinstance(prepared, int):
            if agent is not None:
                agent.discard()
            return prepared
        prepared.agent, prepared.events = agent, events
        return _train_prepared(prepared)


def _train_prepared(prepared: PreparedRun) -> int:
    events, assignment = prepared.events, prepared.plan.assignment
    if assignment is not None:
        rows = [dict(zip(_PLACEMENT_COLUMNS, row, strict=True)) for row in assignment.rows()]
        text, table = f"placement on {count_noun(len(rows), 'node')}", _assignment_table(assignment)
        events.report(CommandEvent("placement", text, table, fields={"nodes": rows}))
    if prepared.config.report.console:
        events.progress(f"starting {abbreviate_names([each.name for each in prepared.plan.processes])}")
    try:
        train(prepared)
    except RunRefused as error:
        events.refuse(error)
        return REFUSED
    except (Interrupted, KeyboardInterrupt):
        show_interruption(prepared.folder, events)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  # the outermost frame shows every failure and sets the exit code
        show_failure(error, prepared.folder, events)
        return FAILED
    return 0


def show_plan(
    config: Config,
    resume: Path | None,
    overrides: Sequence[str],
    console: Console,
    gpus: int | None = None,
    parent: str | None = None,
) -> int:
    """Prints the resolved config and the plan; returns the exit code.

    Args:
        gpus: number of GPUs of the host to plan for; by default that of this host.
    """
    with ExitStack() as stack:

        def prepare() -> DryRun:
            run, chosen, place = _start_point(stack, config, resume, overrides, parent)
            return dry_run(chosen, run, overrides, gpus, place)

        found = _prepare_or_exit_code(prepare)
    if isinstance(found, int):
        return found
    text = yaml.safe_dump(found.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    console.print(Syntax(text, "yaml", background_color="default"))
    console.print(_process_table(found.plan))
    if found.plan.wanted:
        console.print(_placement_table(found.plan, found.config.placement))
    if found.model is not None:
        console.print(_collective_table(found.plan))
        console.print(_size_line(found.plan, found.model))
    for role, model in found.other_models.items():
        console.print(f"{role}: {_model_size(model)}")
    return 0


def _start_point(
    stack: ExitStack,
    config: Config,
    resume: Path | None,
    overrides: Sequence[str],
    parent: str | None,
    events: CommandEvents = TERMINAL,
) -> tuple[Path | None, Config, str | None]:
    """Returns the run to resume, the config, and the checkpoint of another run to start from. A run that takes its
    config from another run, or from its own past, continues in that run's working folder."""
    place = None
    if parent is not None:
        run, step = split_parent(parent)
        place = f"{run}@{step}"
        if config is None:
            config = check_config(apply_overrides(parent_config(run), overrides), source=str(run))
            _enter_working_folder(stack, run, events)
    return (None if resume is None else _enter_working_folder(stack, resume, events)), config, place


def _enter_working_folder(stack: ExitStack, run: Path, events: CommandEvents) -> Path:
    """Changes to the folder in which a run began; returns the run's folder from there."""
    before = Path.cwd()
    found = stack.enter_context(in_working_folder(run))
    if Path.cwd() != before:
        events.note(f"relative paths in the config refer to {Path.cwd()}, where the run began")
    return found


def _prepare_or_exit_code(prepare: Callable[[], PlanOrRun], events: CommandEvents = TERMINAL) -> PlanOrRun | int:
    """Prepares the run and shows its notes; if nothing can be started, says why and returns the exit code."""
    try:
        found = prepare()
    except RunFinished as done:
        events.note(str(done))
        return 0
    except (RunRefused, LedgerError, ValueError, OSError) as error:
        events.refuse(error)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    for note in found.notes:
        events.note(note)
    return found


def _size_line(plan: RunPlan, model: ModelFacts) -> str:
    snapshots = plan.memory_copy
    snapshots_text = f", {snapshots / 2**20:,.0f} MiB for snapshots of the trainer's state" if snapshots else ""
    return (
        f"{_model_size(model)}; about {plan.memory / 2**30:.2f} GiB in all, {plan.shared_memory / 2**20:,.0f} MiB of "
        f"shared memory for published weights{snapshots_text}"
    )


def _model_size(model: ModelFacts) -> str:
    adapter = model.adapter
    trained = "" if adapter is None else f", {adapter.trained / 1e6:,.2f} M trained (adapter)"
    return f"{model.parameters / 1e6:,.2f} M parameters, {model.dtype}{trained}"


def _process_table(plan: RunPlan) -> Table:
    table = Table(title="processes", title_justify="left", box=None, pad_edge=False)
    for column in ("name", "role", "device", "threads", "memory"):
        table.add_column(column, justify="right" if column in ("threads", "memory") else "left")
    for process in plan.processes:
        memory = f"{process.memory / 2**20:,.0f} MiB" if process.memory else ""
        table.add_row(process.name, process.role, process.device, str(process.threads), memory)
    return table


def _placement_table(plan: RunPlan, placement: PlacementConfig) -> Table:
    """The node of each process, or the bundles to reserve when the nodes are not known."""
    if plan.assignment is not None:
        return _assignment_table(plan.assignment)
    title = "bundles, each on one node" + (" (the nodes are in use now)" if plan.busy else "")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("processes", "bundles", "each needs"):
        table.add_column(column)
    for group in group_alike(make_bundles(plan.wanted, placement)):
        names = abbreviate_names([name for bundle in group for name in bundle.processes])
        table.add_row(names, str(len(group)), group[0].needs())
    return table


def _assignment_table(assignment: Assignment) -> Table:
    table = Table(title="placement", title_justify="left", box=None, pad_edge=False)
    for column in _PLACEMENT_COLUMNS:
        table.add_column(column)
    for row in assignment.rows():
        table.add_row(*row)
    return table


def _collective_table(plan: RunPlan) -> Table:
    table = Table(title="collectives of a step, on every trainer rank", title_justify="left", box=None, pad_edge=False)
    for column in ("operation", "communicator", "times", "largest"):
        table.add_column(column)
    for collective in plan.collectives:
        size = f"{collective.bytes / 2**20:,.2f} MiB" if collective.bytes > 2**14 else f"{collective.bytes} B"
        table.add_row(collective.operation, collective.communicator, collective.times, size)
    if not plan.collectives:
        table.add_row("none", "", "one rank", "")
    return table
