"""The couriers of nodes: one each, replaced where it has failed, its store open. Every node is seen to in a thread of
its own, so that nobody waits for another node's courier, and nobody longer than he wants to."""

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from lockstep.cluster.calls import gather
from lockstep.cluster.protocol import NodeInfo, Pending, RemoteError, Worker, WorkerDied
from lockstep.watch import waits
from lockstep.weights.api import CourierAPI
from lockstep.weights.errors import LinkFailed
from lockstep.weights.plan import Plan
from lockstep.weights.transfer import Hiring, Node

log = logging.getLogger(__name__)

START_S = 600.0
"""What a node's courier may take to come up where the run cannot go on without; the cluster gives up earlier."""
LOOK_S = 0.02


class Nodes(Protocol):
    """Of a `Cluster`, what is needed here."""

    def nodes(self) -> list[NodeInfo]: ...
    def node_of(self, worker: Worker) -> NodeInfo: ...


class Hires(Protocol):
    """Who starts and ends couriers."""

    def courier(self, node: NodeInfo) -> Worker: ...
    def dismiss(self, workers: Sequence[Worker]) -> None: ...


class Posts:
    """Where couriers are, or are to be.

    Args:
        limit_s: how long a courier may take to open its store without progress.
        name: of the stores' folder in every node's shared memory.
    """

    def __init__(self, cluster: Nodes, hires: Hires, plan: Plan, limit_s: float, name: str) -> None:
        self._cluster, self._hires, self._plan, self._limit_s = cluster, hires, plan, limit_s
        self.name, self.writers = name, 0
        """Of the stores: where, and for how many ranks."""
        self._lock = threading.Lock()
        """Of who is being hired; nothing is waited for with it."""

    def folder(self, node: Node) -> str:
        return str(node.info.shared / self.name)

    def lives(self, node: Node) -> bool:
        return any(each.name == node.info.name for each in self._cluster.nodes())

    def ready(self, node: Node) -> bool:
        """Whether a node has a courier that answers, with its store open; where not, that is begun. Does not wait.

        Raises:
            LinkFailed: the node is lost.
            Exception: what the last attempt ended with; to one caller, the next one begins another attempt.
        """
        with self._lock:
            hiring = node.hiring
            if hiring is None:
                if node.courier is not None and node.fit and node.folder == self.folder(node):
                    return True
                hiring = node.hiring = Hiring()
                name = f"courier of {node.info.name}"
                threading.Thread(target=self._see_to, args=(node, hiring), name=name, daemon=True).start()
            if not hiring.over.is_set():
                return False
            node.hiring = None
        if hiring.error is not None:
            raise hiring.error
        return True

    def wait(self, node: Node, why: str) -> None:
        """Until it is ready. Raises as `ready`, and WaitTimeout."""
        waits.poll(
            lambda: self.ready(node) or None, kind="call", whom=f"courier of {node.info.name}", why=why,
            timeout_s=START_S, every_s=LOOK_S,
        )  # fmt: skip

    def discard(self, node: Node, name: str) -> None:
        """A store that nobody uses any more is deleted, some time."""
        folder = str(node.info.shared / name)
        if node.courier is not None:
            asked = node.courier.submit(CourierAPI.discard, folder)
            asked.on_done(lambda: _told(asked, folder))

    def _see_to(self, node: Node, hiring: Hiring) -> None:
        try:
            self._hire(node)
        except Exception as error:  # noqa: BLE001 - raised by whoever asks next
            hiring.error = error
        hiring.over.set()

    def _hire(self, node: Node) -> None:
        if node.courier is not None and not node.fit:
            self._hires.dismiss([node.courier])
            node.courier = None
        if node.courier is None:
            if not self.lives(node):
                raise LinkFailed(f"weights to {node.info.name}", node.info.name, "the node is lost")
            try:
                node.courier, node.folder, node.stuck = self._hires.courier(node.info), "", False
            except ValueError as error:  # the cluster has no such node any more
                raise LinkFailed(f"weights to {node.info.name}", node.info.name, str(error)) from error
        folder = self.folder(node)
        if node.folder != folder:
            asked = node.courier.submit(CourierAPI.create, folder, self._plan.to_json(), self.writers)
            try:
                gather([asked], why=f"store of weights on {node.info.name}", stall_s=self._limit_s)
            except waits.Stalled:
                node.stuck = True
                raise
            node.folder = folder


def _told(asked: Pending[None], folder: str) -> None:
    try:
        asked.result(why="delete a store")
    except (RemoteError, WorkerDied) as error:
        log.warning("%s is not deleted before the run ends: %s", folder, error)
