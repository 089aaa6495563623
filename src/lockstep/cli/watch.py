"""`lockstep watch`: monitors any job for stalls, as `lockstep train` monitors its own."""

import logging
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from lockstep.cli.terminal import LogFormatOption
from lockstep.report.command_events import CommandEvent, CommandEvents, LogFormat, open_events
from lockstep.report.warning_handler import WarningHandler

if TYPE_CHECKING:
    from lockstep.watch.supervisor.supervisor_client import SupervisorEvent


class OnStall(StrEnum):
    report = "report"
    dump = "dump"
    kill = "kill"


def command(
    words: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command and its arguments, after --.")],
    on_stall: Annotated[
        OnStall,
        typer.Option(
            help="What to do on a confirmed stall: report it; dump flight recorders and native stacks as well; or kill "
            "the command, with exit code 124."
        ),
    ] = OnStall.report,
    communication: Annotated[
        Path | None,
        typer.Option(help="Write which rank waits for which to this file, for `lockstep report --comm FILE`."),
    ] = None,
    incidents: Annotated[Path, typer.Option(help="Folder for the evidence about a confirmed stall.")] = Path(
        "incidents"
    ),
    notice_after: Annotated[float, typer.Option(help="Warn after this many seconds without progress.", min=0.2)] = 3.0,
    confirm_after: Annotated[
        float,
        typer.Option(help="Confirm a stall when the blocking process has been idle for this many seconds.", min=1.0),
    ] = 40.0,
    supervisor: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="For a job on several nodes: address and port on one of the nodes where the job's supervisor listens. "
            "Give the same value on every node. The nodes need the same token: LOCKSTEP_TOKEN, else ~/.lockstep/token, "
            "which is made if there is none.",
        ),
    ] = "",
    tls: Annotated[
        bool, typer.Option("--tls", help="With --supervisor: encrypt the connections. Give it on every node.")
    ] = False,
    node: Annotated[str, typer.Option(help="Name of this host in verdicts; its host name by default.")] = "",
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Run any training command (torchrun, accelerate, mpirun, python) and report which process blocks it.

    The command needs no changes, neither in its code nor in its Python environment. The exit code is the
    command's."""
    from lockstep.watch.attach.watched_command import CommandNotStarted, WatchedCommand, run_watched
    from lockstep.watch.diagnosis.verdict import StallThresholds
    from lockstep.watch.supervisor.incident import make_incident_root
    from lockstep.watch.supervisor.multi_node import SupervisorEndpoint

    events = open_events(log_format, "watch")
    reports = _WatchReports(events)
    logging.getLogger().addHandler(WarningHandler(reports.show_problem))

    thresholds = StallThresholds(notice_s=notice_after, still_s=confirm_after)
    try:
        endpoint = SupervisorEndpoint.read(supervisor, tls) if supervisor else None
        if incidents.is_symlink() or incidents.exists():
            make_incident_root(incidents)  # another user may have made it
    except (ValueError, OSError) as error:
        events.refuse(error)
        raise typer.Exit(2) from None
    name, file = Path(words[0]).name, None if communication is None else communication.absolute()
    watched = WatchedCommand(words, incidents, on_stall.value, thresholds, name, node, endpoint, file)
    try:
        code = run_watched(watched, reports.show_verdict, reports.show_problem)
    except CommandNotStarted as error:
        events.refuse(error)
        raise typer.Exit(error.code) from None
    raise typer.Exit(code)


class _WatchReports:
    """Reports on the command while it runs."""

    def __init__(self, events: CommandEvents) -> None:
        self._events = events
        self._judged: set[str] = set()
        """Incidents whose environment was judged."""

    def show_verdict(self, event: "SupervisorEvent") -> None:
        """Reports a verdict, and once what of the environment may have caused its incident."""
        self._events.report(_verdict(event))
        if event.incident is not None and event.incident not in self._judged:
            self._judged.add(event.incident)
            if text := _environment_findings(Path(event.incident)):
                self.show_problem(f"environment: {text}")

    def show_problem(self, text: str) -> None:
        """Reports a warning."""
        self._events.report(CommandEvent("warning", text, f"[yellow]lockstep watch:[/] {escape(text)}", "warning"))


def _environment_findings(incident: Path) -> str:
    from lockstep.doctor.environment.incident_environment import findings_sentence, write_incident_findings

    return findings_sentence(write_incident_findings(incident))


def _verdict(event: "SupervisorEvent") -> CommandEvent:
    if event.change == "withdrawn":
        level, color, message, where = "info", "green", f"recovered: {event.headline}", None
    else:
        level, color = ("warning", "yellow") if event.level == "notice" else ("error", "red")
        message, where = f"{event.level}: {event.headline}", event.incident
    folder = f" [dim]({escape(where)})[/]" if where else ""
    fields = {
        "number": event.number, "change": event.change, "verdict_level": event.level, "kind": event.verdict["kind"],
        "culprits": list(event.who), "seconds": round(event.since_s, 3), "incident": event.incident,
    }  # fmt: skip
    return CommandEvent("verdict", message, f"[{color}]lockstep watch:[/] {escape(message)}{folder}", level, fields)
