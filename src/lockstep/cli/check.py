"""`lockstep check`: is this going to work, and if not, which host, which cable, which variable."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lockstep.cli.errors import FAILED, REFUSED, show_refusal
from lockstep.config.errors import ConfigError
from lockstep.config.load import load_config

if TYPE_CHECKING:
    from lockstep.config.run import RunConfig
    from lockstep.doctor.finding import Report


def command(
    file: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="The run to check for; without it the host alone.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="SECTION.KEY=VALUE", help="Values in place of the file's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, nothing else.")] = False,
) -> None:
    """Check, before a run, what would make it fail, hang or crawl, and say what helps.

    Ends with 0 where nothing is wrong, 1 where something is, 2 where it cannot check what it is given.

    Examples:

        lockstep check

        lockstep check examples/grpo_sort.yaml

        lockstep check run.yaml --json
    """
    from lockstep.doctor.finding import Report

    try:
        config = load_config(Path(file), list(overrides or [])) if file is not None else None
        report = Report()
        _climb(report, config)
    except (ConfigError, ValueError, OSError) as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(report.json(), indent=2))
    else:
        _show(report)
    raise typer.Exit(0 if report.passed else FAILED)


def _climb(report: "Report", config: "RunConfig | None") -> None:
    """The rungs, from the host outwards."""


def _show(report: "Report") -> None:
    from lockstep.doctor.render import render

    Console(soft_wrap=False).print(render(report))
