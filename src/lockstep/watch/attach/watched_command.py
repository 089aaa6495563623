"""`lockstep watch -- COMMAND`: runs any PyTorch job under the monitoring of Lockstep, without changing the job's code.

The command runs in the foreground and gets the terminal's input and the signals. An agent monitors its processes, and
a supervisor diagnoses stalls. A failure of the agent or the supervisor does not affect the command.
"""

import contextlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from lockstep.base import waits
from lockstep.base.errors import PicklableError
from lockstep.base.folders import hold_folder, make_run_shm_dir, new_run_id, remove_stale_run_dirs, run_shm_dir
from lockstep.base.transport.run_token import TOKEN_VARIABLE, new_run_token
from lockstep.base.wait_state import WaitTimeout
from lockstep.watch.agent.agent_client import AgentClient, AgentError, start_agent
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.diagnosis.verdict import StallThresholds, VerdictLevel
from lockstep.watch.procfs.exit_causes import record_end_request
from lockstep.watch.supervisor.multi_node import (
    WATCH_GENERATION,
    RemoteSupervisorClient,
    SupervisorEndpoint,
)
from lockstep.watch.supervisor.supervisor_client import SupervisorClient, SupervisorEvent, SupervisorSettings

log = logging.getLogger(__name__)

PAYLOAD = Path(__file__).with_name("payload")
STALL_EXIT_CODE = 124
"""The exit code of `lockstep watch` after it has ended a stalled command; timeout(1) uses the same code."""
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""The exit codes that shells use for a command that is not found or not executable."""
GRACE_S = 30.0
"""Seconds between SIGTERM to a stalled command and SIGKILL to its remaining processes. torchrun may need that long to
end its ranks."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""These signals ask the command to end, so that ends of its processes are no failures."""
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
"""The terminal sends these signals to the command as well, so `lockstep watch` ignores them."""


@dataclass(frozen=True, slots=True)
class WatchedCommand:
    """A command to watch, and the settings of its monitoring."""

    command: Sequence[str]
    incidents: Path
    on_stall: str = "report"
    """`report`, `dump` (also dumps flight recorders and native stacks) or `kill` (ends the command)."""
    patience: StallThresholds = field(default_factory=StallThresholds)
    name: str = "watch"
    node: str = ""
    """The name of this host in verdicts; its host name if empty."""
    meeting: SupervisorEndpoint | None = None
    """Where the agents of several nodes connect; None for a single node."""
    communication: Path | None = None
    """The file for the totals of collectives; None writes none."""


class CommandNotStarted(PicklableError, OSError):
    """The command cannot be started; `code` is the exit code of a shell."""

    error_code = "cannot_start"

    def __init__(self, command: str, why: str, code: int) -> None:
        super().__init__(f"{command}: {why}")
        self.command, self.why, self.code = command, why, code


def run_watched(
    watched: WatchedCommand, on_event: Callable[[SupervisorEvent], None], on_problem: Callable[[str], None]
) -> int:
    """Runs the command to its end.

    Args:
        on_event: called with the supervisor's events, in another thread.
        on_problem: called with a text when monitoring fails; the command continues.

    Returns:
        The command's exit code; 128 plus the signal's number if a signal ended it, as in shells; `STALL_EXIT_CODE` if
        it was ended because of a stall.

    Raises:
        CommandNotStarted: there is no such command, or it is not executable.
    """
    run, token = new_run_id(watched.name), watched.meeting.token if watched.meeting else new_run_token()
    with contextlib.ExitStack() as stack:
        remove_stale_run_dirs()
        stack.callback(shutil.rmtree, run_shm_dir(run), ignore_errors=True)
        shared = make_run_shm_dir(run)  # the agent removes it as well, at the latest when this process was killed
        stack.callback(os.close, hold_folder(shared))
        signals = stack.enter_context(_SignalForwarder(run))
        process = _start(watched.command, watched_environment(os.environ, run))
        signals.forward_to(process)
        stalled = threading.Event()

        def handle(event: SupervisorEvent) -> None:
            if stalled.is_set():
                return  # later events are effects of ending the command
            on_event(event)
            if watched.on_stall == "kill" and event.level != VerdictLevel.NOTICE and event.change != "withdrawn":
                stalled.set()

        with _monitoring(watched, process, run, token, shared / "services", handle, on_problem):
            code = _wait_for_exit(process, stalled)
        if code is None:
            _terminate(process)
            return STALL_EXIT_CODE
        return 128 - code if code < 0 else code


def watched_environment(base: Mapping[str, str], run: str) -> dict[str, str]:
    """The environment of the command: `base` with a `PYTHONPATH` from which Python processes load the payload."""
    path = os.pathsep.join(filter(None, [str(PAYLOAD), base.get("PYTHONPATH")]))
    rest = {name: value for name, value in base.items() if name != TOKEN_VARIABLE}
    return {**rest, "PYTHONPATH": path, "LOCKSTEP_WATCH": run}


def _wait_for_exit(process: "subprocess.Popen[bytes]", stalled: threading.Event) -> int | None:
    """Waits until the command has ended, and returns its exit code; None if it stalled and is still running."""
    while not stalled.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
    return process.poll()


def _terminate(process: "subprocess.Popen[bytes]") -> None:
    """Sends SIGTERM to the command, and after `GRACE_S` SIGKILL to its remaining processes."""
    below = _process_tree(process.pid)
    process.terminate()
    with contextlib.suppress(WaitTimeout):
        waits.process(process, waits_for="the command", why="its end after SIGTERM", timeout_s=GRACE_S)
    _kill([*below, *_process_tree(process.pid)])
    waits.process(process, waits_for="the command", why="its end after SIGKILL", timeout_s=GRACE_S)


def _start(command: Sequence[str], variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(list(command), env=dict(variables))
    except FileNotFoundError as error:
        raise CommandNotStarted(command[0], "no such command", NOT_FOUND) from error
    except PermissionError as error:
        raise CommandNotStarted(command[0], "cannot be executed", NOT_EXECUTABLE) from error


@contextlib.contextmanager
def _monitoring(
    watched: WatchedCommand,
    process: "subprocess.Popen[bytes]",
    run: str,
    token: str,
    folder: Path,
    on_event: Callable[[SupervisorEvent], None],
    on_problem: Callable[[str], None],
) -> Iterator[None]:
    """Runs an agent and a supervisor while the command runs in `process`."""
    meeting = watched.meeting
    try:
        host = meeting.local_address() if meeting else "127.0.0.1"
        address = start_agent(run, token, folder, generation=WATCH_GENERATION, host=host, node=watched.node)
        client = AgentClient(address, token, name="watch")
    except (AgentError, OSError) as error:
        on_problem(f"cannot start the agent: the command continues unwatched ({error})")
        yield
        return
    supervisor: RemoteSupervisorClient | SupervisorClient
    if meeting is not None and not meeting.is_local():
        supervisor = RemoteSupervisorClient(meeting, address, watched.node or platform.node(), on_event, on_problem)
    else:
        supervisor = SupervisorClient(_supervisor_settings(watched, run, folder, address), token, on_event, on_problem)
    try:
        yield
    finally:
        supervisor.close(failed=bool(process.poll()))
        with contextlib.suppress(AgentError):
            client.shut_down(0.0)
        client.close()


def _supervisor_settings(watched: WatchedCommand, run: str, folder: Path, agent: ServiceAddress) -> SupervisorSettings:
    facts = {"command": list(watched.command), "python": sys.version.split()[0]}
    on_stall = "dump" if watched.on_stall == "kill" else watched.on_stall  # this process ends the whole command
    settings = SupervisorSettings(
        run, WATCH_GENERATION, folder, watched.incidents, [agent], os.getpid(), watched.patience, on_stall, facts=facts,
        communication=watched.communication,
    )  # fmt: skip
    if watched.meeting is None:
        return settings
    return replace(settings, meeting=watched.meeting.run, host=watched.meeting.host, port=watched.meeting.port)


class _SignalForwarder:
    """Forwards signals of this process to the command, including signals that arrive before the command runs.

    A signal that was ignored when this process started (nohup) remains ignored, also in the command. If it had a
    handler here, the command would start with its default action. A signal that asks the command to end is recorded
    for the agent of `run` before it is forwarded.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_SignalForwarder":
        for number in (*FORWARDED_SIGNALS, *TERMINAL_SIGNALS):
            if signal.getsignal(number) is not signal.SIG_IGN:
                handler = self._forward if number in FORWARDED_SIGNALS else self._ignore
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def forward_to(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        for number in self._early:
            self._forward(number, None)

    def _forward(self, number: int, frame: object) -> None:
        if self._process is None:
            self._early.append(number)
            return
        if number in ENDING_SIGNALS:
            record_end_request(self._run)
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def _ignore(self, number: int, frame: object) -> None:
        """Leaves a signal of the terminal to the command, which does not inherit this handler, as it would inherit
        SIG_IGN."""
        record_end_request(self._run)


def _process_tree(pid: int) -> list[psutil.Process]:
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil recognises a reused pid
            process.kill()
