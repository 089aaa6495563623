"""Starts and replaces the relays of a run, one per node, in threads of their own."""

import logging
import threading
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.base import waits
from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import NodeInfo, PendingResult, RemoteError, Worker, WorkerDied, WorkerLauncher
from lockstep.cluster.rpc.futures import gather_results
from lockstep.weights.errors import LinkFailed
from lockstep.weights.relay.relay_api import RelayAPI
from lockstep.weights.weight_plan import WeightPlan


@dataclass(slots=True)
class PendingRelay:
    """A node's relay that is being started."""

    finished: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class RelayNode:
    """The controller's state of a node that holds weights."""

    info: NodeInfo
    relay: Worker | None = None
    folder: str = ""
    """Folder of the store that the relay has open."""
    served: tuple[str, int] | None = None
    """The newest version on the node, after the folder of its store."""
    claim: object | None = None
    """Token of the thread that has the exclusive right to bring weights to the node."""
    urgent: bool = False
    """Whether the trainer waits to write on the node, so that other transfers to it must end."""
    pending: PendingRelay | None = None
    behind: bool = False
    """Whether the latest transfer to it failed."""
    stuck: bool = False
    """Whether its relay did not answer a call in time."""

    def require_relay(self) -> Worker:
        """Returns its relay. Raises LinkFailed if there is none, because it is being replaced."""
        relay = self.relay
        if relay is None:
            raise LinkFailed(f"weights to {self.info.name}", self.info.name, "no relay runs there now")
        return relay

    @property
    def usable(self) -> bool:
        """Whether its relay has no known problem; True if none was started yet."""
        return self.relay is None or (self.relay.alive() and not self.stuck)

    @property
    def version(self) -> int | None:
        return None if self.served is None else self.served[1]


log = logging.getLogger(__name__)

RELAY_START_S = 600.0
"""Time limit for the start of a relay that the run needs. The cluster's own limit is shorter."""
RELAY_POLL_S = 0.02


class ClusterNodes(Protocol):
    """The methods of `Cluster` that relays need."""

    def nodes(self) -> list[NodeInfo]: ...
    def node_of(self, worker: Worker) -> NodeInfo: ...


class RelayManager:
    """Starts the relays of nodes, and replaces failed ones.

    Args:
        limit_s: how long opening a store may make no progress.
        name: name of the stores' folder in the shared memory of every node.
    """

    def __init__(
        self, cluster: ClusterNodes, launcher: WorkerLauncher, plan: WeightPlan, limit_s: float, name: str
    ) -> None:
        self._cluster, self._launcher, self._plan, self._limit_s = cluster, launcher, plan, limit_s
        self.name, self.writers = name, 0
        """Name of the stores' folder, and number of ranks that write."""
        self._lock = threading.Lock()
        """Guards the pending starts. Never held during a wait."""

    def folder(self, node: RelayNode) -> str:
        return str(node.info.shared / self.name)

    def has_node(self, node: RelayNode) -> bool:
        return any(each.name == node.info.name for each in self._cluster.nodes())

    def ready(self, node: RelayNode) -> bool:
        """Returns whether a node has a responsive relay with its store open. If not, starts one. Does not wait.

        Raises:
            LinkFailed: the node is lost.
            Exception: the error of the last attempt to start a relay. The next call starts another attempt.
        """
        with self._lock:
            pending = node.pending
            if pending is None:
                if node.relay is not None and node.usable and node.folder == self.folder(node):
                    return True
                pending = node.pending = PendingRelay()
                name = f"relay of {node.info.name}"
                threading.Thread(target=self._start_in_thread, args=(node, pending), name=name, daemon=True).start()
            if not pending.finished.is_set():
                return False
            node.pending = None
        if pending.error is not None:
            raise pending.error
        return True

    def wait(self, node: RelayNode, why: str) -> None:
        """Waits until the node is ready. Raises like `ready`, and WaitTimeout."""
        waits.poll(
            lambda: self.ready(node) or None, kind="call", waits_for=f"relay of {node.info.name}", why=why,
            timeout_s=RELAY_START_S, every_s=RELAY_POLL_S,
        )  # fmt: skip

    def discard(self, node: RelayNode, name: str) -> None:
        """Deletes a store that is no longer used. Does not wait."""
        folder = str(node.info.shared / name)
        if node.relay is not None:
            pending_call = node.relay.submit(RelayAPI.discard, folder)
            pending_call.on_done(lambda: _log_failed_discard(pending_call, folder))

    def _start_in_thread(self, node: RelayNode, pending: PendingRelay) -> None:
        try:
            self._start_relay(node)
        except Exception as error:  # noqa: BLE001 - raised to the next caller
            pending.error = error
        pending.finished.set()

    def _start_relay(self, node: RelayNode) -> None:
        if node.relay is not None and not node.usable:
            self._launcher.kill([node.relay])
            node.relay = None
        if node.relay is None:
            if not self.has_node(node):
                raise LinkFailed(f"weights to {node.info.name}", node.info.name, "the node is lost")
            try:
                (node.relay,) = self._launcher.launch("weights", node=node.info)
                node.folder, node.stuck = "", False
            except ValueError as error:  # the cluster has lost the node
                raise LinkFailed(f"weights to {node.info.name}", node.info.name, str(error)) from error
        folder = self.folder(node)
        if node.folder != folder:
            pending_call = node.relay.submit(RelayAPI.create, folder, self._plan.to_json(), self.writers)
            try:
                gather_results([pending_call], why=f"store of weights on {node.info.name}", stall_s=self._limit_s)
            except Stalled:
                node.stuck = True
                raise
            node.folder = folder


def _log_failed_discard(pending_call: PendingResult[None], folder: str) -> None:
    try:
        pending_call.result(why="delete a store")
    except (RemoteError, WorkerDied) as error:
        log.warning("%s stays until the run ends: %s", folder, error)
