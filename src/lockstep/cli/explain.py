"""`lockstep explain`: what was wrong, from what a job left behind."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lockstep.cli.errors import REFUSED, show_refusal

if TYPE_CHECKING:
    from lockstep.doctor.explain import Explained


def command(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH...",
            help="Logs, folders of logs, archives, patterns, '-' for standard input, flight-recorder dumps, incidents; "
            "any mixture.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON, nothing else.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the answer as a page as well.")
    ] = None,
    rules: Annotated[
        list[Path] | None,
        typer.Option("--rules", metavar="DIR", help="Further knowledge files; a rule there replaces one of its id."),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Where the rank stands in the names of dumps: 'host-*/trace-{rank}.bin'."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many ranks the job has; taken from the dumps otherwise.")
    ] = None,
    configs: Annotated[
        list[Path] | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="In place of logs: a script or config of OpenRLHF, verl, TRL, accelerate or DeepSpeed, to say what in "
            "it will hurt. May be given several times, for files that belong together.",
        ),
    ] = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option("--gpu-memory", min=1, metavar="GIB", help="With --config: the memory of one of its GPUs."),
    ] = None,
) -> None:
    """Say what was wrong with a job, who is to blame and what helps, from its logs, dumps and incidents.

    Examples:

        lockstep explain logs/

        lockstep explain slurm-4711.out dumps/ --json

        kubectl logs trainer-0 | lockstep explain -

        lockstep explain --config train.sh --config zero3.json --gpu-memory 80
    """
    if configs:
        from lockstep.cli.advice import advise

        if paths:
            show_refusal(ValueError("either PATH... or --config, not both"))
            raise typer.Exit(REFUSED)
        advise(configs, gpu_gib, as_json)
        return
    if not paths:
        show_refusal(ValueError("say what to explain: PATH..., or --config FILE"))
        raise typer.Exit(REFUSED)
    from lockstep.doctor.explain import explain

    try:
        explained = explain(paths, rules or (), ranks=ranks, world_size=world_size)
    except (ValueError, OSError) as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    if html is not None:
        from lockstep.doctor.answer.html import page

        try:
            html.write_text(page(explained), encoding="utf-8")
        except OSError as error:
            show_refusal(error)
            raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(explained.verdict.json(), indent=2))
    else:
        _show(explained)
        _environment(paths)


def _show(explained: "Explained") -> None:
    """The first in full, of recorded ones the others in a line each."""
    from lockstep.doctor.answer.text import render
    from lockstep.report.verdict import render as render_recorded
    from lockstep.watch.incident import headline

    console = Console(soft_wrap=False)
    console.print(render_recorded(explained.verdict) if explained.recorded else render(explained))
    for verdict in explained.recorded[1:]:
        console.print(f"also: {verdict.kind}: {headline(verdict)}", style="dim", markup=False, highlight=False)


def _environment(paths: list[str]) -> None:
    """What was odd about the variables of the processes of the newest incident that is given."""
    from lockstep.doctor.answer.text import safe
    from lockstep.doctor.environment.incidents import newest, note_of

    folder = newest(paths)
    console = Console(soft_wrap=False)
    for each in note_of(folder) if folder is not None else ():
        console.print(safe(f"environment: {each}"), style="yellow", markup=False, highlight=False)
