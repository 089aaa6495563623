"""`lockstep watch`: the same eyes around any job."""

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lockstep.cli.terminal import show_refusal


class OnStall(StrEnum):
    report = "report"
    dump = "dump"
    kill = "kill"


def command(
    words: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The command and its arguments, after --.")],
    on_stall: Annotated[
        OnStall,
        typer.Option(
            help="On a confirmed stall: report it; dump also flight recorders and native stacks; kill the command, "
            "which ends with exit code 124."
        ),
    ] = OnStall.report,
    incidents: Annotated[Path, typer.Option(help="Folder for what is collected around a confirmed stall.")] = Path(
        "incidents"
    ),
    notice_after: Annotated[
        float, typer.Option(help="Seconds without any progress after which a wait is told.", min=0.2)
    ] = 3.0,
    confirm_after: Annotated[
        float,
        typer.Option(help="Seconds of stillness after which a process that others wait for is accused.", min=1.0),
    ] = 40.0,
    supervisor: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Of a job on several nodes: where its one supervisor listens, the same on every node, an address of "
            "one of them; LOCKSTEP_TOKEN is the secret that they share.",
        ),
    ] = "",
    node: Annotated[str, typer.Option(help="What this host is called in verdicts; its host name if not given.")] = "",
) -> None:
    """Run a command and name who keeps it waiting: torchrun, accelerate, deepspeed, mpirun or plain Python.

    Its code needs no change, and its Python environment no Lockstep. The exit code is the command's."""
    from lockstep.watch.attach.watched_command import CommandNotStarted, WatchedCommand, run_watched
    from lockstep.watch.diagnosis.verdict import StallThresholds
    from lockstep.watch.supervisor.multi_node import SupervisorEndpoint
    from lockstep.watch.supervisor.supervisor_client import SupervisorEvent

    logging.basicConfig(level=logging.WARNING, format="lockstep watch: %(message)s")
    console = Console(stderr=True, soft_wrap=True, highlight=False)

    noted: set[str] = set()

    def said(what: SupervisorEvent) -> None:
        console.print(_verdict_line(what))
        if what.incident is not None and what.incident not in noted:
            noted.add(what.incident)
            _show_environment_findings(console, Path(what.incident))

    def trouble(text: str) -> None:
        console.print(f"[yellow]lockstep watch:[/] {escape(text)}")

    patience = StallThresholds(notice_s=notice_after, still_s=confirm_after)
    try:
        meeting = SupervisorEndpoint.read(supervisor) if supervisor else None
    except ValueError as error:
        show_refusal(error)
        raise typer.Exit(2) from None
    asked = WatchedCommand(words, incidents, on_stall.value, patience, Path(words[0]).name, node, meeting)
    try:
        code = run_watched(asked, said, trouble)
    except CommandNotStarted as error:
        show_refusal(error)
        raise typer.Exit(error.code) from None
    raise typer.Exit(code)


def _show_environment_findings(console: Console, incident: Path) -> None:
    from lockstep.doctor.environment.incident_environment import findings_sentence, write_incident_findings

    if odd := findings_sentence(write_incident_findings(incident)):
        console.print(f"[yellow]lockstep watch:[/] environment: {escape(odd)}")


def _verdict_line(what: "Said") -> str:  # type: ignore[name-defined]  # noqa: F821 - imported with the command
    color = {"notice": "yellow", "confirmed": "red", "act": "red"}[what.level]
    if what.change == "withdrawn":
        return f"[green]lockstep watch:[/] goes on again: {escape(what.headline)}"
    where = f" [dim]({escape(what.incident)})[/]" if what.incident else ""
    return f"[{color}]lockstep watch:[/] {what.level}: {escape(what.headline)}{where}"
