"""The supervisor's settings, and the client that starts a supervisor, receives its events and restarts it."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.base import waits
from lockstep.base.folders import make_folder, open_file
from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection, WireError
from lockstep.base.transport.run_token import TOKEN_VARIABLE
from lockstep.base.wait_state import WaitTimeout
from lockstep.watch.agent.service_discovery import ServiceAddress, is_superseded
from lockstep.watch.diagnosis.evidence_types import WaitAlias, WaitCondition
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.procfs import processes

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
RESTARTS_WITHIN_S = 600.0
"""If the supervisor dies more than `MAX_RESTARTS` times in this period, the run continues without a supervisor."""
START_S = 60.0
"""A supervisor that has not published its address after this time is killed and restarted."""
TICK_S = 0.5
"""How often agents sample their processes."""


@dataclass
class SupervisorSettings:
    """Everything that a supervisor needs to start; it reads them as JSON from its standard input."""

    run: str
    generation: int
    folder: Path
    """The folder of `supervisor.json`, which holds the supervisor's address."""
    incidents: Path | None
    """The folder for incidents; None writes none."""
    agents: list[ServiceAddress]
    controller: int | None = None
    """The controller's pid; None without a controller."""
    patience: StallThresholds = field(default_factory=StallThresholds)
    on_stall: str = "report"
    """The action on a confirmed stall: `report`, `dump` (collect native stacks too) or `free` (abort the collectives in
    which processes wait). However a collective ends, it raises the verdict."""
    aliases: dict[str, WaitAlias] = field(default_factory=dict)
    """Targets of waits that are neither a process nor a role, by name."""
    every_s: float = TICK_S
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about the run for incidents: its config, versions, command."""
    devices: Path | None = None
    """The file for the totals of all GPUs (`device_totals`); None writes none."""
    communication: Path | None = None
    """The file for the totals of collectives (`communication.arrival_totals`); None writes none."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free port."""
    meeting: str = ""
    """The name by which agents and subscribers on other nodes ask for this supervisor; `run` if empty."""

    @staticmethod
    def parse(text: str) -> "SupervisorSettings":
        """Parses the JSON of `to_json`."""
        values = json.loads(text)
        values["folder"] = Path(values["folder"])
        values["incidents"] = None if values["incidents"] is None else Path(values["incidents"])
        values["devices"] = None if values.get("devices") is None else Path(values["devices"])
        values["communication"] = None if values.get("communication") is None else Path(values["communication"])
        values["agents"] = [ServiceAddress(**each) for each in values["agents"]]
        values["patience"] = StallThresholds(**values["patience"])
        values["aliases"] = {
            name: WaitAlias(each["role"], WaitCondition(each["needs"]))
            for name, each in values.get("aliases", {}).items()
        }
        return SupervisorSettings(**values)

    def to_json(self) -> str:
        values = asdict(self)
        values["folder"] = str(self.folder)
        values["incidents"] = None if self.incidents is None else str(self.incidents)
        values["devices"] = None if self.devices is None else str(self.devices)
        values["communication"] = None if self.communication is None else str(self.communication)
        return json.dumps(values)


@dataclass(frozen=True, slots=True)
class SupervisorEvent:
    """What the supervisor reports about a stall."""

    number: int
    """The number of the stall: all events of one stall share it."""
    change: str
    """One of: told (new), updated, withdrawn."""
    level: str
    """One of: notice, confirmed, act."""
    headline: str
    verdict: Mapping[str, Any]
    """The verdict as JSON, see `Verdict.json`."""
    since_s: float
    incident: str | None
    """The folder of the incident, if one was written."""
    wall: float
    who: tuple[str, ...] = ()
    """Names of the culprits."""
    done: str = ""
    """What was done about the stall, at the level `act`."""

    @staticmethod
    def parse(frame: Mapping[str, Any], number_offset: int = 0) -> "SupervisorEvent":
        """Parses a frame of the supervisor. `number_offset` is added to the stall's number, because a restarted
        supervisor counts from 1 again."""
        return SupervisorEvent(
            number_offset + int(frame["number"]), str(frame["change"]), str(frame["level"]), str(frame["headline"]),
            frame["verdict"], float(frame["since_s"]), frame["incident"], float(frame["wall"]),
            tuple(frame["who"]), str(frame["done"]),
        )  # fmt: skip


def spawn_supervisor(settings: SupervisorSettings, token: str) -> "subprocess.Popen[bytes]":
    """Starts a supervisor process in a new session; its output goes to `supervisor.log` in the settings' folder.

    The settings contain the run's config, so they are passed in an unnamed file: every user of the host can see a
    process's arguments.
    """
    folder = settings.folder
    make_folder(folder)
    argv = [sys.executable, "-P", "-m", "lockstep.watch.supervisor.supervisor"]
    environment = {**os.environ, TOKEN_VARIABLE: token, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    log_file = open_file(folder / "supervisor.log", os.O_WRONLY | os.O_APPEND)
    with os.fdopen(log_file, "ab") as output, tempfile.TemporaryFile() as source:
        source.write(settings.to_json().encode())
        source.seek(0)
        return subprocess.Popen(
            argv, env=environment, stdin=source, stdout=output, stderr=output, start_new_session=True
        )


def read_supervisor_address(folder: Path) -> ServiceAddress | None:
    """Reads the supervisor's address from its folder; None if there is none."""
    try:
        return ServiceAddress.parse((folder / "supervisor.json").read_bytes())
    except (OSError, ValueError):
        return None


def subscribe(address: ServiceAddress, token: str, name: str, after: int = 0, timeout_s: float = 5.0) -> Connection:
    """Connects to a supervisor and subscribes; the supervisor first repeats the frames after number `after`.

    Raises:
        WireError: the supervisor cannot be reached.
    """
    connection = auth_handshake.connect(
        address.host, address.port, token=token, run=address.run, generation=address.generation, name=name,
        timeout_s=timeout_s, max_frame=64 << 20,
    )  # fmt: skip
    pid = os.getpid()
    hello = {
        "id": "subscribe", "op": "subscribe", "pid": pid, "start": processes.start_ticks(pid),
        "place": processes.pid_namespace(),
        "after": after,
    }  # fmt: skip
    connection.send(json.dumps(hello).encode())
    return connection


class SupervisorClient:
    """Keeps a supervisor running and receives its events in a background thread, so starting the supervisor delays
    nothing, and the run continues if the supervisor fails.

    `on_event` is called in that thread, once for each event; it must be quick. `on_trouble` is called with a message if
    the supervisor has died or cannot be started.
    """

    def __init__(
        self, settings: SupervisorSettings, token: str, on_event: Callable[[SupervisorEvent], None],
        on_trouble: Callable[[str], None] = log.warning, name: str = "controller",
    ) -> None:  # fmt: skip
        self._settings, self._token, self._name = settings, token, name
        self._on_event, self._on_trouble = on_event, on_trouble
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._last_frame, self._closing = 0, threading.Event()
        self._failed = False
        """Whether the job has failed, once this client is being closed."""
        self._number_offset = self._last_number = 0
        """The greatest stall number of earlier supervisors, and of all supervisors."""
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS)
        self.connected = threading.Event()
        """Set while a supervisor is connected."""
        self._thread = threading.Thread(target=self._keep_running, name="supervision", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The supervisor's pid; None while no supervisor runs."""
        popen = self._popen
        return popen.pid if popen is not None and popen.poll() is None else None

    def watch(self, agents: Sequence[ServiceAddress]) -> None:
        """Sets the agents of the run."""
        self._settings.agents = list(agents)
        self._send({"id": "agents", "op": "agents", "agents": [asdict(each) for each in agents]})

    def close(self, timeout_s: float = 5.0, failed: bool = False) -> None:
        """Ends the supervisor, so that it does not report processes that end from now on. Idempotent.

        Args:
            failed: whether the job has failed; then the supervisor first says which process was the cause.
        """
        if self._closing.is_set():
            return
        self._failed = failed
        self._closing.set()
        self._send_leave()
        if threading.current_thread() is not self._thread:
            with contextlib.suppress(WaitTimeout):
                waits.join(self._thread, waits_for="supervision", why="its thread ends", timeout_s=timeout_s)
        popen = self._popen
        if popen is None:
            return
        if self._connection is None:  # not connected yet
            popen.terminate()
        try:
            waits.process(popen, waits_for="supervisor", why="its end", timeout_s=timeout_s, notice_after_s=None)
        except WaitTimeout:
            popen.kill()
            waits.process(popen, waits_for="supervisor", why="its end after SIGKILL", timeout_s=10.0)

    def _keep_running(self) -> None:
        while not self._closing.is_set() and not is_superseded(self._settings.run, self._settings.generation):
            try:
                self._popen = spawn_supervisor(self._settings, self._token)
            except OSError as error:
                self._on_trouble(f"cannot start the supervisor ({error}); continuing without it")
                return
            self._last_frame, self._number_offset = 0, self._last_number
            self._receive_events(self._popen)
            self.connected.clear()
            if self._closing.is_set():
                return
            code = self._popen.poll()
            now = time.monotonic()
            if len(self._deaths) == MAX_RESTARTS and now - self._deaths[0] < RESTARTS_WITHIN_S:
                self._on_trouble(
                    f"the supervisor ended {MAX_RESTARTS} times (now {_describe_exit(code)}); continuing without it"
                )
                return
            self._deaths.append(now)
            self._on_trouble(f"the supervisor ended ({_describe_exit(code)}), restarting it")

    def _receive_events(self, popen: "subprocess.Popen[bytes]") -> None:
        """Receives events until the supervisor ends."""
        started = time.monotonic()
        while popen.poll() is None and not self._closing.is_set():
            address = read_supervisor_address(self._settings.folder)
            if address is None or address.pid != popen.pid:
                if time.monotonic() - started > START_S:
                    popen.kill()
                time.sleep(0.05)
                continue
            try:
                with subscribe(address, self._token, self._name, self._last_frame) as connection:
                    self._connection = connection
                    self.connected.set()
                    self._listen(connection)
            except WireError:
                self.connected.clear()
                time.sleep(0.1)
        if not self._closing.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(1.0)

    def _listen(self, connection: Connection) -> None:
        while True:
            if self._closing.is_set():
                self._send_leave()
            frame = connection.recv(0.5)
            if frame is None:
                continue
            message = json.loads(frame)
            if "told" not in message or message["told"] <= self._last_frame:
                continue
            self._last_frame = int(message["told"])
            event = SupervisorEvent.parse(message, self._number_offset)
            self._last_number = max(self._last_number, event.number)
            try:
                self._on_event(event)
            except Exception:
                log.exception("the handler of a supervisor event failed")

    def _send_leave(self) -> None:
        """Asks the supervisor to end. It may be asked twice."""
        self._send({"id": "leave", "op": "leave", "failed": self._failed})

    def _send(self, message: Mapping[str, Any]) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(WireError):
                connection.send(json.dumps(message).encode(), timeout_s=2.0)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "silent"
    return f"killed by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"exit code {code}"
