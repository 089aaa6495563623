"""How the processes of a run find each other: the run's leader (its controller), and the addresses of the agents and
the supervisor. It also determines whether a peer or the controller is alive.

The leader is one small file in the run's shared memory. A controller that takes over a run replaces the file. From then
on the previous controller is superseded, even if it is still alive, for example because it was stopped and continued.
"""

import contextlib
import itertools
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.base.errors import PicklableError
from lockstep.base.folders import file_lock, make_run_shm_dir, open_file, run_shm_dir, write_atomically
from lockstep.base.json_text import parse_json, read_json
from lockstep.watch.procfs import processes

LEADER_FILE = "leader.json"
RELAY_FILE = "call-relay.json"
"""Where the call relay of a node's workers listens, on this node or another one: a `ServiceAddress`."""
AGENT_MODULE = "lockstep.watch.agent.node_agent"


class Superseded(PicklableError, RuntimeError):
    """A later generation has the run."""

    error_code = "superseded"

    def __init__(self, run: str, generation: int, current: int) -> None:
        super().__init__(f"generation {generation} of {run} is superseded: generation {current} has taken it over")
        self.run, self.generation, self.current = run, generation, current


@dataclass(frozen=True, slots=True)
class Leader:
    """A controller: the address its workers connect to, and how long they keep running after its end."""

    generation: int
    host: str
    port: int
    pid: int | None
    """The controller's pid; None if the controller is on another host."""
    start_ticks: int | None
    orphan_grace_s: float
    reconnect_s: float = 30.0
    """A controller that accepts no reconnection for this long counts as ended, even if its process is alive."""

    def publish(self, run: str) -> None:
        """Makes this controller the run's leader. Raises Superseded when the run has a later one."""
        path = make_run_shm_dir(run) / LEADER_FILE
        descriptor = open_file(path.with_suffix(".lock"), os.O_RDWR)
        try:
            with file_lock(descriptor):
                current = Leader.read(run)
                if current is not None and current.generation > self.generation:
                    raise Superseded(run, self.generation, current.generation)
                write_atomically(path, json.dumps(asdict(self)).encode())
        finally:
            os.close(descriptor)

    @staticmethod
    def read(run: str) -> "Leader | None":
        """The run's newest leader; None when there is none."""
        try:
            return Leader(**read_json(_leader_path(run)))
        except (OSError, ValueError, TypeError):
            return None


def is_superseded(run: str, generation: int) -> bool:
    """Whether a later generation has taken the run over."""
    leader = Leader.read(run)
    return leader is not None and leader.generation > generation


def _leader_path(run: str) -> Path:
    return run_shm_dir(run) / LEADER_FILE


PING_S = 1.0
FROZEN_S = 2.5
"""`tick` is due once a second. If it comes this late, this process itself was stopped or starved, and the peer may have
sent messages meanwhile."""


class PeerHeartbeat:
    """The heartbeat of a peer that answers pings. One thread calls `tick` and `received`; any may read `too_long`.

    Args:
        limit_s: the longest silence allowed.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._received_at = self._ticked_at = time.monotonic()
        self._pinged_at = 0.0

    def tick(self) -> bool:
        """Call it about once a second. Returns whether the peer should be pinged now."""
        now = time.monotonic()
        if now - self._ticked_at > FROZEN_S:
            self._received_at += now - self._ticked_at
        self._ticked_at = now
        if now - self._pinged_at < min(PING_S, self.limit_s / 3):
            return False
        self._pinged_at = now
        return True

    def received(self) -> None:
        """Records that a message of the peer has arrived."""
        self._received_at = time.monotonic()

    @property
    def too_long(self) -> bool:
        """Whether the peer has been silent for too long, as of the last `tick`."""
        return self._ticked_at - self._received_at > self.limit_s


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where an agent, a supervisor or a call relay listens: the content of `agent.json`, `supervisor.json` or
    `RELAY_FILE`."""

    run: str
    generation: int
    host: str
    port: int
    pid: int
    start_ticks: int = field(default_factory=lambda: processes.start_ticks(os.getpid()) or 0)

    def publish(self, path: Path) -> None:
        """Writes the file atomically."""
        write_atomically(path, json.dumps(asdict(self)).encode())

    @staticmethod
    def publish_relay(run: str, address: dict[str, Any] | None) -> None:
        """Writes where the call relay of this node's workers listens, or removes the file. Raises TypeError."""
        file = run_shm_dir(run) / RELAY_FILE
        if address is None:
            file.unlink(missing_ok=True)
        else:
            ServiceAddress(**address).publish(file)

    @staticmethod
    def remove(path: Path) -> None:
        """Removes the file if this process wrote it, and not if another process has replaced it."""
        with contextlib.suppress(OSError, ValueError):
            if read_json(path)["pid"] == os.getpid():
                path.unlink()

    @staticmethod
    def read(folder: Path) -> "ServiceAddress":
        """Raises FileNotFoundError when no agent serves this folder, and ValueError for a file of another form."""
        return ServiceAddress.parse((folder / "agent.json").read_bytes())

    @staticmethod
    def parse(text: bytes) -> "ServiceAddress":
        """Parses the content of the file. Raises ValueError."""
        values = parse_json(text, "the address of a service", max_bytes=1 << 16)
        kinds = {"run": str, "generation": int, "host": str, "port": int, "pid": int, "start_ticks": int}
        if not isinstance(values, dict) or {name: type(value) for name, value in values.items()} != kinds:
            raise ValueError(f"expected an object with {', '.join(kinds)}")
        run_shm_dir(values["run"])
        return ServiceAddress(**values)

    def names_agent(self, folder: Path) -> bool:
        """Whether the process that this address names is the agent of the run that serves this folder, started by this
        user. The file may be older than the process, or written by somebody who wants another process to be killed."""
        words = processes.command_line(self.pid)
        options = dict(itertools.pairwise(words))
        if AGENT_MODULE not in words or options.get("--run") != self.run or "--folder" not in options:
            return False
        try:
            served = Path(f"/proc/{self.pid}/cwd") / options["--folder"]  # the option may be a relative path
            same = served.samefile(folder)
        except OSError:
            return False
        own = processes.owner_uid(self.pid) == os.geteuid()
        return same and own and processes.is_alive(self.pid, self.start_ticks)


FIRST_ATTACH_S = 60.0
"""A controller on another host, which is known by its connection only, has to attach within this time."""


@dataclass
class ControllerLiveness:
    """Determines whether the controller is alive: on this host by its process, on another host by its connection."""

    pid: int | None
    """The controller's pid; None if the controller is on another host."""
    start: int | None
    patience_s: float = 0.0
    """The minimum time for which the controller may be missing, also without a grace for orphans, because a broken
    connection may be restored."""
    missing_since: float | None = None

    @staticmethod
    def expected(pid: int | None) -> "ControllerLiveness":
        """A controller that has not attached yet."""
        return ControllerLiveness(
            pid, None if pid is None else processes.start_ticks(pid), FIRST_ATTACH_S if pid is None else 0.0
        )

    def __str__(self) -> str:
        return "the controller, on another host," if self.pid is None else f"the controller (pid {self.pid})"

    def missing_s(self, connected: bool) -> float | None:
        """How long the controller has been missing; None while it is alive."""
        if connected if self.pid is None else processes.is_alive(self.pid, self.start):
            self.missing_since = None
            return None
        now = time.monotonic()
        if self.missing_since is None:
            self.missing_since = now
        return now - self.missing_since

    def grace_s(self, orphan_grace_s: float) -> float:
        """How long the controller may be missing."""
        return max(orphan_grace_s, self.patience_s)
