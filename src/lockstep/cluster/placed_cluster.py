"""A cluster whose workers run on nodes where resources are reserved for them, and move if a node is lost."""

import threading
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lockstep.base import waits
from lockstep.base.text import last_line
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.agent_cluster import AgentCluster, ClusterLimits
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.placement.assignment import Assignment
from lockstep.cluster.placement.bundles import NodeResources, PlacementError, ProcessRequest
from lockstep.cluster.placement.reservations import (
    POLL_S,
    UNBOUNDED_S,
    AllocatorUnavailable,
    Reservation,
    ReservationTable,
)
from lockstep.cluster.protocol import WorkerDied, WorkerSpec
from lockstep.config.cluster import PlacementConfig
from lockstep.config.roles import ROLES_WITHOUT_RANKS, planned_name
from lockstep.watch.agent.agent_client import AgentGone


class PlacedClusterLimits(ClusterLimits, Protocol):
    """The settings that the config of such a cluster has."""

    @property
    def busy_limit_s(self) -> float | None: ...


class PlacedCluster(AgentCluster):
    """A cluster on whose nodes a run reserves resources.

    Args:
        requests: the run's processes with the resources they need. Other processes reserve nothing and run on the node
            with the fewest processes.
        held: reservations of an earlier controller of the run.
    """

    unavailable_errors: tuple[type[Exception], ...] = (PlacementError, AllocatorUnavailable)
    """Errors of `_reserve`, `_list_nodes` and `_free` after which another attempt may succeed."""

    def __init__(
        self, config: PlacedClusterLimits, run: str, folder: Path, generation: int, token: str, host: str,
        requests: Sequence[ProcessRequest], placement: PlacementConfig, held: Sequence[Reservation],
        several_hosts: bool = False,
    ) -> None:  # fmt: skip
        self._reservations = ReservationTable(requests, placement, held)
        self._unfit: set[str] = set()
        """Ids of nodes that the run cannot use."""
        self._moving = threading.Lock()
        """Held while an agent is restarted or a worker moves, which takes long. Workers whose node is alive do not wait
        for it."""
        self._busy_limit_s = config.busy_limit_s
        super().__init__(config, run, folder, generation, token, host, several_hosts)

    @abstractmethod
    def _list_nodes(self) -> list[NodeResources]:
        """The current nodes, the controller's first."""

    @abstractmethod
    def _reserve(self, assignment: Assignment) -> list[Reservation]:
        """Reserves the whole assignment or nothing; starts agents on nodes that are new to the run."""

    @abstractmethod
    def _free(self, group: str) -> None:
        """Releases a reservation. Idempotent."""

    @abstractmethod
    def _is_available(self, node: ClusterNode) -> bool:
        """Whether the node is available. Starts a new agent if the agent was killed."""

    @abstractmethod
    def _save_reservations(self) -> None:
        """Records the reservations for a later controller."""

    def _prepare(self, specs: Sequence[WorkerSpec]) -> None:
        self._check_open()
        for role in sorted({spec.role for spec in specs} - set(ROLES_WITHOUT_RANKS)):
            ranks = [planned_name(spec.name) for spec in specs if spec.role == role]
            self._reservations.set_ranks(ranks, {node.id for node in self._nodes if node.alive})

    def _check_open(self) -> None:
        if self._closing:
            raise AgentGone("start", "the cluster is closed")
        if self._superseded:
            raise AgentGone("start", f"a later generation of {self._run} has the run")

    def _gpus(self, spec: WorkerSpec) -> tuple[str, ...]:
        placement = self._reservations.placement_of(planned_name(spec.name))
        return () if placement is None else placement.gpus

    def _planned_workers(self, node: ClusterNode) -> int:
        return self._reservations.processes_on(node.id)

    def _node_of(self, node_id: str) -> ClusterNode | None:
        """The node with that id."""
        return next((each for each in self._nodes if each.id == node_id), None)

    def _reserve_for_all(self) -> None:
        """Reserves resources for every process, as soon as other runs have released enough."""
        self._reservations.reserve_all(self._list_nodes, self._reserve, self._busy_limit_s, self._limits.notice_after_s)
        self._save_reservations()

    def _place(self, spec: WorkerSpec) -> ClusterNode:
        """Returns a node for the worker; waits for GPUs that other runs use."""
        limit_s = min(spec.placement_limit_s or UNBOUNDED_S, self._busy_limit_s or UNBOUNDED_S)
        try:
            return waits.poll(
                lambda: self._try_to_place(spec), kind="placement", waits_for="nodes of the cluster",
                why=f"a place for {spec.name}", every_s=POLL_S, notice_after_s=self._limits.notice_after_s,
                timeout_s=limit_s,
            )  # fmt: skip
        except WaitTimeout as error:
            if spec.placement_limit_s is None:
                raise
            lost = f"its node is lost, and no other node had room for it within {error.waited_s:.0f} s"
            raise WorkerDied(spec.name, spec.rank, None, "", lost) from error

    def _try_to_place(self, spec: WorkerSpec) -> ClusterNode | None:
        self._check_open()
        node = self._current_node(spec)
        if node is not None or not self._moving.acquire(blocking=False):
            return node
        try:
            return self._restored_node(spec)
        finally:
            self._moving.release()

    def _current_node(self, spec: WorkerSpec) -> ClusterNode | None:
        """Returns the worker's node, if the node's agent is alive."""
        if spec.node is not None:
            return next((each for each in self._nodes if each.alive and each.info.name == spec.node), None)
        if planned_name(spec.name) not in self._reservations:
            return self._least_used_node()
        placement = self._reservations.placement_of(planned_name(spec.name))
        node = None if placement is None else self._node_of(placement.node)
        return node if node is not None and node.alive else None

    def _restored_node(self, spec: WorkerSpec) -> ClusterNode | None:
        """Returns a node for a worker whose node has no agent: the same node with a new agent, or another one."""
        if spec.node is not None:
            node = next(
                (each for each in self._nodes if each.info.name == spec.node and self._is_available(each)), None
            )
            if node is None:
                names = ", ".join(each.name for each in self.nodes())
                raise ValueError(f"{spec.name} must run on {spec.node}, and the run has {names}")
            return node
        if planned_name(spec.name) not in self._reservations:
            return self._any_node()
        placement = self._reservations.placement_of(planned_name(spec.name))
        node = None if placement is None else self._node_of(placement.node)
        return node if node is not None and self._is_available(node) else self._move(spec)

    def _least_used_node(self) -> ClusterNode | None:
        """Returns the living node with the fewest processes, for a process without a reservation."""
        many = Counter(id(worker.node) for worker in self._server.workers if not worker.dead)
        return min((node for node in self._nodes if node.alive), key=lambda node: many[id(node)], default=None)

    def _any_node(self) -> ClusterNode:
        """Like `_least_used_node`, also considering nodes whose agent or actor was killed."""
        if not self._nodes:
            self._reserve(Assignment(tuple(self._list_nodes()), ()))
        node = self._least_used_node() or next((each for each in self._nodes if self._is_available(each)), None)
        if node is None:
            raise AgentGone("start", "all nodes of the run are lost")
        return node

    def _move(self, spec: WorkerSpec) -> ClusterNode | None:
        """Reserves free resources for a worker that lost its own, and returns the node. If nothing can be reserved,
        returns any node of the run, or None if the worker needs GPUs."""
        name = planned_name(spec.name)
        placement = self._reservations.placement_of(name)
        try:
            for group in [] if placement is None else self._reservations.drop_node(placement.node):
                self._free(group)  # for other runs, or for this one once the host is back
            self._reservations.replace(name, [each for each in self._list_nodes() if self._is_fit(each)], self._reserve)
        except self.unavailable_errors as error:
            self._check_open()
            if isinstance(error, AllocatorUnavailable) and self._least_used_node() is None:
                raise AgentGone("start", f"all nodes of the run are lost, and {error}") from error
            node = None if self._reservations.needs_gpus(name) else self._any_node()
            then = "waits" if node is None else f"moves to {node.info.name} without a reservation"
            self._reservations.notify(f"{spec.name} {then}: {last_line(error)}")
            return node
        self._save_reservations()
        placement = self._reservations.placement_of(name)
        return None if placement is None else self._node_of(placement.node)

    def _is_fit(self, facts: NodeResources) -> bool:
        """Whether the run can use the node."""
        node = self._node_of(facts.id)
        return facts.id not in self._unfit and (node is None or self._is_available(node))
