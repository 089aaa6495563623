"""`lockstep watch -- COMMAND`: runs any PyTorch job under the same monitoring, with no change to its code.

The command runs in the foreground, with our terminal and our signals, beside an agent that observes and a
supervisor that judges. A failure of these two never affects the command.
"""

import contextlib
import logging
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from lockstep.base import waits
from lockstep.base.bounded_wait import WaitTimeout
from lockstep.base.errors import PicklableError
from lockstep.base.folders import make_run_shm_dir, new_run_id, run_shm_dir
from lockstep.watch.agent.agent_client import AgentClient, AgentError, start_agent
from lockstep.watch.agent.service_discovery import ServiceAddress
from lockstep.watch.diagnosis.verdict import StallThresholds, VerdictLevel
from lockstep.watch.supervisor.multi_node import (
    TOKEN_VARIABLE,
    WATCH_GENERATION,
    RemoteSupervisorClient,
    SupervisorEndpoint,
)
from lockstep.watch.supervisor.supervisor_client import SupervisorClient, SupervisorEvent
from lockstep.watch.supervisor.supervisor_settings import SupervisorSettings

log = logging.getLogger(__name__)

PAYLOAD = Path(__file__).with_name("payload")
STALL_EXIT_CODE = 124
"""Our exit code when the command was ended because of a stall; the one that timeout(1) has."""
NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""As shells have them."""
GRACE_S = 30.0
"""Between asking a stalled command to end and killing what is left of it: torchrun needs that long for its ranks."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
"""The terminal sends these to the command as well; ours do nothing."""


@dataclass(frozen=True, slots=True)
class WatchedCommand:
    """What is asked for."""

    command: Sequence[str]
    incidents: Path
    on_stall: str = "report"
    """report, dump (flight recorders and native stacks as well) or kill."""
    patience: StallThresholds = field(default_factory=StallThresholds)
    name: str = "watch"
    node: str = ""
    """What this host is called in verdicts; its host name if empty."""
    meeting: SupervisorEndpoint | None = None
    """Where the agents of several nodes meet; None: this node is all."""


class CommandNotStarted(PicklableError, OSError):
    """The command cannot be started; `code` is what a shell would end with."""

    error_code = "cannot_start"

    def __init__(self, command: str, why: str, code: int) -> None:
        super().__init__(f"{command}: {why}")
        self.command, self.why, self.code = command, why, code


def run_watched(
    asked: WatchedCommand, on_said: Callable[[SupervisorEvent], None], on_trouble: Callable[[str], None]
) -> int:
    """Runs the command to its end.

    Args:
        on_said: is given what the supervisor says, in a thread of its own.
        on_trouble: is told, in words, what does not work of the watching; the command goes on.

    Returns:
        The command's exit code; 128 and the signal's number when a signal ended it, as shells say it;
        `STALL_EXIT_CODE` when we did.

    Raises:
        CannotStart: there is no such command.
    """
    run, token = new_run_id(asked.name), asked.meeting.token if asked.meeting else secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="lockstep-watch-") as folder, contextlib.ExitStack() as stack:
        for each in (run, asked.meeting.run) if asked.meeting else (run,):
            stack.callback(shutil.rmtree, run_shm_dir(each), ignore_errors=True)
        make_run_shm_dir(run)
        signals = stack.enter_context(_SignalForwarder())
        process = _start(asked.command, watched_environment(os.environ, run))
        signals.pass_to(process)
        stalled = threading.Event()

        def said(what: SupervisorEvent) -> None:
            if stalled.is_set():
                return  # what follows is our own doing
            on_said(what)
            if asked.on_stall == "kill" and what.level != VerdictLevel.NOTICE and what.change != "withdrawn":
                stalled.set()

        with _monitoring(asked, run, token, Path(folder), said, on_trouble):
            code = _wait_for_exit(process, stalled)
        if code is None:
            _terminate(process)
            return STALL_EXIT_CODE
        return 128 - code if code < 0 else code


def watched_environment(base: Mapping[str, str], run: str) -> dict[str, str]:
    """What the command gets: ours, and where Python finds what is loaded into its processes."""
    path = os.pathsep.join(filter(None, [str(PAYLOAD), base.get("PYTHONPATH")]))
    rest = {name: value for name, value in base.items() if name != TOKEN_VARIABLE}
    return {**rest, "PYTHONPATH": path, "LOCKSTEP_WATCH": run}


def _wait_for_exit(process: "subprocess.Popen[bytes]", stalled: threading.Event) -> int | None:
    """Until the command has ended: its exit code; None when it is to be ended."""
    while not stalled.is_set():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
    return process.poll()


def _terminate(process: "subprocess.Popen[bytes]") -> None:
    """Asks the command to end, and kills what is left of it and below it after the grace."""
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
    asked: WatchedCommand,
    run: str,
    token: str,
    folder: Path,
    said: Callable[[SupervisorEvent], None],
    on_trouble: Callable[[str], None],
) -> Iterator[None]:
    """Agent and supervisor, while the command runs."""
    meeting = asked.meeting
    try:
        host = meeting.our_address() if meeting else "127.0.0.1"
        address = start_agent(run, token, folder, generation=WATCH_GENERATION, host=host, node=asked.node)
        client = AgentClient(address, token, name="watch")
    except (AgentError, OSError) as error:
        on_trouble(f"the agent cannot be started: the command goes on unwatched ({error})")
        yield
        return
    judge: RemoteSupervisorClient | SupervisorClient
    if meeting is not None and not meeting.is_ours():
        judge = RemoteSupervisorClient(meeting, address, asked.node or platform.node(), said, on_trouble)
    else:
        judge = SupervisorClient(_supervisor_settings(asked, run, folder, address), token, said, on_trouble)
    try:
        yield
    finally:
        judge.close()
        with contextlib.suppress(AgentError):
            client.leave(0.0)
        client.close()


def _supervisor_settings(asked: WatchedCommand, run: str, folder: Path, agent: ServiceAddress) -> SupervisorSettings:
    facts = {"command": list(asked.command), "python": sys.version.split()[0]}
    on_stall = "dump" if asked.on_stall == "kill" else asked.on_stall  # we end the whole command, not the culprits
    settings = SupervisorSettings(
        run, WATCH_GENERATION, folder, asked.incidents, [agent], os.getpid(), asked.patience, on_stall, facts=facts
    )
    if asked.meeting is None:
        return settings
    return replace(settings, run=asked.meeting.run, host=asked.meeting.host, port=asked.meeting.port)


class _SignalForwarder:
    """What we are sent goes to the command, also what came before it was there. What was ignored when we were started
    (nohup) stays so for us and for the command: handlers would be reset to the default in it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_SignalForwarder":
        for number in (*FORWARDED_SIGNALS, *TERMINAL_SIGNALS):
            if signal.getsignal(number) is not signal.SIG_IGN:
                handler = self._pass_on if number in FORWARDED_SIGNALS else _ignore_signal
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_to(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        for number in self._early:
            self._pass_on(number, None)

    def _pass_on(self, number: int, frame: object) -> None:
        if self._process is None:
            self._early.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


def _ignore_signal(number: int, frame: object) -> None:
    """Unlike SIG_IGN, a handler is not inherited by the command."""


def _process_tree(pid: int) -> list[psutil.Process]:
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil tells it from a later one of the same pid
            process.kill()
