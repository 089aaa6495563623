"""What `lockstep train` does once its arguments are read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import yaml
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from lockstep.cli.errors import FAILED, INTERRUPTED, REFUSED, show_note, show_refusal
from lockstep.cli.failures import show_failure, show_interruption
from lockstep.cluster.bundles import bundles_of, shortened
from lockstep.cluster.placement import alike
from lockstep.config.placement import Placement
from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.ledger.errors import LedgerError
from lockstep.recipes import train
from lockstep.run.errors import Finished, Interrupted, Refused
from lockstep.run.facts import ModelFacts
from lockstep.run.plan import Plan
from lockstep.run.prepare import Prepared, prepare
from lockstep.run.survey import Survey, survey

Config = SFTConfig | GRPOConfig | None
Found = TypeVar("Found", Prepared, Survey)


def start(config: Config, resume: Path | None, overrides: Sequence[str]) -> int:
    """Trains; the exit code."""
    prepared = _looked(lambda: prepare(config, resume, overrides))
    if isinstance(prepared, int):
        return prepared
    if prepared.plan.assignment is not None:
        Console(stderr=True).print(_places(prepared.plan, prepared.config.placement))
    try:
        train(prepared)
    except Refused as error:
        show_refusal(error)
        return REFUSED
    except (Interrupted, KeyboardInterrupt):
        show_interruption(prepared.folder)
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  # the outermost frame: whatever failed is shown, and the exit code says so
        show_failure(error, prepared.folder)
        return FAILED
    return 0


def show_plan(
    config: Config, resume: Path | None, overrides: Sequence[str], console: Console, gpus: int | None = None
) -> int:
    """Prints the resolved config and the plan, for a host with so many GPUs where it is not for this one; the exit
    code."""
    found = _looked(lambda: survey(config, resume, overrides, gpus))
    if isinstance(found, int):
        return found
    text = yaml.safe_dump(found.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    console.print(Syntax(text, "yaml", background_color="default"))
    console.print(_processes(found.plan))
    if found.plan.wanted:
        console.print(_places(found.plan, found.config.placement))
    if found.model is not None:
        console.print(_collectives(found.plan))
        console.print(_sizes(found.plan, found.model))
    return 0


def _looked(look: Callable[[], Found]) -> Found | int:
    """What was found, with its notes shown; the exit code where there is nothing to start, which is said."""
    try:
        found = look()
    except Finished as done:
        show_note(str(done))
        return 0
    except (Refused, LedgerError, ValueError, OSError) as error:
        show_refusal(error)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    for note in found.notes:
        show_note(note)
    return found


def _sizes(plan: Plan, model: ModelFacts) -> str:
    adapter = model.adapter
    trained = "" if adapter is None else f", {adapter.trained / 1e6:,.2f} M trained (adapter)"
    copies = plan.memory_copy
    kept = f", {copies / 2**20:,.0f} MiB for copies of the trainer's state" if copies else ""
    return (
        f"{model.parameters / 1e6:,.2f} M parameters, {model.dtype}{trained}; about {plan.memory / 2**30:.2f} GiB in "
        f"all, {plan.shared_memory / 2**20:,.0f} MiB of shared memory for published weights{kept}"
    )


def _processes(plan: Plan) -> Table:
    table = Table(title="processes", title_justify="left", box=None, pad_edge=False)
    for column in ("name", "role", "device", "threads", "memory"):
        table.add_column(column, justify="right" if column in ("threads", "memory") else "left")
    for process in plan.processes:
        memory = f"{process.memory / 2**20:,.0f} MiB" if process.memory else ""
        table.add_row(process.name, process.role, process.device, str(process.threads), memory)
    return table


def _places(plan: Plan, placement: Placement) -> Table:
    """Where processes are to be; where nodes are not known, what is to be reserved for them."""
    if plan.assignment is not None:
        table = Table(title="placement", title_justify="left", box=None, pad_edge=False)
        for column in ("node", "address", "processes", "CPUs", "GPUs"):
            table.add_column(column)
        for row in plan.assignment.rows():
            table.add_row(*row)
        return table
    title = "bundles, each on one node" + (" (others use the nodes now)" if plan.busy else "")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in ("processes", "bundles", "each"):
        table.add_column(column)
    for group in alike(bundles_of(plan.wanted, placement)):
        names = shortened([name for bundle in group for name in bundle.processes])
        table.add_row(names, str(len(group)), group[0].needs())
    return table


def _collectives(plan: Plan) -> Table:
    table = Table(title="collectives of a step, on every trainer rank", title_justify="left", box=None, pad_edge=False)
    for column in ("operation", "communicator", "times", "largest"):
        table.add_column(column)
    for collective in plan.collectives:
        size = f"{collective.bytes / 2**20:,.2f} MiB" if collective.bytes > 2**14 else f"{collective.bytes} B"
        table.add_row(collective.operation, collective.communicator, collective.times, size)
    if not plan.collectives:
        table.add_row("none", "", "one rank", "")
    return table
