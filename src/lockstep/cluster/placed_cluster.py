"""A cluster whose workers run where resources are reserved for them; they move when a node is lost."""

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
from lockstep.watch.agent.agent_client import AgentGone


class PlacedClusterLimits(ClusterLimits, Protocol):
    """The limits in the config of such a cluster."""

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
    """Errors of `_reserve`, `_list_nodes` and `_free` that mean: not possible at the moment."""

    def __init__(
        self, config: PlacedClusterLimits, run: str, folder: Path, generation: int, token: str, host: str,
        requests: Sequence[ProcessRequest], placement: PlacementConfig, held: Sequence[Reservation],
    ) -> None:  # fmt: skip
        self._places = ReservationTable(requests, placement, held)
        self._unfit: set[str] = set()
        """Ids of nodes that cannot take part."""
        self._moving = threading.Lock()
        """Held while an agent is restarted or a worker moves, which takes long; workers with a place do not wait for
        it."""
        self._busy_limit_s = config.busy_limit_s
        super().__init__(config, run, folder, generation, token, host)

    @abstractmethod
    def _list_nodes(self) -> list[NodeResources]:
        """The current nodes, the controller's first."""

    @abstractmethod
    def _reserve(self, assignment: Assignment) -> list[Reservation]:
        """Reserves all of it, with agents on nodes that are new to the run, or nothing."""

    @abstractmethod
    def _free(self, group: str) -> None:
        """Releases a reservation. Idempotent."""

    @abstractmethod
    def _is_available(self, node: ClusterNode) -> bool:
        """Whether the node is available, or available again; a killed agent is replaced."""

    @abstractmethod
    def _save_reservations(self) -> None:
        """Records the reservations for a later controller."""

    def _prepare(self, specs: Sequence[WorkerSpec]) -> None:
        self._check_open()
        ranks = [_planned_name(spec) for spec in specs if spec.role == "policy"]
        if ranks:
            self._places.set_ranks(ranks, {node.id for node in self._nodes if node.alive})

    def _check_open(self) -> None:
        if self._closing:
            raise AgentGone("start", "the cluster is closed")
        if self._superseded:
            raise AgentGone("start", f"a later generation of {self._run} has the run")

    def _gpus(self, spec: WorkerSpec) -> tuple[str, ...]:
        place = self._places.of(_planned_name(spec))
        return () if place is None else place.gpus

    def _node_of(self, node_id: str) -> ClusterNode | None:
        """The node with that id."""
        return next((each for each in self._nodes if each.id == node_id), None)

    def _reserve_places(self) -> None:
        """Reserves a place for every process, as soon as other runs have released enough."""
        self._places.settle(self._list_nodes, self._reserve, self._busy_limit_s, self._limits.notice_after_s)
        self._save_reservations()

    def _place(self, spec: WorkerSpec) -> ClusterNode:
        """Waits, visibly, for GPUs that other runs use."""
        limit_s = min(spec.place_limit_s or UNBOUNDED_S, self._busy_limit_s or UNBOUNDED_S)
        try:
            return waits.poll(
                lambda: self._try_to_place(spec), kind="placement", waits_for="nodes of the cluster",
                why=f"a place for {spec.name}", every_s=POLL_S, notice_after_s=self._limits.notice_after_s,
                timeout_s=limit_s,
            )  # fmt: skip
        except WaitTimeout as error:
            if spec.place_limit_s is None:
                raise
            lost = f"its node is lost, and no other node had room for it within {error.waited_s:.0f} s"
            raise WorkerDied(spec.name, spec.rank, None, "", lost) from error

    def _try_to_place(self, spec: WorkerSpec) -> ClusterNode | None:
        self._check_open()
        node = self._place_at_once(spec)
        if node is not None or not self._moving.acquire(blocking=False):
            return node
        try:
            return self._place_again(spec)
        finally:
            self._moving.release()

    def _place_at_once(self, spec: WorkerSpec) -> ClusterNode | None:
        """The worker's node, if its agent is alive."""
        if spec.node is not None:
            return next((each for each in self._nodes if each.alive and each.info.name == spec.node), None)
        if _planned_name(spec) not in self._places:
            return self._emptiest()
        place = self._places.of(_planned_name(spec))
        node = None if place is None else self._node_of(place.node)
        return node if node is not None and node.alive else None

    def _place_again(self, spec: WorkerSpec) -> ClusterNode | None:
        """A node for a worker whose node has no agent any more."""
        if spec.node is not None:
            node = next(
                (each for each in self._nodes if each.info.name == spec.node and self._is_available(each)), None
            )
            if node is None:
                names = ", ".join(each.name for each in self.nodes())
                raise ValueError(f"{spec.name} must run on {spec.node}, and the run has {names}")
            return node
        if _planned_name(spec) not in self._places:
            return self._anywhere()
        place = self._places.of(_planned_name(spec))
        node = None if place is None else self._node_of(place.node)
        return node if node is not None and self._is_available(node) else self._move(spec)

    def _emptiest(self) -> ClusterNode | None:
        """The node that is alive with the fewest processes, for a process without a reservation."""
        many = Counter(id(worker.node) for worker in self._server.workers if not worker.dead)
        return min((node for node in self._nodes if node.alive), key=lambda node: many[id(node)], default=None)

    def _anywhere(self) -> ClusterNode:
        """Like `_emptiest`, also considering nodes whose agent or actor was killed."""
        if not self._nodes:
            self._reserve(Assignment(tuple(self._list_nodes()), ()))
        node = self._emptiest() or next((each for each in self._nodes if self._is_available(each)), None)
        if node is None:
            raise AgentGone("start", "all nodes of the run are lost")
        return node

    def _move(self, spec: WorkerSpec) -> ClusterNode | None:
        """A new place for a worker that has none: reserved on free resources, or, for a process without GPUs, a node of
        the run without a reservation. None where it needs GPUs and none are free."""
        post = _planned_name(spec)
        place = self._places.of(post)
        try:
            for group in [] if place is None else self._places.drop_node(place.node):
                self._free(group)  # for other runs, or for this one once the host is back
            self._places.replace(post, [each for each in self._list_nodes() if self._is_fit(each)], self._reserve)
        except self.unavailable_errors as error:
            self._check_open()
            if isinstance(error, AllocatorUnavailable) and self._emptiest() is None:
                raise AgentGone("start", f"all nodes of the run are lost, and {error}") from error
            node = None if self._places.needs_gpus(post) else self._anywhere()
            then = "waits" if node is None else f"moves to {node.info.name} without a reservation"
            self._places.notify(f"{spec.name} {then}: {last_line(error)}")
            return node
        self._save_reservations()
        place = self._places.of(post)
        return None if place is None else self._node_of(place.node)

    def _is_fit(self, facts: NodeResources) -> bool:
        """Whether the run can use the node."""
        node = self._node_of(facts.id)
        return facts.id not in self._unfit and (node is None or self._is_available(node))


def _planned_name(spec: WorkerSpec) -> str:
    """The planned name of a worker or its replacement: `engine-0` for `engine-0.2`."""
    return spec.name.partition(".")[0]
