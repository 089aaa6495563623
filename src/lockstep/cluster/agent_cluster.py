"""The base class of clusters: starts, watches, stops and calls workers through an agent on each node."""

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
from lockstep.base.network import PortRange
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.call_relays import CallRelays
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import NodeInfo, Worker, WorkerSpec, check_worker_names
from lockstep.cluster.reattach import OrphanPool
from lockstep.cluster.rendezvous_store import make_rendezvous_store
from lockstep.cluster.rpc.futures import gather_results
from lockstep.cluster.rpc.remote_worker import RemoteWorker, spawn_worker_process
from lockstep.cluster.rpc.rpc_messages import MANIFEST_VARIABLE, WorkerManifest, worker_fingerprint
from lockstep.cluster.rpc.rpc_server import RpcServer
from lockstep.watch.agent.agent_client import AgentClient, AgentError, AgentGone, WorkerExit
from lockstep.watch.agent.service_discovery import ServiceAddress, is_superseded
from lockstep.watch.communication.arrival_totals import COMMUNICATION_FILE
from lockstep.watch.diagnosis.evidence_types import WaitAlias
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.procfs import processes
from lockstep.watch.supervisor.supervisor_client import SupervisorClient, SupervisorEvent, SupervisorSettings

log = logging.getLogger(__name__)

CLOSE_GRACE_S = 5.0
KILL_TIMEOUT_S = 10.0
"""SIGKILL ends a process within moments, unless it is in a driver call that does not return."""


class ClusterLimits(Protocol):
    """The settings that the config of every cluster has."""

    @property
    def device(self) -> str: ...
    @property
    def orphan_grace_s(self) -> float: ...
    @property
    def stall_limit_s(self) -> float: ...
    @property
    def notice_after_s(self) -> float: ...


class AgentCluster(ABC):
    """The processes of one run: an agent on each node starts them, and this process calls them. Implements
    `lockstep.cluster.protocol.Cluster`.

    Args:
        host: address at which all nodes reach this process.
        token: shared by all processes of the run. It is passed in the environment only.
        several_hosts: whether workers may run on other hosts than this process.
    """

    ports: PortRange | None = None
    """Ports on which this process may listen for workers; None allows any."""

    def __init__(
        self, config: ClusterLimits, run: str, folder: Path, generation: int, token: str, host: str,
        several_hosts: bool = False,
    ) -> None:  # fmt: skip
        self._limits, self._run, self._folder, self._generation = config, run, folder.absolute(), generation
        self._token = token
        self._cluster_dir = self._folder / "cluster"
        self._store = make_rendezvous_store(run, self._cluster_dir, host, self.ports, several_hosts)
        self._nodes: list[ClusterNode] = []
        self._orphans = OrphanPool(self._handle, self._dismiss)
        self._closing = self._closed = self._known_superseded = False
        self._lock = threading.Lock()
        """Guards the nodes: any thread may start workers, and thereby replace a killed agent."""
        self._supervision: SupervisorClient | None = None
        self._pid = os.getpid()
        self._server = RpcServer(self._token, run, generation, self._tick, host, self.ports)
        self._relays = CallRelays(self._server, run, generation, lambda: self._closing or self._superseded, self.ports)
        atexit.register(self.close)

    @abstractmethod
    def _prepare(self, specs: Sequence[WorkerSpec]) -> None:
        """Prepares the start of these workers. Raises AgentGone if they cannot start."""

    @abstractmethod
    def _place(self, spec: WorkerSpec) -> ClusterNode:
        """Returns the node for a worker; its agent is alive. Raises AgentGone, ValueError."""

    @abstractmethod
    def _end_nodes(self) -> None:
        """Stops all agents, and all else that the cluster started."""

    @abstractmethod
    def _abandon_nodes(self) -> None:
        """Kills all agents. Must not raise."""

    @abstractmethod
    def _leave_nodes(self) -> None:
        """Disconnects from agents that a later generation has taken over."""

    def place(self, spec: WorkerSpec) -> None:
        """Waits until there is a place for a worker, and starts nothing. Raises AgentGone, WaitTimeout."""
        self._place(spec)

    def start(self, specs: Sequence[WorkerSpec]) -> list[Worker]:
        """Starts all workers in parallel; adopts workers of an earlier generation instead if possible, which keep their
        names. Returns when every service is constructed.

        Raises:
            RemoteError: a constructor raised.
            WorkerDied: a worker, or its node, died during the start.
            AgentGone: the cluster is closed, or a later generation has the run.
            Stalled: a worker showed no progress for the configured limit.
            ValueError: a name is taken.
        On an error, all workers of this call are killed.
        """
        self._prepare(specs)
        claimed = self._orphans.claim(specs, self._fingerprint)
        workers = dict(claimed)
        others = [number for number in range(len(specs)) if number not in claimed]
        check_worker_names(
            [specs[number] for number in others], {each.name for each in self._server.workers if not each.dead}
        )
        try:
            self._spawn(specs, others, workers)
            self._spawn(specs, self._orphans.failed_adoptions(claimed), workers)
            self._relays.ensure({each.node for each in workers.values()}, len(self._nodes))
            gather_results([worker.started for worker in workers.values()], why="start")
        except BaseException:
            self._kill(list(workers.values()))
            raise
        return [workers[number] for number in range(len(specs))]

    def release(self) -> None:
        """Kills the workers of an earlier generation that have not been adopted."""
        self._orphans.release()

    def stop(self, worker: Worker, grace_s: float = 5.0) -> None:
        """Asks the worker to exit, and kills it after `grace_s`. Its open calls fail with WorkerDied, and the
        supervisor no longer watches it. Idempotent."""
        if not isinstance(worker, RemoteWorker) or worker.node.agent is None:
            return
        if not worker.dead:
            self._stop_worker(worker, grace_s)
        self._server.remove(worker)
        with contextlib.suppress(AgentError):
            worker.node.agent.forget(worker.name)

    def _stop_worker(self, worker: RemoteWorker, grace_s: float) -> None:
        agent = worker.node.agent
        assert agent is not None
        with contextlib.suppress(AgentError):
            agent.expect_end(worker.name)
        worker.request_exit("stopped")
        with contextlib.suppress(AgentError):
            if worker.busy:
                with contextlib.suppress(WaitTimeout):
                    agent.kill(worker.name, signal.SIGTERM)
            try:
                agent.wait_exit(worker.name, "its end", grace_s)
            except WaitTimeout:
                level = logging.WARNING if grace_s > 0 else logging.INFO  # without grace, killing was requested
                log.log(
                    level, "%s did not exit within %g s; killing it. It %s", worker.name, grace_s, worker.describe()
                )
                self._kill([worker])
        self._mark_ended([worker])

    def kill(self, name: str) -> bool:
        """Kills a worker by SIGKILL. Returns whether a worker of that name was running."""
        worker = next((each for each in self._server.workers if each.name == name and not each.dead), None)
        if worker is None or worker.node.agent is None or self._closed:
            return False
        with contextlib.suppress(AgentError, WaitTimeout):
            return worker.node.agent.kill(name)
        return False

    def describe_worker(self, name: str) -> str:
        """What the worker is doing, as a verb phrase; empty if there is no such worker or it has ended."""
        return next((each.describe() for each in self._server.workers if each.name == name and not each.dead), "")

    def supervise(
        self,
        patience: StallThresholds,
        on_event: Callable[[SupervisorEvent], None],
        *,
        on_stall: str = "report",
        aliases: Mapping[str, WaitAlias] | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts a supervisor process, which reports stalls to `on_event`, in another thread, and writes incidents to
        `folder/incidents`. The run neither waits for the supervisor nor fails if the supervisor fails."""
        if self._supervision is not None:
            return
        settings = SupervisorSettings(
            self._run, self._generation, self._folder / "cluster", self._folder / "incidents", self._agents(),
            self._pid, patience, on_stall, dict(aliases or {}), facts=dict(facts or {}),
            devices=self._folder / "devices.json", communication=self._folder / COMMUNICATION_FILE,
        )  # fmt: skip
        self._supervision = SupervisorClient(settings, self._token, on_event)

    @property
    def refused_frames(self) -> int:
        """How many frames the controller has refused, because no worker of the run had sent them."""
        return self._server.refused_frames

    def nodes(self) -> list[NodeInfo]:
        """The nodes whose agents are alive, the controller's first."""
        return [node.info for node in list(self._nodes) if node.alive]

    def node_of(self, worker: Worker) -> NodeInfo:
        """The node that a worker runs on."""
        if not isinstance(worker, RemoteWorker):
            raise TypeError(f"node_of takes a worker of this cluster, not {type(worker).__name__}")
        return worker.node.info

    def store(self) -> str:
        """URL of the run's rendezvous store, for `open_store`. Raises RendezvousStoreLost."""
        return self._store.serve()

    def close(self) -> None:
        """Stops all workers and agents. Idempotent; leaves no process behind, even if it is interrupted."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closing = True
        try:
            with self._lock:
                pass  # waits for an agent that is being started; later ones are refused
            if self._supervision is not None:
                self._supervision.close()
            if self._superseded:
                self._leave_nodes()
            else:
                self._end_nodes()
        except BaseException as error:
            log.warning("close was interrupted (%r); killing the agents and their workers", error)
            self._abandon_nodes()
            raise
        finally:
            self._closed = True
            self._server.close()
            self._store.close()
            atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    # --- start

    @property
    def _superseded(self) -> bool:
        """Whether a later generation has taken over the run and its processes."""
        refused = any(node.agent is not None and node.agent.superseded for node in list(self._nodes))
        self._known_superseded = self._known_superseded or refused or is_superseded(self._run, self._generation)
        return self._known_superseded

    @property
    def _listening_addresses(self) -> dict[str, tuple[str, int]]:
        """The addresses at which this process listens for workers on other nodes, by name."""
        store = {} if self._store.address is None else {"the run's rendezvous store": self._store.address}
        return {"the controller": self._server.address, **store}

    def _agents(self) -> list[ServiceAddress]:
        """The addresses of all agents, for the supervisor."""
        agents = [node.agent for node in self._nodes if node.agent is not None]
        return [replace(agent.address, generation=self._generation) for agent in agents]

    def _planned_workers(self, node: ClusterNode) -> int:
        """How many workers the node will have, as far as they are planned."""
        return 0

    def _spawn(self, specs: Sequence[WorkerSpec], which: Sequence[int], workers: dict[int, RemoteWorker]) -> None:
        """Starts the processes of some specs (`which`: their indices) and adds their handles to `workers`."""
        pids = []
        nodes = [self._place(specs[number]) for number in which]  # chosen for all before any process is started
        for number, node in zip(which, nodes, strict=True):
            worker = workers[number] = self._handle(specs[number], node)
            with self._dies_with_node(worker):
                pids.append((worker, self._start_process(worker)))
        for worker, pid in pids:
            # The first worker of a fork server waits for the imports there, which may take long.
            with self._dies_with_node(worker):
                waits.future(
                    pid, waits_for="agent" if worker.node.is_local else f"agent of {worker.node.info.name}",
                    why=f"start of {worker.name}", stall_s=self._limits.stall_limit_s, progress=worker.node.cpu_used_s,
                    notice_after_s=self._limits.notice_after_s,
                )  # fmt: skip

    @contextlib.contextmanager
    def _dies_with_node(self, worker: RemoteWorker) -> Iterator[None]:
        """Raises WorkerDied if the worker's agent is lost during the start, since the worker dies with its agent.
        Raises AgentGone if the cluster is closed."""
        try:
            yield
        except AgentGone as error:
            if self._closing or self._superseded:
                raise
            worker.mark_dead(None)
            assert worker.death is not None
            raise worker.death from error

    def _handle(self, spec: WorkerSpec, node: ClusterNode) -> RemoteWorker:
        self._relays.place(node, self._planned_workers, len(self._nodes))
        limits = self._limits.stall_limit_s, self._limits.notice_after_s
        worker = RemoteWorker(spec, node, self._run, self._server.call_ids, *limits, self._server.connection_changed)
        self._server.add(worker)
        return worker

    def _start_process(self, worker: RemoteWorker) -> "Future[int]":
        spec, node = worker.spec, worker.node
        environment = node.environment_of(spec)
        fingerprint = (
            worker_fingerprint(spec, environment, self._token, *node.python_and_folder()) if spec.adoptable else ""
        )
        what = spec.name, spec.role, spec.rank, spec.service, spec.arguments
        manifest = WorkerManifest(*what, self._run, self._generation, fingerprint)
        environment[MANIFEST_VARIABLE] = str(node.cluster_dir / f"{spec.name}.json")
        return spawn_worker_process(worker, environment, manifest.text(), self._limits.device)

    def _fingerprint(self, spec: WorkerSpec, node: ClusterNode) -> str:
        return worker_fingerprint(spec, node.environment_of(spec), self._token, *node.python_and_folder())

    def _dismiss(self, workers: Sequence[RemoteWorker]) -> None:
        """Kills workers that are replaced or no longer needed."""
        self._kill(workers)
        for worker in workers:
            with contextlib.suppress(AgentError):
                if worker.node.agent is not None:
                    worker.node.agent.forget(worker.name)

    # --- end

    def _exited(self, end: WorkerExit) -> None:
        """Handles the end of a worker. Called in the agent client's thread."""
        if not self._relays.ended(end):
            self._server.worker_ended(end.name, end.pid, end.exit_code, end.log_tail)

    def _tick(self) -> None:
        """Detects progress of workers that send no messages, and deaths that no agent can report; replaces a rendezvous
        store and relays that have ended. Runs in the RPC server's thread twice a second."""
        self._store.check()
        self._relays.check()
        by_node: dict[ClusterNode, list[RemoteWorker]] = {}
        for worker in self._server.workers:
            if not worker.dead and worker.pid:
                by_node.setdefault(worker.node, []).append(worker)
        for node, workers in by_node.items():
            if node.is_local:
                self._check_local(workers)
            else:
                self._check_remote(node, workers)

    def _check_local(self, workers: Sequence[RemoteWorker]) -> None:
        taken_over = not all(worker.agent_alive for worker in workers) and self._superseded
        for worker in workers:
            connection = worker.connection
            if connection is not None:
                worker.observe(connection.bulk_bytes)
            elif not worker.agent_alive and (taken_over or not processes.is_alive(worker.pid)):
                worker.mark_dead(None)
            elif not worker.connected_once:
                usage = processes.process_usage(worker.pid)  # grows during imports, before messages are possible
                worker.observe(None if usage is None else usage.cpu_s)

    def _check_remote(self, node: ClusterNode, workers: Sequence[RemoteWorker]) -> None:
        for worker in workers:
            if not worker.agent_alive:
                self._server.give_up(worker)
            elif worker.connection is not None:
                worker.observe(worker.connection.bulk_bytes)
            elif not worker.connected_once:
                worker.observe(node.cpu_used_s())

    def _kill(self, workers: Sequence[RemoteWorker]) -> None:
        """Kills workers by SIGKILL and waits until they have ended. Logs workers that do not end, and gives them up."""
        until = time.monotonic() + KILL_TIMEOUT_S
        for node in {id(worker.node): worker.node for worker in workers}.values():
            agent, on_node = node.agent, [worker for worker in workers if worker.node is node]
            if agent is None:
                continue
            for worker in on_node:
                with contextlib.suppress(AgentError, WaitTimeout):
                    agent.kill(worker.name)
            for worker in on_node:
                with contextlib.suppress(AgentGone):
                    self._await_exit(agent, worker, max(0.1, until - time.monotonic()))
        self._mark_ended(workers)

    def _await_exit(self, agent: AgentClient, worker: RemoteWorker, timeout_s: float) -> None:
        try:
            if worker.pid:
                agent.wait_exit(worker.name, "its end after SIGKILL", timeout_s)
        except WaitTimeout:
            log.error(
                "%s (pid %d on %s) still runs %g s after SIGKILL, in a driver or file system call that does not "
                "return; its resources are not free",
                worker.name, worker.pid, worker.node.info.name, KILL_TIMEOUT_S,
            )  # fmt: skip

    def _mark_ended(self, workers: Sequence[RemoteWorker]) -> None:
        """Makes the workers' open calls fail and frees their names, whether or not their end has been reported."""
        for worker in workers:
            agent = worker.node.agent
            end = None if agent is None else agent.exit_of(worker.name)
            worker.mark_dead(None if end is None else end.exit_code, "" if end is None else end.log_tail)
            self._server.remove(worker)
