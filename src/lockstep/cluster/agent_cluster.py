"""Workers on one or more nodes: what every cluster does, wherever its nodes come from."""

import atexit
import contextlib
import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from lockstep.base import waits
from lockstep.base.bounded_wait import WaitTimeout
from lockstep.base.network import PortRange
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.node_network import RendezvousStore
from lockstep.cluster.protocol import NodeInfo, Worker, WorkerSpec, check_worker_names
from lockstep.cluster.reattach import OrphanPool
from lockstep.cluster.rpc.futures import gather_results
from lockstep.cluster.rpc.remote_worker import RemoteWorker, spawn_worker_process
from lockstep.cluster.rpc.rpc_messages import MANIFEST_VARIABLE, WorkerManifest, worker_fingerprint
from lockstep.cluster.rpc.rpc_server import RpcServer
from lockstep.watch.agent.agent_client import AgentClient, AgentError, AgentGone, WorkerExit
from lockstep.watch.agent.service_discovery import ServiceAddress, is_superseded
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.procfs import processes
from lockstep.watch.supervisor.supervisor_client import SupervisorClient, SupervisorEvent
from lockstep.watch.supervisor.supervisor_settings import SupervisorSettings, WaitAlias

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0
KILL_TIMEOUT_S = 10.0
"""The kernel removes what was killed within moments, but for what is in a call of a driver that does not return."""


class ClusterLimits(Protocol):
    """What every cluster's config says."""

    @property
    def device(self) -> str: ...
    @property
    def orphan_grace_s(self) -> float: ...
    @property
    def stall_limit_s(self) -> float: ...
    @property
    def notice_after_s(self) -> float: ...


class AgentCluster(ABC):
    """The processes of one run, started by an agent on each of its nodes and called from here. Implements
    `lockstep.cluster.protocol.Cluster`.

    Args:
        host: address of this process that all nodes reach.
        token: shared by all processes of the run. It travels by environment only.
    """

    ports: PortRange | None = None
    """Where this process listens for workers, where that is not left to the kernel."""

    def __init__(self, config: ClusterLimits, run: str, folder: Path, generation: int, token: str, host: str) -> None:
        self._limits, self._run, self._folder, self._generation = config, run, folder.absolute(), generation
        self._token = token
        self._store = RendezvousStore(host, self.ports)
        self._affairs = self._folder / "cluster"
        self._nodes: list[ClusterNode] = []
        self._heirs = OrphanPool(self._handle, self._dismiss)
        self._closing = self._closed = self._outdated = False
        self._lock = threading.Lock()
        """Of the nodes: any thread may start workers, and with them another agent in place of one that was killed."""
        self._supervision: SupervisorClient | None = None
        self._pid = os.getpid()
        self._hub = RpcServer(self._token, run, generation, self._tick, host, self.ports)
        atexit.register(self.close)

    @abstractmethod
    def _prepare(self, specs: Sequence[WorkerSpec]) -> None:
        """Before these workers are started: agents that can be replaced are. Raises AgentGone where none can be."""

    @abstractmethod
    def _place(self, spec: WorkerSpec) -> ClusterNode:
        """A node with a living agent for it. Raises AgentGone, ValueError."""

    @abstractmethod
    def _end_nodes(self) -> None:
        """Ends all agents, in order, and what belongs to them."""

    @abstractmethod
    def _abandon_nodes(self) -> None:
        """Ends all agents at once; must not raise."""

    @abstractmethod
    def _leave_nodes(self) -> None:
        """Lets go of what a later generation has."""

    def start(self, specs: Sequence[WorkerSpec]) -> list[Worker]:
        """Starts all workers in parallel, but for those that an earlier generation has left and that do for it: they
        are adopted, with the names that they have. Returns when every service is constructed.

        Raises:
            RemoteError: a constructor raised.
            WorkerDied: a worker ended while it started, or its node did.
            AgentGone: the cluster is closed, or a later generation has the run.
            Stalled: one showed no progress for the configured limit.
            ValueError: a name is taken.
        When one fails, the others of this call are ended as well.
        """
        self._prepare(specs)
        claimed = self._heirs.claim(specs, self._fitness)
        workers = dict(claimed)
        others = [number for number in range(len(specs)) if number not in claimed]
        check_worker_names(
            [specs[number] for number in others], {each.name for each in self._hub.workers if not each.dead}
        )
        try:
            self._spawn(specs, others, workers)
            self._spawn(specs, self._heirs.lost(claimed), workers)
            gather_results([worker.started for worker in workers.values()], why="start")
        except BaseException:
            self._kill(list(workers.values()))
            raise
        return [workers[number] for number in range(len(specs))]

    def release(self) -> None:
        """Ends what an earlier generation has left and nobody has asked for."""
        self._heirs.release()

    def stop(self, worker: Worker, grace_s: float = 5.0) -> None:
        """Asks the worker to leave, kills it after the grace. Calls it still owes fail with WorkerDied. Whoever watches
        the run forgets it. Idempotent."""
        if not isinstance(worker, RemoteWorker) or worker.node.agent is None:
            return
        if not worker.dead:
            self._end(worker, grace_s)
        self._hub.remove(worker)
        with contextlib.suppress(AgentError):
            worker.node.agent.forget(worker.name)

    def _end(self, worker: RemoteWorker, grace_s: float) -> None:
        agent = worker.node.agent
        assert agent is not None
        worker.leave("stopped")
        with contextlib.suppress(AgentError):
            if worker.busy:
                with contextlib.suppress(WaitTimeout):
                    agent.kill(worker.name, signal.SIGTERM)
            try:
                agent.wait_exit(worker.name, "its end", grace_s)
            except WaitTimeout:
                level = logging.WARNING if grace_s > 0 else logging.INFO  # without grace, killing it was the order
                log.log(
                    level, "%s did not leave within %g s, it is killed; it %s", worker.name, grace_s, worker.describe()
                )
                self._kill([worker])
        self._settle([worker])

    def kill(self, name: str) -> bool:
        """Ends a worker by SIGKILL; whether there was one of that name."""
        worker = next((each for each in self._hub.workers if each.name == name and not each.dead), None)
        if worker is None or worker.node.agent is None or self._closed:
            return False
        with contextlib.suppress(AgentError, WaitTimeout):
            return worker.node.agent.kill(name)
        return False

    def doing(self, name: str) -> str:
        """What the worker of that name does, for a sentence after it; empty where there is none, or it has ended."""
        return next((each.describe() for each in self._hub.workers if each.name == name and not each.dead), "")

    def supervise(
        self,
        patience: StallThresholds,
        on_said: Callable[[SupervisorEvent], None],
        *,
        on_stall: str = "report",
        aliases: Mapping[str, WaitAlias] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Has a supervisor beside the run from now on, which tells `on_said` of stalls, in another thread. Incidents
        are in `folder/incidents`. The run neither waits for the supervisor nor fails with it."""
        if self._supervision is not None:
            return
        settings = SupervisorSettings(
            self._run, self._generation, self._folder / "cluster", self._folder / "incidents", self._agents(),
            self._pid, patience, on_stall, dict(aliases or {}), facts=dict(facts or {}),
        )  # fmt: skip
        self._supervision = SupervisorClient(settings, self._token, on_said)

    def nodes(self) -> list[NodeInfo]:
        """Those whose agents live, the controller's first."""
        return [node.info for node in list(self._nodes) if node.alive]

    def node_of(self, worker: Worker) -> NodeInfo:
        """Where a worker is."""
        if not isinstance(worker, RemoteWorker):
            raise TypeError(f"node_of takes a worker of this cluster, not {type(worker).__name__}")
        return worker.node.info

    def store(self) -> tuple[str, int]:
        """Host and port of a rendezvous store (torch TCPStore) that this process serves, where the nodes reach it and
        nowhere else."""
        return self._store.serve()

    def close(self) -> None:
        """Ends all workers and the agents. Idempotent; leaves no orphan, not even when it is interrupted."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closing = True
        try:
            with self._lock:
                pass  # from here on no other agent is started
            if self._supervision is not None:
                self._supervision.close()
            if self._superseded:
                self._leave_nodes()
            else:
                self._end_nodes()
        except BaseException as error:
            log.warning("closing was cut short (%r): the agent is killed, and the kernel kills its workers", error)
            self._abandon_nodes()
            raise
        finally:
            self._closed = True
            self._hub.close()
            self._store.close()
            atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    # --- starting

    @property
    def _superseded(self) -> bool:
        """Whether a later generation has the run: what there is of it belongs to that one."""
        refused = any(node.agent is not None and node.agent.superseded for node in list(self._nodes))
        self._outdated = self._outdated or refused or is_superseded(self._run, self._generation)
        return self._outdated

    @property
    def _listens(self) -> dict[str, tuple[str, int]]:
        """Where this process does, for workers on other nodes; by who does, for people."""
        return {"the controller": self._hub.address, "the run's rendezvous store": self._store.address}

    def _agents(self) -> list[ServiceAddress]:
        """For who watches the run."""
        agents = [node.agent for node in self._nodes if node.agent is not None]
        return [replace(agent.address, generation=self._generation) for agent in agents]

    def _spawn(self, specs: Sequence[WorkerSpec], which: Sequence[int], workers: dict[int, RemoteWorker]) -> None:
        """Adds those to `workers` by their numbers, as processes that begin."""
        pids = []
        nodes = [self._place(specs[number]) for number in which]  # all of them, or nothing is started
        for number, node in zip(which, nodes, strict=True):
            worker = workers[number] = self._handle(specs[number], node)
            with self._dies_with_node(worker):
                pids.append((worker, self._order(worker)))
        for worker, pid in pids:
            # The first of a kind waits for its template's imports, which take as long as they take.
            with self._dies_with_node(worker):
                waits.future(
                    pid, waits_for="agent" if worker.node.here else f"agent of {worker.node.info.name}",
                    why=f"start of {worker.name}", stall_s=self._limits.stall_limit_s, progress=worker.node.used_s,
                    notice_after_s=self._limits.notice_after_s,
                )  # fmt: skip

    @contextlib.contextmanager
    def _dies_with_node(self, worker: RemoteWorker) -> Iterator[None]:
        """An agent that goes while it is asked for a worker takes it along, like one that goes later. Raises
        WorkerDied, and AgentGone where there is no cluster any more."""
        try:
            yield
        except AgentGone as error:
            if self._closing or self._superseded:
                raise
            worker.die(None)
            assert worker.death is not None
            raise worker.death from error

    def _handle(self, spec: WorkerSpec, node: ClusterNode) -> RemoteWorker:
        limits = self._limits.stall_limit_s, self._limits.notice_after_s
        worker = RemoteWorker(spec, node, self._run, self._generation, *limits, self._hub.restless)
        self._hub.add(worker)
        return worker

    def _order(self, worker: RemoteWorker) -> "Future[int]":
        spec, node = worker.spec, worker.node
        environment = node.environment_of(spec)
        fit = worker_fingerprint(spec, environment, self._token, *node.place()) if spec.adoptable else ""
        what = spec.name, spec.role, spec.rank, spec.service, spec.arguments
        charge = WorkerManifest(*what, self._run, self._generation, fit)
        environment[MANIFEST_VARIABLE] = str(node.affairs / f"{spec.name}.json")
        return spawn_worker_process(worker, environment, charge.text(), self._limits.device)

    def _fitness(self, spec: WorkerSpec, node: ClusterNode) -> str:
        return worker_fingerprint(spec, node.environment_of(spec), self._token, *node.place())

    def _dismiss(self, workers: Sequence[RemoteWorker]) -> None:
        """Ends workers that others come in place of, or nobody."""
        self._kill(workers)
        for worker in workers:
            with contextlib.suppress(AgentError):
                if worker.node.agent is not None:
                    worker.node.agent.forget(worker.name)

    # --- ends

    def _exited(self, end: WorkerExit) -> None:
        """In the agent client's thread."""
        self._hub.ended(end.name, end.pid, end.exit_code, end.said)

    def _tick(self) -> None:
        """In the hub's thread, twice a second: progress that no message tells, and deaths the agent cannot tell."""
        by_node: dict[ClusterNode, list[RemoteWorker]] = {}
        for worker in self._hub.workers:
            if not worker.dead and worker.pid:
                by_node.setdefault(worker.node, []).append(worker)
        for node, workers in by_node.items():
            (self._look_here if node.here else self._look_elsewhere)(node, workers)

    def _look_here(self, node: ClusterNode, workers: Sequence[RemoteWorker]) -> None:
        gone = not node.alive
        lost = gone and self._superseded
        for worker in workers:
            connection = worker.connection
            if connection is not None:
                worker.probe(connection.bulk)
            elif lost or (gone and not processes.is_alive(worker.pid)):
                worker.die(None)
            elif not worker.connected_once:
                used = processes.process_usage(worker.pid)  # what moves while it imports and cannot speak yet
                worker.probe(None if used is None else used.cpu_s)

    def _look_elsewhere(self, node: ClusterNode, workers: Sequence[RemoteWorker]) -> None:
        gone = not node.alive
        for worker in workers:
            if gone:
                self._hub.give_up(worker)
            elif worker.connection is not None:
                worker.probe(worker.connection.bulk)
            elif not worker.connected_once:
                worker.probe(node.used_s())

    def _kill(self, workers: Sequence[RemoteWorker]) -> None:
        """Ends them by SIGKILL, and sees to it that they have ended; whoever has not is told of and given up."""
        until = time.monotonic() + KILL_TIMEOUT_S
        for node in {id(worker.node): worker.node for worker in workers}.values():
            agent, its = node.agent, [worker for worker in workers if worker.node is node]
            if agent is None:
                continue
            for worker in its:
                with contextlib.suppress(AgentError, WaitTimeout):
                    agent.kill(worker.name)
            for worker in its:
                with contextlib.suppress(AgentGone):
                    self._see_end(agent, worker, max(0.1, until - time.monotonic()))
        self._settle(workers)

    def _see_end(self, agent: AgentClient, worker: RemoteWorker, timeout_s: float) -> None:
        try:
            if worker.pid:
                agent.wait_exit(worker.name, "its end after SIGKILL", timeout_s)
        except WaitTimeout:
            log.error(
                "%s (pid %d on %s) has not ended %g s after SIGKILL (it is in a call of a driver or of a file system "
                "that does not return); what it holds is not free",
                worker.name, worker.pid, worker.node.info.name, KILL_TIMEOUT_S,
            )  # fmt: skip

    def _settle(self, workers: Sequence[RemoteWorker]) -> None:
        """Their calls fail and their names are free, whether the event has been heard or not."""
        for worker in workers:
            agent = worker.node.agent
            end = None if agent is None else agent.exit_of(worker.name)
            worker.die(None if end is None else end.exit_code, "" if end is None else end.said)
            self._hub.remove(worker)
