"""What a run has on each node of a Ray cluster: an actor that starts the node agent, and holds it.

The actor is detached and named, so that a later controller finds it. It holds what the run has reserved on its node as
well: placement groups end with the actor that made them. That of the controller's own node goes when the controller is
gone for longer than the grace, the others when their agent has left, and all of them when nobody asks for an agent.

Whatever it is asked for has the generation of who asks, and it obeys the latest of which it has heard.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from lockstep.cluster import versions
from lockstep.cluster.addresses import interfaces, own_address
from lockstep.cluster.freshness import changed_since, found
from lockstep.cluster.predecessor import end_agent
from lockstep.cluster.ray.reaching import why_shut
from lockstep.watch import procs, waits
from lockstep.watch.agent_client import Address, AgentError
from lockstep.watch.agent_start import start_agent
from lockstep.watch.bounded import begun
from lockstep.watch.folders import base_dir, make_own_dir, run_dir, write_whole
from lockstep.watch.leader import Leader, Superseded
from lockstep.watch.ports import Ports

LINGER_S = 180.0
"""Without a controller on this host and without an agent the actor waits at least so long to be asked for something;
nodes are employed and reserved within that."""
LOOK_S = 1.0
ANSWERED_S = 0.2
"""An answer is on its way within this."""
GIVEN_BACK_S = 3.0
MARK = "seen-from-all-nodes"
"""File of the run's folder by which a node finds out whether it shares that folder with the controller."""


@dataclass(frozen=True, slots=True)
class Site:
    """What every node is told of the run."""

    run: str
    token: str
    """It comes as an argument as the variables of a `runtime_env` are shown by Ray's dashboard."""
    folder: str
    """The run's, on the controller's host."""
    cwd: str
    """The controller's working folder there."""
    mark: str
    """What the file `MARK` in `folder` says."""
    peer: str | None
    """Address of a node that is to reach the others; None where there is no other."""
    interface: str | None
    """Name, or beginning of the name, of the interface to use instead of the one on the way there."""
    several: bool
    """Whether there are other hosts."""
    ports: Ports | None
    """On which agents may listen; any when None."""

    @staticmethod
    def of(
        run: str, token: str, folder: str, affairs: Path, peer: str | None, interface: str | None, several: bool,
        ports: Ports | None,
    ) -> "Site":  # fmt: skip
        """With a new mark, in the folder `affairs` of the run's folder."""
        affairs.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark = secrets.token_hex(8)
        write_whole(affairs / MARK, mark.encode())
        return Site(run, token, folder, str(Path.cwd()), mark, peer, interface, several, ports)


class Keeper:
    """On one node, of that name.

    Raises:
        UnreachableAddress: others do not reach this node.
        PermissionError: somebody else has the folder for what is kept here.
    """

    def __init__(self, site: Site, name: str) -> None:
        self._run, self._token, self._ports, self._name = site.run, site.token, site.ports, name
        self._began = time.time()
        self._generation = 0
        """The latest that was heard of: what an earlier one asks for is refused from then on."""
        self._order = 0, 0
        """Generation and number of the latest order of an agent."""
        self._starting, self._admitting, self._reserving = threading.Lock(), threading.Lock(), threading.Lock()
        self._interface = own_address(name, interfaces(), site.peer, site.interface, site.several)
        self._folder = self._find_folder(Path(site.folder), site.mark)
        self._cwd = site.cwd if Path(site.cwd).is_dir() else str(self._folder)
        self._affairs = self._folder / "cluster" / "nodes" / name
        self._logs = self._folder / "logs"
        for each in (self._affairs, self._logs):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._agent: Address | None = None
        self._controller: tuple[int, int | None] | None = None
        self._grace_s, self._wanted_at = 0.0, time.monotonic()
        self._groups: list[Any] = []
        self._held: list[dict[str, Any]] = []
        threading.Thread(target=self._watch, name="keeper", daemon=True).start()

    def facts(self) -> dict[str, Any]:
        """Of the node, for the controller."""
        return {
            "host": socket.gethostname(), "address": self._interface.address, "interface": self._interface.name,
            "place": procs.place(), "shared": str(run_dir(self._run)), "affairs": str(self._affairs),
            "logs": str(self._logs), "python": sys.executable, "cwd": self._cwd,
            "versions": versions.facts(), "environment": environment(), "beacons": str(base_dir()),
        }  # fmt: skip

    def start_agent(self, order: int, leader: dict[str, Any], orphan_grace_s: float) -> dict[str, Any]:
        """Another agent, whose workers find `leader`; one that was before is killed, and its workers with it. What is
        in the run's shared memory stays: weights are, and other workers come back to them.

        Args:
            order: number among those of its generation. An order that arrives late, behind a later one, is void.

        Raises:
            Superseded: a later generation has the run.
            AgentError: it does not come up, or the order is void.
        """
        chosen = Leader(**leader)
        self._admit(chosen.generation)
        mine = chosen.generation, order
        with self._admitting:
            self._order = max(self._order, mine)
        with self._starting:
            if mine < self._order:
                raise AgentError("start", f"another agent was asked for meanwhile on {self._name}")
            self.watch_controller(chosen.generation, chosen.pid, chosen.start_ticks, orphan_grace_s)
            chosen.publish(self._run)
            if self._agent_lives:
                assert self._agent is not None
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._agent.pid, signal.SIGKILL)  # the kernel kills its workers
            self._agent = start_agent(
                self._run, self._token, self._affairs, generation=chosen.generation, orphan_grace_s=orphan_grace_s,
                host=self._interface.address, node=self._name, controller=chosen.pid, ports=self._ports,
            )  # fmt: skip
            return asdict(self._agent)

    def dial(self, places: list[tuple[str, int]]) -> list[str | None]:
        """Why nobody is reached from here at these addresses and ports; None where somebody is."""
        return [why_shut(*place) for place in places]

    @property
    def _agent_lives(self) -> bool:
        return self._agent is not None and procs.alive(self._agent.pid, self._agent.start_ticks)

    def _admit(self, generation: int) -> None:
        with self._admitting:
            if generation < self._generation:
                raise Superseded(self._run, generation, self._generation)
            self._generation, self._wanted_at = generation, time.monotonic()

    def heritage(self, generation: int, files: list[tuple[str, str]]) -> dict[str, Any]:
        """What a later controller needs to go on with what is here; from here on the grace is its own. With one of its
        `files` (see `freshness.imported`) that has changed since this actor was started. Raises Superseded."""
        self._admit(generation)
        with self._starting:
            if not self._agent_lives:  # and no worker: what they have left explains nothing any more
                shutil.rmtree(run_dir(self._run), ignore_errors=True)
            return {
                "token": self._token, "held": self._held,
                "agent": asdict(self._agent) if self._agent is not None and self._agent_lives else None,
                "changed": changed_since(self._began, found(files)),
            }  # fmt: skip

    def watch_controller(self, generation: int, pid: int | None, start_ticks: int | None, grace_s: float) -> None:
        """Whose end is to be this actor's, so long after; a pid of this host. Raises Superseded."""
        self._admit(generation)
        self._controller = None if pid is None else (pid, start_ticks)
        self._grace_s = grace_s

    def reserve(self, generation: int, bundle: dict[str, float], counting: list[str]) -> str:
        """Makes a placement group of this actor's, on the node that its resources name; its id. Its groups that are not
        among those `counting` are given back first: the answer that told of them has not arrived, or Ray was silent
        when they were to be given back. Raises Superseded."""
        self._admit(generation)
        with self._reserving:
            for left in [each for each in self._groups if each.id.hex() not in counting]:
                ray.util.remove_placement_group(left)
                self._groups.remove(left)
            group = ray.util.placement_group([bundle], strategy="PACK")
            self._groups.append(group)
        return str(group.id.hex())

    def keep(self, generation: int, held: list[dict[str, Any]]) -> None:
        """For a later controller: who has what of it (see `cluster.places.Held`). Raises Superseded."""
        self._admit(generation)
        self._held = held

    def leave(self, generation: int) -> None:
        """Ends the agent with its workers, gives back what is reserved, and goes. Raises Superseded."""
        self._admit(generation)
        with self._starting:
            try:
                self._end()
                with contextlib.suppress(waits.WaitTimeout):  # they go with this actor in any case
                    waits.future(
                        begun(self._give_back, "gives back"), whom="Ray", why="what is reserved is given back",
                        timeout_s=GIVEN_BACK_S,
                    )  # fmt: skip
            finally:
                threading.Timer(ANSWERED_S, os._exit, [0]).start()

    def _give_back(self) -> None:
        for group in self._groups:
            ray.util.remove_placement_group(group)

    def _end(self) -> None:
        if self._agent is not None:
            end_agent(self._agent)

    def _find_folder(self, folder: Path, mark: str) -> Path:
        with contextlib.suppress(OSError):
            if (folder / "cluster" / MARK).read_text() == mark:
                return folder
        own = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"  # a name that anybody could take first
        return make_own_dir(own, "remove it, or set TMPDIR where Ray is started") / self._run

    def _watch(self) -> None:
        """Ends the actor when nobody can want it any more."""
        while self._is_wanted():
            waits.sleep(LOOK_S, "the next look at who wants this actor")
        self._end()
        os._exit(0)

    def _is_wanted(self) -> bool:
        now, watched = time.monotonic(), self._controller
        if self._agent_lives if watched is None else procs.alive(*watched):
            self._wanted_at = now
        if watched is None:
            patience_s = max(LINGER_S, self._grace_s)
        else:
            patience_s = self._grace_s if self._agent is not None else 0.0  # without one nobody can go on here
        return now - self._wanted_at <= patience_s


def environment() -> dict[str, str]:
    """Of whoever started Ray on this node, before Ray changed it for its workers."""
    try:
        own = psutil.Process(int(os.environ["RAY_RAYLET_PID"])).environ()
    except (KeyError, ValueError, psutil.Error):
        own = dict(os.environ)
    kept = {name: value for name, value in own.items() if not name.startswith("RAY_")}
    preload = [each for each in re.split("[ :]", kept.pop("LD_PRELOAD", "")) if each and "/ray/core/" not in each]
    return kept | ({"LD_PRELOAD": ":".join(preload)} if preload else {})
