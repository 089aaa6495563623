"""What a run has on each node of a Ray cluster: an actor that starts the node agent, and holds it.

The actor is detached and named, so that a later controller finds it. It holds what the run has reserved on its node as
well: placement groups end with the actor that made them. That of the controller's own node goes when the controller is
gone for longer than the grace, the others when their agent has left.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import ray

from lockstep.cluster import versions
from lockstep.cluster.addresses import interfaces, own_address
from lockstep.watch import procs, waits
from lockstep.watch.agent_client import Address, start_agent
from lockstep.watch.folders import base_dir, make_own_dir, run_dir
from lockstep.watch.leader import Leader, Superseded

LINGER_S = 600.0
"""Without a controller on this host and without an agent the actor waits so long for somebody to ask for one."""
LOOK_S = 1.0
MARK = "seen-from-all-nodes"
"""File of the run's folder by which a node finds out whether it shares that folder with the controller."""


class Keeper:
    """On one node.

    Args:
        token: the run's. It comes as an argument as the variables of a `runtime_env` are shown by Ray's dashboard.
        folder, cwd: the run's folder and the controller's working folder, on its host.
        mark: what the file `MARK` in `folder` says.
        name: of the node.
        peer: address of a node that is to reach this one; None where there is no other.
        interface: name, or beginning of the name, of the interface to use instead of the one on the way there.
        several: whether there are other hosts.

    Raises:
        UnreachableAddress: others do not reach this node.
        PermissionError: somebody else has the folder for what is kept here.
    """

    def __init__(
        self, run: str, token: str, folder: str, cwd: str, mark: str, name: str, peer: str | None,
        interface: str | None, several: bool,
    ) -> None:  # fmt: skip
        self._run, self._token, self._name = run, token, name
        self._generation = 0
        """The latest that was heard of: what an earlier one asks for is refused from then on."""
        self._starting = threading.Lock()
        self._interface = own_address(name, interfaces(), peer, interface, several)
        self._folder = self._find_folder(Path(folder), mark)
        self._cwd = cwd if Path(cwd).is_dir() else str(self._folder)
        self._affairs = self._folder / "cluster" / "nodes" / name
        self._logs = self._folder / "logs"
        for each in (self._affairs, self._logs):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._agent: Address | None = None
        self._controller: tuple[int, int | None] | None = None
        self._grace_s, self._gone_since = 0.0, time.monotonic()
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

    def start_agent(self, leader: dict[str, Any], orphan_grace_s: float) -> dict[str, Any]:
        """Another agent, whose workers find `leader`; one that was before is killed, and its workers with it. What is
        in the run's shared memory stays: weights are, and other workers come back to them.

        Raises:
            Superseded: a later generation has the run.
            AgentError: it does not come up.
        """
        chosen = Leader(**leader)
        with self._starting:
            self.watch_controller(chosen.generation, chosen.pid, chosen.start_ticks, orphan_grace_s)
            chosen.publish(self._run)
            self._end_agent()
            self._agent = start_agent(
                self._run, self._token, self._affairs, generation=chosen.generation, orphan_grace_s=orphan_grace_s,
                host=self._interface.address, node=self._name,
            )  # fmt: skip
            return asdict(self._agent)

    def _end_agent(self) -> None:
        """Kills it; the kernel kills its workers."""
        agent = self._agent
        if agent is not None and procs.alive(agent.pid, agent.start_ticks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent.pid, signal.SIGKILL)

    def _admit(self, generation: int) -> None:
        if generation < self._generation:
            raise Superseded(self._run, generation, self._generation)
        self._generation = generation

    def heritage(self, generation: int) -> dict[str, Any]:
        """What a later controller needs to go on with what is here; from here on the grace is its own. Raises
        Superseded."""
        self._admit(generation)
        self._gone_since = time.monotonic()
        agent = self._agent
        lives = agent is not None and procs.alive(agent.pid, agent.start_ticks)
        return {
            "token": self._token, "held": self._held,
            "agent": asdict(agent) if agent is not None and lives else None,
        }  # fmt: skip

    def watch_controller(self, generation: int, pid: int | None, start_ticks: int | None, grace_s: float) -> None:
        """Whose end is to be this actor's, so long after; a pid of this host. Raises Superseded."""
        self._admit(generation)
        self._controller = None if pid is None else (pid, start_ticks)
        self._grace_s, self._gone_since = grace_s, time.monotonic()

    def reserve(self, generation: int, bundle: dict[str, float]) -> str:
        """Makes a placement group of this actor's, on the node that its resources name; its id. Raises Superseded."""
        self._admit(generation)
        group = ray.util.placement_group([bundle], strategy="PACK")
        self._groups.append(group)
        return str(group.id.hex())

    def keep(self, generation: int, held: list[dict[str, Any]]) -> None:
        """For a later controller: who has what of it (see `cluster.places.Held`). Raises Superseded."""
        self._admit(generation)
        self._held = held

    def _find_folder(self, folder: Path, mark: str) -> Path:
        with contextlib.suppress(OSError):
            if (folder / "cluster" / MARK).read_text() == mark:
                return folder
        own = Path(tempfile.gettempdir()) / f"lockstep-{os.getuid()}"  # a name that anybody could take first
        return make_own_dir(own, "remove it, or set TMPDIR where Ray is started") / self._run

    def _watch(self) -> None:
        """Ends the actor when nobody can want it any more."""
        while True:
            waits.sleep(LOOK_S, "the next look at who wants this actor")
            now = time.monotonic()
            if self._controller is not None:
                if procs.alive(*self._controller):
                    self._gone_since = now
                elif now - self._gone_since > self._grace_s:
                    break
            elif self._agent is not None and procs.alive(self._agent.pid, self._agent.start_ticks):
                self._gone_since = now
            elif now - self._gone_since > LINGER_S:
                break
        self._end_agent()
        if self._agent is not None:
            shutil.rmtree(run_dir(self._run), ignore_errors=True)
        os._exit(0)


def environment() -> dict[str, str]:
    """Of whoever started Ray on this node, before Ray changed it for its workers."""
    try:
        own = psutil.Process(int(os.environ["RAY_RAYLET_PID"])).environ()
    except (KeyError, ValueError, psutil.Error):
        own = dict(os.environ)
    kept = {name: value for name, value in own.items() if not name.startswith("RAY_")}
    preload = [each for each in re.split("[ :]", kept.pop("LD_PRELOAD", "")) if each and "/ray/core/" not in each]
    return kept | ({"LD_PRELOAD": ":".join(preload)} if preload else {})
