"""The controller's client of the supervisor: starts it, receives its events, restarts it when it dies."""

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.base import waits
from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection, WireError
from lockstep.base.wait_state import WaitTimeout
from lockstep.watch.agent.service_discovery import ServiceAddress, is_superseded
from lockstep.watch.procfs import processes

if TYPE_CHECKING:
    from lockstep.watch.supervisor.supervisor_settings import SupervisorSettings

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
RESTARTS_WITHIN_S = 600.0
"""After more deaths of the supervisor than this in so long, it is not restarted and the run continues unwatched."""
START_S = 60.0


@dataclass(frozen=True, slots=True)
class SupervisorEvent:
    """An event of the supervisor: what it reports about a stall."""

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
    def of(frame: Mapping[str, Any], before: int = 0) -> "SupervisorEvent":
        """`before`: the greatest number given by earlier supervisors, which is not given again."""
        return SupervisorEvent(
            before + int(frame["number"]), str(frame["change"]), str(frame["level"]), str(frame["headline"]),
            frame["verdict"], float(frame["since_s"]), frame["incident"], float(frame["wall"]),
            tuple(frame["who"]), str(frame["done"]),
        )  # fmt: skip


def spawn_supervisor(settings: "SupervisorSettings", token: str) -> "subprocess.Popen[bytes]":
    """Starts a supervisor in a session of its own; its output goes to `folder/supervisor.log`. Its settings hold the
    run's config, so they come from a file without a name: arguments are shown to every user of the host."""
    folder = settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "lockstep.watch.supervisor.supervisor"]
    environment = {**os.environ, "LOCKSTEP_TOKEN": token, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with (folder / "supervisor.log").open("ab") as output, tempfile.TemporaryFile() as source:
        source.write(settings.dumped().encode())
        source.seek(0)
        return subprocess.Popen(
            argv, env=environment, stdin=source, stdout=output, stderr=output, start_new_session=True
        )


def read_supervisor_address(folder: Path) -> ServiceAddress | None:
    """Reads the address of a folder's supervisor; None when there is none."""
    try:
        return ServiceAddress(**json.loads((folder / "supervisor.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def subscribe(address: ServiceAddress, token: str, name: str, after: int = 0, timeout_s: float = 5.0) -> Connection:
    """Opens a subscription; the supervisor repeats frames after number `after`. Raises frames.WireError."""
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
    """Keeps a supervisor running and receives its events, in a thread of its own: starting it delays nothing, and a run
    never fails because its supervisor did.

    `on_event` is called in that thread, once for each event; it must be quick. `on_trouble` is called with a
    message when the supervisor died or cannot be started."""

    def __init__(
        self, settings: "SupervisorSettings", token: str, on_event: Callable[[SupervisorEvent], None],
        on_trouble: Callable[[str], None] = log.warning, name: str = "controller",
    ) -> None:  # fmt: skip
        self._settings, self._token, self._name = settings, token, name
        self._on_event, self._on_trouble = on_event, on_trouble
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._heard, self._closing = 0, threading.Event()
        self._before = self._number = 0
        """The greatest stall number: of earlier supervisors, and so far."""
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS)
        self.up = threading.Event()
        """Set while a supervisor is connected."""
        self._thread = threading.Thread(target=self._keep, name="supervision", daemon=True)
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

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the supervisor: processes that end from here on are ended on purpose. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._send({"id": "leave", "op": "leave"})
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

    def _keep(self) -> None:
        while not self._closing.is_set() and not is_superseded(self._settings.run, self._settings.generation):
            try:
                self._popen = spawn_supervisor(self._settings, self._token)
            except OSError as error:
                self._on_trouble(f"cannot start the supervisor ({error}); continuing without it")
                return
            self._heard, self._before = 0, self._number
            self._hear(self._popen)
            self.up.clear()
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

    def _hear(self, popen: "subprocess.Popen[bytes]") -> None:
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
                with subscribe(address, self._token, self._name, self._heard) as connection:
                    self._connection = connection
                    self.up.set()
                    self._listen(connection)
            except WireError:
                self.up.clear()
                time.sleep(0.1)
        if not self._closing.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                popen.wait(1.0)

    def _listen(self, connection: Connection) -> None:
        while True:
            if self._closing.is_set():
                self._send({"id": "leave", "op": "leave"})
            frame = connection.recv(0.5)
            if frame is None:
                continue
            message = json.loads(frame)
            if "told" not in message or message["told"] <= self._heard:
                continue
            self._heard = int(message["told"])
            event = SupervisorEvent.of(message, self._before)
            self._number = max(self._number, event.number)
            try:
                self._on_event(event)
            except Exception:
                log.exception("the handler of a supervisor event failed")

    def _send(self, message: Mapping[str, Any]) -> None:
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(WireError):
                connection.send(json.dumps(message).encode(), timeout_s=2.0)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "silent"
    return f"killed by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"exit code {code}"
