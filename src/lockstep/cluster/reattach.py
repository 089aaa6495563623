"""Takes over, or kills, the node agent that an earlier controller of a run left on this host.

The workers of a killed controller live on for `orphan_grace_s`. The next controller first takes over those that it can
use and kills the others: otherwise a checkpoint that they still write would appear among its own.
"""

import logging
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.base import waits
from lockstep.base.folders import run_shm_dir
from lockstep.base.text import first_line
from lockstep.base.transport.frames import WireError
from lockstep.base.transport.run_token import TOKEN_VARIABLE, uses_tls
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.node_versions import changed_since
from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.rpc.futures import gather_outcomes
from lockstep.cluster.rpc.remote_worker import RemoteWorker
from lockstep.cluster.rpc.rpc_messages import WorkerManifest
from lockstep.watch.agent.agent_client import AgentClient, AgentError, WorkerFacts
from lockstep.watch.agent.service_discovery import Leader, ServiceAddress
from lockstep.watch.beacon.reader import read_beacons
from lockstep.watch.procfs import processes

log = logging.getLogger(__name__)

ADOPTION_STALL_S = 10.0
"""A worker that makes no progress for this long during its adoption is replaced."""


class OrphanPool:
    """The workers that an earlier controller left behind and that are not adopted yet.

    Args:
        handle: creates the handle of a worker that another controller started on a node.
        end: kills workers.
    """

    def __init__(
        self,
        handle: Callable[[WorkerSpec, ClusterNode], RemoteWorker],
        end: Callable[[Sequence[RemoteWorker]], None],
    ) -> None:
        self._handle, self._end = handle, end
        self._left: dict[RemoteWorker, str] = {}
        """The fingerprint of each worker."""

    def add(self, node: ClusterNode, workers: Sequence[WorkerFacts]) -> None:
        """Adds the workers of a node that are alive and adoptable; kills the others."""
        others: list[RemoteWorker] = []
        for facts in workers:
            if facts.alive:
                manifest = WorkerManifest.of(facts.note)
                worker = self._handle(WorkerSpec(facts.name, "", 0, "") if manifest is None else manifest.spec, node)
                worker.pid = facts.pid
                if manifest is not None and manifest.fingerprint:
                    self._left[worker] = manifest.fingerprint
                else:
                    others.append(worker)
        self._end(others)

    def claim(
        self, specs: Sequence[WorkerSpec], fingerprint: Callable[[WorkerSpec, ClusterNode], str]
    ) -> dict[int, RemoteWorker]:
        """Returns workers that can serve these specs, by index. Kills other workers with the same role and rank."""
        if not self._left:
            return {}
        found: dict[int, RemoteWorker] = {}
        for number, spec in enumerate(specs):
            fit = next((w for w, known in self._left.items() if self._can_serve(w, known, spec, fingerprint)), None)
            if fit is not None:
                del self._left[fit]
                found[number] = fit
        places = {(spec.role, spec.rank) for spec in specs}
        self._discard([worker for worker in self._left if (worker.spec.role, worker.spec.rank) in places])
        return found

    @staticmethod
    def _can_serve(
        worker: RemoteWorker, known: str, spec: WorkerSpec, fingerprint: Callable[[WorkerSpec, ClusterNode], str]
    ) -> bool:
        place = worker.spec.role, worker.spec.rank
        fits = spec.adoptable and not worker.dead and place == (spec.role, spec.rank)
        return fits and known == fingerprint(spec, worker.node)

    def failed_adoptions(self, claimed: Mapping[int, RemoteWorker]) -> list[int]:
        """Waits for the adoptions, and kills the workers whose adoption failed. Returns their indices."""
        outcomes = gather_outcomes(
            [worker.started for worker in claimed.values()], why="adoption", stall_s=ADOPTION_STALL_S
        )
        lost: list[int] = []
        for (number, worker), outcome in zip(claimed.items(), outcomes, strict=True):
            if outcome is None:
                log.info("adopted %s (pid %d)", worker.name, worker.pid)
            else:
                log.info("replacing %s (pid %d): %s", worker.name, worker.pid, first_line(outcome))
                lost.append(number)
        self._end([claimed[number] for number in lost])
        return lost

    def release(self) -> None:
        """Kills the workers that have not been adopted."""
        self._discard(list(self._left))

    def _discard(self, workers: Sequence[RemoteWorker]) -> None:
        for worker in workers:
            del self._left[worker]
        self._end(workers)


KILL_WAIT_S = 10.0
"""A process that still exists this long after SIGKILL is stuck in the kernel (in a driver, for example)."""


@dataclass(frozen=True, slots=True)
class InheritedAgent:
    """The node agent of an earlier generation, taken over with its workers."""

    agent: AgentClient
    token: str

    @property
    def run(self) -> str:
        """The run id, which names the run's shared memory."""
        return self.agent.address.run


def take_over_local_agent(
    cluster_dir: Path, generation: int, orphan_grace_s: float, tls: bool = False
) -> InheritedAgent | None:
    """Takes over the agent that an earlier generation left in this folder, if there is one within its grace; not if the
    code on disk is newer than the code that the agent and its fork servers have imported, nor if its connections do not
    use TLS as `tls` says."""
    agent = _previous_agent(cluster_dir, generation)
    if agent is None or Leader.read(agent.run) is None or not agent.names_agent(cluster_dir):
        return None
    try:
        process = psutil.Process(agent.pid)
        token, changed = process.environ()[TOKEN_VARIABLE], changed_since(process.create_time())
    except (psutil.Error, KeyError) as error:
        log.info("cannot read the token of agent %d: %r", agent.pid, error)
        return None
    if changed is not None:
        log.info("%s has changed since the run was last started: no process of it is reused", changed)
        return None
    if uses_tls(token) != tls:
        log.info("cluster.tls has changed since the run was last started: no process of it is reused")
        return None
    client = adopt_agent(agent, token, generation, orphan_grace_s)
    return None if client is None else InheritedAgent(client, token)


def adopt_agent(
    agent: ServiceAddress, token: str, generation: int, orphan_grace_s: float, lost_after_s: float | None = None
) -> AgentClient | None:
    """Takes over an agent of an earlier generation; None if it is exiting or does not respond.

    Args:
        lost_after_s: for an agent on another host, see `AgentClient`.
    """
    try:
        client = AgentClient(agent, token, generation=generation, lost_after_s=lost_after_s)
    except WireError as error:
        log.info("cannot take over agent %d on %s: %s", agent.pid, agent.host, error)
        return None
    try:
        client.take_over(orphan_grace_s)
    except (AgentError, WaitTimeout) as error:
        log.info("cannot take over agent %d on %s: %s", agent.pid, agent.host, error)
        client.close()
        return None
    return client


def kill_previous_agent(cluster_dir: Path, generation: int) -> None:
    """Kills the agent that an earlier generation left in this folder, and its workers; waits until they have ended and
    removes their shared memory. Does nothing if there is no such agent, or if `agent.json` names another process."""
    agent = _previous_agent(cluster_dir, generation)
    if agent is None:
        return
    if agent.names_agent(cluster_dir):
        log.warning("killing what generation %d left behind: agent %d and its workers", agent.generation, agent.pid)
    elif processes.is_alive(agent.pid, agent.start_ticks):
        file, command = cluster_dir / "agent.json", " ".join(processes.command_line(agent.pid))[:80]
        log.warning("%s names process %d (%s), which is no agent of this run: not killed", file, agent.pid, command)
    kill_agent(agent, cluster_dir)


def kill_agent(agent: ServiceAddress, cluster_dir: Path) -> None:
    """Kills the agent that serves this folder of this host, and its workers, waits until they have ended, and removes
    the run's shared memory. Kills and removes nothing if the address names another process, and removes nothing that a
    worker still uses."""
    workers = [(state.pid, state.start_ticks) for state in read_beacons(agent.run) if state.role != "controller"]
    if agent.names_agent(cluster_dir):
        processes.send_signal(agent.pid, agent.start_ticks, signal.SIGKILL)  # the kernel kills its workers with it
    elif processes.is_alive(agent.pid, agent.start_ticks):
        return
    try:
        waits.poll(
            lambda: None if any(processes.is_alive(pid, start) for pid, start in workers) else True,
            kind="process", waits_for="workers of an earlier generation", why="their ends", timeout_s=KILL_WAIT_S,
        )  # fmt: skip
    except WaitTimeout as error:
        log.warning("%s", error)
        return
    shutil.rmtree(run_shm_dir(agent.run), ignore_errors=True)


def _previous_agent(cluster_dir: Path, generation: int) -> ServiceAddress | None:
    try:
        agent = ServiceAddress.read(cluster_dir)
    except (OSError, ValueError):
        return None
    return agent if agent.generation < generation else None
