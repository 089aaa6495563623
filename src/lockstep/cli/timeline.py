"""`lockstep timeline`: writes what every process of a run did as a trace for Perfetto."""

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer

from lockstep.base.folders import run_shm_dir, scratch_dir
from lockstep.cli.terminal import REFUSED
from lockstep.cli.top import run_name
from lockstep.report.command_events import TERMINAL
from lockstep.report.safe_console import SafeConsole

STEPS_STALL_S = 900.0
"""A capture of steps is given up when the run has reported nothing for this long."""
START_S = 30.0
"""How long the supervisor may take to begin a capture, and to end it after its time."""


def command(
    run: Annotated[
        Path,
        typer.Argument(
            help="The run's folder, a folder of incidents, a captured file, or the pid of a process of a living run.",
            metavar="RUN|PID",
        ),
    ],
    seconds: Annotated[
        float | None, typer.Option(help="Capture a living run for this many seconds.", min=0.1, max=3600)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Capture a living run until this many whole steps are done.", min=1)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File of the trace, .json or .json.gz. Default: timeline.json.gz in the run's folder."),
    ] = None,
) -> None:
    """Write a timeline of a run for Perfetto: stages, collectives, requests, weight sync, waits, incidents.

    Without options: of a living run, what its processes have just done; of an ended one, what was captured and the
    minute before each incident."""
    from lockstep.report.timeline_capture_reader import capture_files
    from lockstep.watch.supervisor.timeline_capture import CAPTURES_FOLDER

    if seconds is not None and steps is not None:
        _refuse("--seconds and --steps exclude each other: give one of them")
    name = _living_run(run)
    if name is None:
        if seconds is not None or steps is not None:
            _refuse(
                f"{run} has no process on this host that could be captured; leave out --seconds and --steps"
                + _other_version(run)
            )
        _write(capture_files(run), run, output)
        return
    with contextlib.ExitStack() as stack:
        folder = run / CAPTURES_FOLDER if run.is_dir() else stack.enter_context(scratch_dir("lockstep-timeline-"))
        file = folder.absolute() / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 1000:03d}.jsonl"
        _capture(name, file, seconds, steps)
        incidents = [each for each in capture_files(run) if each.parent != file.parent] if run.is_dir() else []
        _write([*incidents, file], run, output)


def _living_run(run: Path) -> str | None:
    """The id of the run if its supervisor is alive on this host. Exits if the run lives and has none."""
    from lockstep.watch.beacon.reader import read_beacon, read_beacons
    from lockstep.watch.procfs.processes import is_alive

    if not (run / "run-id").is_file() and (run.exists() or not run.name.isdigit()):
        if not run.exists():
            _refuse(f"{run} does not exist: give a run's folder, a captured file, or the pid of a process of a run")
        return None
    name = run_name(run)
    supervisor = read_beacon(run_shm_dir(name) / "supervisor.beacon", events=False)
    if supervisor is not None and is_alive(supervisor.pid, supervisor.start_ticks):
        return name
    if any(is_alive(each.pid, each.start_ticks) for each in read_beacons(name, events=False)):
        _refuse(
            f"{run} has no supervisor on this host, which captures timelines: run the command where the run was "
            "started, and with watch.enable: true"
        )
    return None


def _other_version(run: Path) -> str:
    """Says that a run was started by another version of Lockstep, if beacons of one are there; otherwise empty."""
    from lockstep.watch.beacon.reader import other_versions

    found = other_versions(run_name(run)) if (run / "run-id").is_file() else set()
    numbers = ", ".join(map(str, sorted(found)))
    return f". Its beacons have version {numbers}: use the Lockstep that started the run" if found else ""


def _capture(name: str, file: Path, seconds: float | None, steps: int | None) -> None:
    """Has the supervisor capture a living run in `file`; returns when that has ended. Ctrl-C ends it early."""
    from dataclasses import replace

    from lockstep.base import waits
    from lockstep.base.wait_state import WaitTimeout
    from lockstep.report.timeline_capture_reader import has_ended
    from lockstep.watch.beacon.reader import read_beacon
    from lockstep.watch.procfs.processes import is_alive
    from lockstep.watch.supervisor.timeline_capture import ANSWER_S, MAX_S, CaptureRequest, request_capture

    notes = SafeConsole(stderr=True, soft_wrap=True)
    now = seconds is None and steps is None
    length = 0.0 if now else MAX_S if seconds is None else seconds
    supervisor = run_shm_dir(name) / "supervisor.beacon"
    request = CaptureRequest(file, length, steps, recent=now)

    def ended() -> bool | None:
        state = read_beacon(supervisor, events=False)
        return has_ended(file) or state is None or not is_alive(state.pid, state.start_ticks) or None

    try:
        try:
            request_capture(name, request)
            waits.poll(
                lambda: file.exists() or ended(), kind="file", waits_for="supervisor", why="the capture begins",
                every_s=0.1, timeout_s=START_S,
            )  # fmt: skip
            if not now:
                notes.print("capturing; Ctrl-C ends it early", markup=False)
            waits.poll(
                ended, kind="file", waits_for="supervisor", why="the capture ends", every_s=0.1, notice_after_s=None,
                timeout_s=length + START_S, stall_s=START_S if steps is None else STEPS_STALL_S,
                progress=lambda: file.stat().st_size if file.exists() else 0,
            )  # fmt: skip
        except KeyboardInterrupt:
            notes.print("ending early", markup=False)
            request_capture(name, replace(request, stop=True))
            waits.poll(
                lambda: None if file.exists() and not ended() else True, kind="file", waits_for="supervisor",
                why="the capture ends", every_s=0.1, timeout_s=ANSWER_S + START_S,
            )  # fmt: skip
    except (WaitTimeout, OSError) as error:
        with contextlib.suppress(OSError):
            request_capture(name, replace(request, stop=True))
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from None


def _write(files: list[Path], run: Path, output: Path | None) -> None:
    """Writes the trace of these captures, and prints where it is and what it has."""
    from lockstep.base.text import count_noun
    from lockstep.report.timeline_capture_reader import read_timeline
    from lockstep.report.timeline_trace import write_trace

    if not files:
        _refuse(
            f"{run} has no captured timeline and no incident; of a living run: lockstep timeline {run} --seconds 10"
            + _other_version(run)
        )
    path = output or (run / "timeline.json.gz" if run.is_dir() else Path(f"timeline-{run.name}.json.gz"))
    if not path.parent.is_dir():
        _refuse(f"--output {path}: {path.parent} is not a folder; make it, or give a file in another one")
    try:
        summary = write_trace(read_timeline(files), path)
    except (ValueError, OSError) as error:
        TERMINAL.refuse(error)
        raise typer.Exit(REFUSED) from error
    console = SafeConsole(stderr=True, soft_wrap=True)
    what = f"{count_noun(summary.processes, 'process')}, {count_noun(summary.slices, 'slice')}"
    verdicts = f", {count_noun(summary.verdicts, 'verdict')}" if summary.verdicts else ""
    console.print(f"{what}{verdicts}, {summary.seconds:.1f} s. Open it in https://ui.perfetto.dev", markup=False)
    if summary.lost:
        console.print(f"{summary.lost:,} events were overwritten before they were read", markup=False)
    SafeConsole(soft_wrap=True).print(str(path), markup=False)


def _refuse(text: str) -> None:
    TERMINAL.refuse(ValueError(text))
    raise typer.Exit(REFUSED)
