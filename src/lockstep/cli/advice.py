"""`lockstep explain --config`: what will hurt, from the files of another framework's training."""

import json
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from lockstep.cli.errors import FAILED, REFUSED, show_refusal


def advise(files: Sequence[Path], gpu_gib: float | None, as_json: bool) -> None:
    """Print the findings; ends with 0 where there is no error among them, 1 where there is, 2 for a file that cannot
    be read."""
    from lockstep.doctor.configs.advise import advise
    from lockstep.doctor.render import render

    try:
        report = advise(files, gpu_gib)
    except (ValueError, OSError) as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(report.json(), indent=2))
    else:
        Console(soft_wrap=False).print(render(report))
    raise typer.Exit(0 if report.passed else FAILED)
