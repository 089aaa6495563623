"""The relays of a run: one per node, started and replaced in threads of their own, with the store open."""

import logging
import threading
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.base import waits
from lockstep.base.bounded_wait import Stalled
from lockstep.cluster.protocol import NodeInfo, PendingResult, RemoteError, Worker, WorkerDied, WorkerLauncher
from lockstep.cluster.rpc.futures import gather_results
from lockstep.weights.errors import LinkFailed
from lockstep.weights.relay.api import RelayAPI
from lockstep.weights.weight_plan import WeightPlan


@dataclass(slots=True)
class PendingRelay:
    """A node's relay on its way."""

    finished: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class RelayNode:
    """A node that holds weights, as the controller knows it."""

    info: NodeInfo
    relay: Worker | None = None
    folder: str = ""
    """Of the store that its relay has open."""
    served: tuple[str, int] | None = None
    """The folder of the store with its newest version, and which."""
    claim: object | None = None
    """Whose it is to bring it weights, now."""
    urgent: bool = False
    """The trainer wants to write there: what else is under way ends."""
    pending: PendingRelay | None = None
    behind: bool = False
    """Whether it was left behind when it was brought weights last."""
    stuck: bool = False
    """Its relay owes an answer that nobody waits for any more."""

    def require_relay(self) -> Worker:
        """Its relay. Raises LinkFailed where there is none, as it is being replaced."""
        relay = self.relay
        if relay is None:
            raise LinkFailed(f"weights to {self.info.name}", self.info.name, "no relay runs there now")
        return relay

    @property
    def usable(self) -> bool:
        """Whether nothing is known against its relay; one that was never started is fit."""
        return self.relay is None or (self.relay.alive() and not self.stuck)

    @property
    def version(self) -> int | None:
        return None if self.served is None else self.served[1]


log = logging.getLogger(__name__)

RELAY_START_S = 600.0
"""What a node's relay may take to come up where the run cannot go on without; the cluster gives up earlier."""
RELAY_POLL_S = 0.02


class ClusterNodes(Protocol):
    """Of a `Cluster`, what is needed here."""

    def nodes(self) -> list[NodeInfo]: ...
    def node_of(self, worker: Worker) -> NodeInfo: ...


class RelayManager:
    """Where relays are, or are to be.

    Args:
        limit_s: how long a relay may take to open its store without progress.
        name: of the stores' folder in every node's shared memory.
    """

    def __init__(
        self, cluster: ClusterNodes, launcher: WorkerLauncher, plan: WeightPlan, limit_s: float, name: str
    ) -> None:
        self._cluster, self._launcher, self._plan, self._limit_s = cluster, launcher, plan, limit_s
        self.name, self.writers = name, 0
        """Of the stores: where, and for how many ranks."""
        self._lock = threading.Lock()
        """Of who is being hired; nothing is waited for with it."""

    def folder(self, node: RelayNode) -> str:
        return str(node.info.shared / self.name)

    def has_node(self, node: RelayNode) -> bool:
        return any(each.name == node.info.name for each in self._cluster.nodes())

    def ready(self, node: RelayNode) -> bool:
        """Whether a node has a relay that answers, with its store open; where not, that is begun. Does not wait.

        Raises:
            LinkFailed: the node is lost.
            Exception: what the last attempt ended with; to one caller, the next one begins another attempt.
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
        """Until it is ready. Raises as `ready`, and WaitTimeout."""
        waits.poll(
            lambda: self.ready(node) or None, kind="call", waits_for=f"relay of {node.info.name}", why=why,
            timeout_s=RELAY_START_S, every_s=RELAY_POLL_S,
        )  # fmt: skip

    def discard(self, node: RelayNode, name: str) -> None:
        """A store that nobody uses any more is deleted, some time."""
        folder = str(node.info.shared / name)
        if node.relay is not None:
            asked = node.relay.submit(RelayAPI.discard, folder)
            asked.on_done(lambda: _log_failed_discard(asked, folder))

    def _start_in_thread(self, node: RelayNode, pending: PendingRelay) -> None:
        try:
            self._start_relay(node)
        except Exception as error:  # noqa: BLE001 - raised by whoever asks next
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
            except ValueError as error:  # the cluster has no such node any more
                raise LinkFailed(f"weights to {node.info.name}", node.info.name, str(error)) from error
        folder = self.folder(node)
        if node.folder != folder:
            asked = node.relay.submit(RelayAPI.create, folder, self._plan.to_json(), self.writers)
            try:
                gather_results([asked], why=f"store of weights on {node.info.name}", stall_s=self._limit_s)
            except Stalled:
                node.stuck = True
                raise
            node.folder = folder


def _log_failed_discard(asked: PendingResult[None], folder: str) -> None:
    try:
        asked.result(why="delete a store")
    except (RemoteError, WorkerDied) as error:
        log.warning("%s is not deleted before the run ends: %s", folder, error)
