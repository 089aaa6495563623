"""`lockstep explain`: what went wrong in a job, from its logs, dumps and incidents, or what will go wrong, from its
configs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.terminal import FAILED, REFUSED, show_refusal

if TYPE_CHECKING:
    from lockstep.doctor.judge.log_diagnosis import Explanation


def command(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Logs, folders of logs, archives, flight-recorder dumps and incidents, in any mixture; glob patterns; "
            "'-' for standard input.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the answer as an HTML page.")
    ] = None,
    rules: Annotated[
        list[Path] | None,
        typer.Option(
            "--rules",
            metavar="DIR",
            help="Additional knowledge files; their rules replace built-in rules with the same id.",
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="Where the rank is in the dumps' names, such as 'host-*/trace-{rank}.bin'.",
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of ranks of the job; taken from the dumps by default."),
    ] = None,
    configs: Annotated[
        list[Path] | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Check a launch script or config of OpenRLHF, verl, TRL, accelerate or DeepSpeed instead of logs. "
            "Repeat the option for files that belong together.",
        ),
    ] = None,
    gpu_gib: Annotated[
        float | None,
        typer.Option("--gpu-memory", min=1, metavar="GIB", help="With --config: memory of one GPU in GiB."),
    ] = None,
) -> None:
    """Find out what went wrong in a job, and how to fix it, from logs, dumps and incidents.

    Examples:

        lockstep explain logs/

        lockstep explain slurm-4711.out dumps/ --json

        kubectl logs trainer-0 | lockstep explain -

        lockstep explain --config train.sh --config zero3.json --gpu-memory 80
    """
    if configs:
        if paths:
            show_refusal(ValueError("give either PATH... or --config, not both"))
            raise typer.Exit(REFUSED)
        _show_advice(configs, gpu_gib, as_json)
        return
    if not paths:
        show_refusal(ValueError("nothing to explain: give PATH... or --config FILE"))
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
    """Prints the first verdict in full, and each further verdict of the given incidents in one line."""
    from lockstep.doctor.output.explanation import render_explanation, render_verdict
    from lockstep.report.safe_console import SafeConsole
    from lockstep.watch.supervisor.incident import verdict_headline

    console = SafeConsole()
    console.print(render_verdict(explained.verdict) if explained.recorded else render_explanation(explained))
    for verdict in explained.recorded[1:]:
        console.print(f"also: {verdict.kind}: {verdict_headline(verdict)}", style="dim", markup=False)


def _show_environment_findings(paths: list[str]) -> None:
    """Prints the findings about the environment variables of the newest given incident."""
    from lockstep.doctor.environment.incident_environment import incident_finding_lines, newest_incident
    from lockstep.report.safe_console import SafeConsole

    folder = newest_incident(paths)
    console = SafeConsole()
    for each in incident_finding_lines(folder) if folder is not None else ():
        console.print(f"environment: {each}", style="yellow", markup=False)


def _show_advice(files: Sequence[Path], gpu_gib: float | None, as_json: bool) -> None:
    """Prints findings about the configs. Exits with 0 without errors, 1 with errors, and 2 if a file cannot be read."""
    from lockstep.doctor.configs.config_advisor import advise_configs
    from lockstep.doctor.output.findings_table import render_report
    from lockstep.report.safe_console import SafeConsole

    try:
        report = advise_configs(files, gpu_gib)
    except (ValueError, OSError) as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(report.json(), indent=2))
    else:
        SafeConsole().print(render_report(report))
    raise typer.Exit(0 if report.passed else FAILED)
