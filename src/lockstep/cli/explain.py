"""`lockstep explain`: what was wrong, from what a job left behind."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lockstep.cli.errors import REFUSED, show_refusal

if TYPE_CHECKING:
    from lockstep.watch.verdict import Verdict


def command(
    path: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A folder with flight-recorder dumps or an incident; or one such file."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON, nothing else.")] = False,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Where the rank stands in the names of dumps: 'host-*/trace-{rank}.bin'."),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many ranks the job has; taken from the dumps otherwise.")
    ] = None,
) -> None:
    """Say what a job waited for and who is to blame, from its flight-recorder dumps or an incident folder.

    Examples:

        lockstep explain dumps/

        lockstep explain incidents/20261121-231502-absent-policy-1 --json
    """
    from lockstep.watch.dumps.read import NoDumps

    try:
        verdicts = _stored(path) or _from_dumps(path, ranks, world_size)
    except NoDumps as error:
        show_refusal(NoDumps(f"{error}. An incident is known by its verdict.json; there is none either"))
        raise typer.Exit(REFUSED) from error
    except (ValueError, OSError) as error:
        show_refusal(error)
        raise typer.Exit(REFUSED) from error
    if as_json:
        typer.echo(json.dumps(verdicts[0].json(), indent=2))
    else:
        _show(verdicts)


def _from_dumps(path: Path, ranks: str | None, world_size: int | None) -> "list[Verdict]":
    from lockstep.watch.dumps.explain import explain_dumps

    return explain_dumps(path, ranks=ranks, world_size=world_size)


def _stored(path: Path) -> "list[Verdict]":
    """The verdict of an incident; of a folder of incidents all of them, the newest first; empty where there is none."""
    from lockstep.watch.incident import incidents
    from lockstep.watch.verdict import parse

    file = path if path.name == "verdict.json" else path / "verdict.json"
    files = [file] if file.is_file() else [each / "verdict.json" for each in reversed(incidents(path))]
    return [parse(_object(each)) for each in files]


def _object(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise ValueError(f"{file} holds no verdict")
    return said


def _show(verdicts: "list[Verdict]") -> None:
    """The first in full, the others in a line each."""
    from lockstep.report.verdict import render
    from lockstep.watch.incident import headline

    console = Console(soft_wrap=False)
    console.print(render(verdicts[0]))
    for verdict in verdicts[1:]:
        console.print(f"also: {verdict.kind}: {headline(verdict)}", style="dim", markup=False, highlight=False)
