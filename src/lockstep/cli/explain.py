"""`lockstep explain --config`: what will hurt, from the files of another framework's training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lockstep.cli.terminal import FAILED, REFUSED, show_refusal


def show_advice(files: Sequence[Path], gpu_gib: float | None, as_json: bool) -> None:
    """Print the findings; ends with 0 where there is no error among them, 1 where there is, 2 for a file that cannot
    be read."""
    from lockstep.doctor.configs.config_advisor import advise_configs
    from lockstep.doctor.output.findings_table import render_report

    try:
        report = advise_configs(files, gpu_gib)
    except (ValueError, OSError) as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(report.json(), indent=2))
    else:
        Console(soft_wrap=False).print(render_report(report))
    raise typer.Exit(0 if report.passed else FAILED)


if TYPE_CHECKING:
    from lockstep.doctor.judge.log_diagnosis import Explanation


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
        # merged

        if paths:
            show_refusal(ValueError("either PATH... or --config, not both"))
            raise typer.Exit(REFUSED)
        show_advice(configs, gpu_gib, as_json)
        return
    if not paths:
        show_refusal(ValueError("say what to explain: PATH..., or --config FILE"))
        raise typer.Exit(REFUSED)
    from lockstep.doctor.judge.log_diagnosis import explain

    try:
        explained = explain(paths, rules or (), ranks=ranks, world_size=world_size)
    except (ValueError, OSError) as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    if html is not None:
        from lockstep.doctor.output.explanation import explanation_page

        try:
            html.write_text(explanation_page(explained), encoding="utf-8")
        except OSError as error:
            show_refusal(error)
            raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(explained.verdict.json(), indent=2))
    else:
        _show(explained)
        _show_environment_findings(paths)


def _show(explained: "Explanation") -> None:
    """The first in full, of recorded ones the others in a line each."""
    from lockstep.doctor.output.explanation import render_explanation
    from lockstep.doctor.output.explanation import render_verdict as render_recorded
    from lockstep.watch.supervisor.incident import verdict_headline

    console = Console(soft_wrap=False)
    console.print(render_recorded(explained.verdict) if explained.recorded else render_explanation(explained))
    for verdict in explained.recorded[1:]:
        console.print(f"also: {verdict.kind}: {verdict_headline(verdict)}", style="dim", markup=False, highlight=False)


def _show_environment_findings(paths: list[str]) -> None:
    """What was odd about the variables of the processes of the newest incident that is given."""
    from lockstep.doctor.environment.incident_environment import incident_finding_lines, newest_incident
    from lockstep.doctor.output.explanation import terminal_safe

    folder = newest_incident(paths)
    console = Console(soft_wrap=False)
    for each in incident_finding_lines(folder) if folder is not None else ():
        console.print(terminal_safe(f"environment: {each}"), style="yellow", markup=False, highlight=False)
