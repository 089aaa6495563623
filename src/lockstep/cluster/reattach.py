"""Takes over, or kills, the node agent that an earlier controller of a run left on this host.

A controller that was killed leaves workers behind for `orphan_grace_s`. The next controller takes over what is
useful and kills the rest before anything else: a save still in progress would otherwise appear among the new
controller's checkpoints.
"""

import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.base import waits
from lockstep.base.bounded_wait import WaitTimeout
from lockstep.base.folders import run_shm_dir
from lockstep.base.text import first_line
from lockstep.base.transport.frames import WireError
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
"""Who makes no progress for so long on the way to us is replaced."""


class OrphanPool:
    """Those that are left.

    Args:
        handle: makes the handle on a worker that somebody else has started, on a node.
        end: ends workers at once.
    """

    def __init__(
        self,
        handle: Callable[[WorkerSpec, ClusterNode], RemoteWorker],
        end: Callable[[Sequence[RemoteWorker]], None],
    ) -> None:
        self._handle, self._end = handle, end
        self._left: dict[RemoteWorker, str] = {}
        """With what each is fit for."""

    def meet(self, node: ClusterNode, workers: Sequence[WorkerFacts]) -> None:
        """Takes those of a node that live and that somebody can go on with; ends the others."""
        others: list[RemoteWorker] = []
        for facts in workers:
            if facts.alive:
                charge = WorkerManifest.of(facts.note)
                worker = self._handle(WorkerSpec(facts.name, "", 0, "") if charge is None else charge.spec, node)
                worker.pid = facts.pid
                if charge is not None and charge.fitness:
                    self._left[worker] = charge.fitness
                else:
                    others.append(worker)
        self._end(others)

    def claim(
        self, specs: Sequence[WorkerSpec], fitness: Callable[[WorkerSpec, ClusterNode], str]
    ) -> dict[int, RemoteWorker]:
        """Those that do for some of these, by their numbers. Others whose places are asked for end."""
        if not self._left:
            return {}
        found: dict[int, RemoteWorker] = {}
        for number, spec in enumerate(specs):
            fit = next((w for w, what in self._left.items() if self._fits(w, what, spec, fitness)), None)
            if fit is not None:
                del self._left[fit]
                found[number] = fit
        places = {(spec.role, spec.rank) for spec in specs}
        self._give_up([worker for worker in self._left if (worker.spec.role, worker.spec.rank) in places])
        return found

    @staticmethod
    def _fits(
        worker: RemoteWorker, what: str, spec: WorkerSpec, fitness: Callable[[WorkerSpec, ClusterNode], str]
    ) -> bool:
        place = worker.spec.role, worker.spec.rank
        fits = spec.adoptable and not worker.dead and place == (spec.role, spec.rank)
        return fits and what == fitness(spec, worker.node)

    def lost(self, claimed: Mapping[int, RemoteWorker]) -> list[int]:
        """Those that do not come over to us, or that cannot be used again after all; they have ended."""
        outcomes = gather_outcomes(
            [worker.started for worker in claimed.values()], why="adoption", stall_s=ADOPTION_STALL_S
        )
        lost: list[int] = []
        for (number, worker), outcome in zip(claimed.items(), outcomes, strict=True):
            if outcome is None:
                log.info("%s (pid %d) is adopted", worker.name, worker.pid)
            else:
                log.info("%s (pid %d) is replaced: %s", worker.name, worker.pid, first_line(outcome))
                lost.append(number)
        self._end([claimed[number] for number in lost])
        return lost

    def release(self) -> None:
        """Ends those that nobody has asked for."""
        self._give_up(list(self._left))

    def _give_up(self, workers: Sequence[RemoteWorker]) -> None:
        for worker in workers:
            del self._left[worker]
        self._end(workers)


KILL_WAIT_S = 10.0
"""A process that SIGKILL has not removed after this long is in the kernel's hands (a driver's, say)."""


@dataclass(frozen=True, slots=True)
class InheritedAgent:
    """The agent of an earlier generation, which is ours from now on, with the workers that it has."""

    agent: AgentClient
    token: str

    @property
    def run(self) -> str:
        """Under which all of them have their shared memory."""
        return self.agent.address.run


def take_over_local_agent(affairs: Path, generation: int, orphan_grace_s: float) -> InheritedAgent | None:
    """Goes on with the agent that an earlier generation left in this folder, if there is one within its grace; not
    where the code on disk is newer than what it, and the processes that it forks workers from, have imported."""
    agent = _previous_agent(affairs, generation)
    if agent is None or Leader.read(agent.run) is None or not processes.is_alive(agent.pid, agent.start_ticks):
        return None
    try:
        process = psutil.Process(agent.pid)
        token, changed = process.environ()["LOCKSTEP_TOKEN"], changed_since(process.create_time())
    except (psutil.Error, KeyError) as error:
        log.info("agent %d cannot be asked for its token: %r", agent.pid, error)
        return None
    if changed is not None:
        log.info("%s has changed since the run was last started: none of its processes is used again", changed)
        return None
    client = adopt_agent(agent, token, generation, orphan_grace_s)
    return None if client is None else InheritedAgent(client, token)


def adopt_agent(
    agent: ServiceAddress, token: str, generation: int, orphan_grace_s: float, lost_after_s: float | None = None
) -> AgentClient | None:
    """An agent of an earlier generation, which is ours from now on; None where it is leaving, or does not answer.

    Args:
        lost_after_s: of one on another host, see `AgentClient`.
    """
    try:
        client = AgentClient(agent, token, generation=generation, lost_after_s=lost_after_s)
    except WireError as error:
        log.info("agent %d on %s cannot be taken over: %s", agent.pid, agent.host, error)
        return None
    try:
        client.take_over(orphan_grace_s)
    except (AgentError, WaitTimeout) as error:
        log.info("agent %d on %s cannot be taken over: %s", agent.pid, agent.host, error)
        client.close()
        return None
    return client


def kill_previous_agent(affairs: Path, generation: int) -> None:
    """Kills the agent that an earlier generation left in this folder, and with it its workers; waits for their ends
    and removes their shared memory. An agent that has left in order has left nothing."""
    agent = _previous_agent(affairs, generation)
    if agent is None:
        return
    if processes.is_alive(agent.pid, agent.start_ticks):
        log.warning("ending what generation %d has left: agent %d and its workers", agent.generation, agent.pid)
    kill_agent(agent)


def kill_agent(agent: ServiceAddress) -> None:
    """Kills an agent of this host, and with it its workers; waits for their ends and removes the run's shared
    memory."""
    workers = [(state.pid, state.start_ticks) for state in read_beacons(agent.run) if state.role != "controller"]
    if processes.is_alive(agent.pid, agent.start_ticks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent.pid, signal.SIGKILL)  # the kernel kills its workers with it
    try:
        waits.poll(
            lambda: None if any(processes.is_alive(pid, start) for pid, start in workers) else True,
            kind="process", waits_for="workers of an earlier generation", why="their ends", timeout_s=KILL_WAIT_S,
        )  # fmt: skip
    except WaitTimeout as error:
        log.warning("%s", error)
    shutil.rmtree(run_shm_dir(agent.run), ignore_errors=True)


def _previous_agent(affairs: Path, generation: int) -> ServiceAddress | None:
    try:
        agent = ServiceAddress.read(affairs)
    except (OSError, ValueError, TypeError):
        return None
    return agent if agent.generation < generation else None
