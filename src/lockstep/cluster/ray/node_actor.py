"""The actor that a run has on each node of a Ray cluster: it starts the node agent and holds it.

The actor is detached and named, so that a later controller finds it. It also owns the run's placement groups on its
node, which end with it. The actor on the controller's node ends when the controller has been gone for longer than
`orphan_grace_s`, the others when their agent has ended, and all of them when no controller requests an agent.

Every request carries its sender's generation; the actor obeys the latest generation it has seen.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from lockstep.base import waits
from lockstep.base.folders import (
    hold_folder,
    make_folder,
    make_user_temp_dir,
    remove_stale_run_dirs,
    run_shm_dir,
    shm_root,
    write_atomically,
)
from lockstep.base.network import PortRange, check_reachable
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster import node_versions
from lockstep.cluster.node_network import network_interfaces, reachable_address
from lockstep.cluster.node_versions import changed_since, locate_files
from lockstep.cluster.reattach import kill_agent
from lockstep.watch.agent.agent_client import AgentError, start_agent
from lockstep.watch.agent.service_discovery import Leader, ServiceAddress, Superseded
from lockstep.watch.procfs import processes

DIAL_S = 5.0
"""Time limit of a connection attempt: a firewall that drops packets sends no reply."""
LINGER_S = 180.0
"""Without a controller on this host and without an agent, the actor waits at least this long for requests; starting
actors and reserving resources takes less."""
CHECK_S = 1.0
REPLY_SENT_S = 0.2
"""How long `leave` waits before the process exits, so that its reply is sent."""
RELEASE_S = 3.0
"""Longest wait of `leave` for Ray to release the reservations."""
SHARED_FOLDER_MARK = "seen-from-all-nodes"
"""File in the run's folder by which a node detects whether it shares that folder with the controller."""


def connect_problem(host: str, port: int) -> str | None:
    """Why a connection to the port fails; None if it succeeds."""
    try:
        check_reachable(host, port, "whether its port is open", DIAL_S)
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return None


@dataclass(frozen=True, slots=True)
class NodeActorArguments:
    """The facts about a run that every node needs."""

    run: str
    token: str
    """The secret that protects the run's connections. It is not a variable of the `runtime_env`, because Ray's
    dashboard shows these."""
    folder: str
    """The run's folder, on the controller's host."""
    cwd: str
    """The controller's working folder."""
    mark: str
    """The content of the file `SHARED_FOLDER_MARK` in `folder`."""
    peer: str | None
    """Address of the cluster's head: the interface on the route to it is used. None if Ray runs only on this host."""
    interface: str | None
    """Name, or prefix of the name, of the interface to use instead of the one on the route to `peer`."""
    several: bool
    """Whether the cluster has other hosts, so that the address must not be that of the loopback interface."""
    ports: PortRange | None
    """Ports on which agents may listen; any if None."""

    @staticmethod
    def of(
        run: str, token: str, folder: str, cluster_dir: Path, peer: str | None, interface: str | None, several: bool,
        ports: PortRange | None,
    ) -> "NodeActorArguments":  # fmt: skip
        """Creates the arguments with a new mark, whose file is in the subfolder `cluster_dir` of the run's folder."""
        make_folder(cluster_dir)
        mark = secrets.token_hex(8)
        write_atomically(cluster_dir / SHARED_FOLDER_MARK, mark.encode())
        return NodeActorArguments(run, token, folder, str(Path.cwd()), mark, peer, interface, several, ports)


class NodeActor:
    """The actor on the node `name`.

    Raises:
        UnreachableAddress: other nodes cannot reach this node.
        UnsafePath: another user could change the files of this actor.
    """

    def __init__(self, arguments: NodeActorArguments, name: str) -> None:
        self._run, self._token, self._ports, self._name = arguments.run, arguments.token, arguments.ports, name
        self._run_folder = arguments.folder
        self._began = time.time()
        self._generation = 0
        """The latest generation of all requests; requests of earlier generations are refused."""
        self._latest_request = 0, 0
        """Generation and number of the latest request for an agent."""
        self._agent_lock = threading.Lock()
        """Held while the agent is started, handed over or killed."""
        self._request_lock = threading.Lock()
        """Guards `_generation` and `_latest_request`."""
        self._groups_lock = threading.Lock()
        """Guards `_groups`."""
        self._interface = reachable_address(
            name, network_interfaces(), arguments.peer, arguments.interface, arguments.several
        )
        remove_stale_run_dirs()
        self._hold = -1
        """Descriptor that holds the run's shared memory, also while no agent runs; see `base.folders.hold_folder`."""
        self._folder = self._find_folder(Path(arguments.folder), arguments.mark)
        self._cwd = arguments.cwd if Path(arguments.cwd).is_dir() else str(self._folder)
        self._cluster_dir = self._folder / "cluster" / "nodes" / name
        self._logs = self._folder / "logs"
        for each in (self._cluster_dir, self._logs):
            make_folder(each)
        self._agent: ServiceAddress | None = None
        self._controller: tuple[int, int | None] | None = None
        self._grace_s, self._needed_at = 0.0, time.monotonic()
        self._groups: list[Any] = []
        self._held: list[dict[str, Any]] = []
        threading.Thread(target=self._watch, name="actor", daemon=True).start()

    def facts(self) -> dict[str, Any]:
        """The facts about the node that the controller needs."""
        return {
            "host": socket.gethostname(), "address": self._interface.address, "interface": self._interface.name,
            "place": processes.pid_namespace(),  # whether process ids of this node are valid for the controller
            "shared": str(run_shm_dir(self._run)), "cluster_dir": str(self._cluster_dir),
            "logs": str(self._logs), "python": sys.executable, "cwd": self._cwd,
            "versions": node_versions.installed_versions(), "environment": original_environment(),
            "beacons": str(shm_root()), "folder": self._run_folder,
        }  # fmt: skip

    def start_agent(self, order: int, leader: dict[str, Any], orphan_grace_s: float) -> dict[str, Any]:
        """Starts a new agent whose workers connect to the controller `leader`; kills the previous agent and its
        workers. The run's shared memory stays: it holds weights, which new workers use again.

        Args:
            order: number of the request within its generation. A request that arrives after a later one is refused.

        Raises:
            Superseded: a later generation has the run.
            AgentError: the agent does not start, or a later request has arrived.
        """
        chosen = Leader(**leader)
        self._accept_generation(chosen.generation)
        request = chosen.generation, order
        with self._request_lock:
            self._latest_request = max(self._latest_request, request)
        with self._agent_lock:
            if request < self._latest_request:
                raise AgentError("start", f"a later request for an agent on {self._name} has arrived")
            self.watch_controller(chosen.generation, chosen.pid, chosen.start_ticks, orphan_grace_s)
            chosen.publish(self._run)
            held, self._hold = self._hold, hold_folder(run_shm_dir(self._run))
            if held >= 0:
                os.close(held)
            if self._agent is not None:  # the kernel kills its workers as well
                processes.send_signal(self._agent.pid, self._agent.start_ticks, signal.SIGKILL)
            self._agent = start_agent(
                self._run, self._token, self._cluster_dir, generation=chosen.generation, orphan_grace_s=orphan_grace_s,
                host=self._interface.address, node=self._name, controller=chosen.pid, ports=self._ports,
            )  # fmt: skip
            return asdict(self._agent)

    def dial(self, addresses: list[tuple[str, int]]) -> list[str | None]:
        """For each address and port: why a connection from this node fails; None if it succeeds."""
        return [connect_problem(host, port) for host, port in addresses]

    @property
    def _agent_is_alive(self) -> bool:
        return self._agent is not None and processes.is_alive(self._agent.pid, self._agent.start_ticks)

    def _accept_generation(self, generation: int) -> None:
        """Stores the generation of a request, and keeps this actor from ending for a while. Raises Superseded if a
        later generation has sent a request."""
        with self._request_lock:
            if generation < self._generation:
                raise Superseded(self._run, generation, self._generation)
            self._generation, self._needed_at = generation, time.monotonic()

    def hand_over(self, generation: int, files: list[tuple[str, str]]) -> dict[str, Any]:
        """Returns what a later controller needs to take over this node. `changed` is the first of its `files` (see
        `node_versions.imported_files`) that has changed since this actor started; None if none has. Raises
        Superseded."""
        self._accept_generation(generation)
        with self._agent_lock:
            if not self._agent_is_alive:  # nor any worker, so what they left in shared memory is outdated
                shutil.rmtree(run_shm_dir(self._run), ignore_errors=True)
            return {
                "token": self._token, "held": self._held,
                "agent": asdict(self._agent) if self._agent is not None and self._agent_is_alive else None,
                "changed": changed_since(self._began, locate_files(files)),
            }  # fmt: skip

    def watch_controller(self, generation: int, pid: int | None, start_ticks: int | None, grace_s: float) -> None:
        """Makes this actor end when a process of this host has been gone longer than `grace_s`. Raises
        Superseded."""
        self._accept_generation(generation)
        self._controller = None if pid is None else (pid, start_ticks)
        self._grace_s = grace_s

    def reserve(self, generation: int, bundle: dict[str, float], known: list[str]) -> str:
        """Creates a placement group on this node and returns its id. Groups whose ids are not in `known` are
        released first: the controller does not know them, or could not release them because Ray did not respond.
        Raises Superseded."""
        self._accept_generation(generation)
        with self._groups_lock:
            for leftover in [group for group in self._groups if group.id.hex() not in known]:
                ray.util.remove_placement_group(leftover)
                self._groups.remove(leftover)
            group = ray.util.placement_group([bundle], strategy="PACK")
            self._groups.append(group)
        return str(group.id.hex())

    def save_reservations(self, generation: int, held: list[dict[str, Any]]) -> None:
        """Stores the reservations (see `Reservation`) for a later controller. Raises Superseded."""
        self._accept_generation(generation)
        self._held = held

    def leave(self, generation: int) -> None:
        """Stops the agent with its workers, releases the reservations, and ends. Raises Superseded."""
        self._accept_generation(generation)
        with self._agent_lock:
            try:
                self._kill_agent()
                with contextlib.suppress(WaitTimeout):  # they end with this actor in any case
                    waits.future(
                        waits.run_in_thread(self._release_groups, "releases"), waits_for="Ray",
                        why="releasing the reservations",
                        timeout_s=RELEASE_S,
                    )  # fmt: skip
            finally:
                threading.Timer(REPLY_SENT_S, os._exit, [0]).start()

    def _release_groups(self) -> None:
        for group in self._groups:
            ray.util.remove_placement_group(group)

    def _kill_agent(self) -> None:
        if self._agent is not None:
            kill_agent(self._agent, self._cluster_dir)

    def _find_folder(self, folder: Path, mark: str) -> Path:
        """Returns the run's folder if this node shares it with the controller; otherwise a private one of this node."""
        with contextlib.suppress(OSError):
            if (folder / "cluster" / SHARED_FOLDER_MARK).read_text() == mark:
                return folder
        return make_user_temp_dir() / self._run

    def _watch(self) -> None:
        """Ends the actor when no controller can need it any more."""
        while self._is_needed():
            waits.sleep(CHECK_S, "the next check whether this actor is needed")
        self._kill_agent()
        os._exit(0)

    def _is_needed(self) -> bool:
        now, watched = time.monotonic(), self._controller
        alive = self._agent_is_alive if watched is None else processes.is_alive(*watched)
        if alive:
            self._needed_at = now
        if watched is None:
            linger_s = max(LINGER_S, self._grace_s)
        else:
            linger_s = self._grace_s if self._agent is not None else 0.0  # without an agent nothing can be adopted
        return now - self._needed_at <= linger_s


def original_environment() -> dict[str, str]:
    """The environment of the process that started Ray on this node, before Ray changed it for its workers."""
    try:
        own = psutil.Process(int(os.environ["RAY_RAYLET_PID"])).environ()
    except (KeyError, ValueError, psutil.Error):
        own = dict(os.environ)
    kept = {name: value for name, value in own.items() if not name.startswith("RAY_")}
    preload = [each for each in re.split("[ :]", kept.pop("LD_PRELOAD", "")) if each and "/ray/core/" not in each]
    return kept | ({"LD_PRELOAD": ":".join(preload)} if preload else {})
