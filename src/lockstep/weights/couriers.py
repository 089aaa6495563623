"""Weights for engines on other nodes than the trainer: the controller's side of the couriers.

Every node holds weights in its own shared memory. The node of the first trainer rank collects what ranks on other
nodes wrote and commits a version; from there it spreads, each node that has it passing it on. A node whose courier
fails or makes no progress is left behind and brought up to date by whoever needs it there, beside the run.
"""

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from lockstep.cluster.calls import gather
from lockstep.cluster.protocol import NodeInfo, RemoteError, Worker
from lockstep.watch import waits
from lockstep.watch.waits import Stalled
from lockstep.weights.api import CourierAPI, Received
from lockstep.weights.errors import LinkFailed
from lockstep.weights.plan import Plan
from lockstep.weights.round import FAILED, Round
from lockstep.weights.transfer import ANSWER_S, Node, Transfer, final

log = logging.getLogger(__name__)

TRIES = 5
"""How often in one publish the trainer's nodes are asked for a version, each time with couriers that live."""
LOOK_S = 0.02


class Nodes(Protocol):
    """Of a `Cluster`, what is needed here."""

    def nodes(self) -> list[NodeInfo]: ...
    def node_of(self, worker: Worker) -> NodeInfo: ...


class Hires(Protocol):
    """Who starts and ends couriers."""

    def courier(self, node: NodeInfo) -> Worker: ...
    def dismiss(self, workers: Sequence[Worker]) -> None: ...


class Couriers:
    """Implements `lockstep.weights.delivery.Delivery`.

    Args:
        name: of the stores' folder in every node's shared memory.
        limit_s: how long a node may make no progress.
    """

    def __init__(self, cluster: Nodes, hires: Hires, plan: Plan, limit_s: float, name: str = "weights") -> None:
        self._cluster, self._hires, self._plan, self._limit_s = cluster, hires, plan, limit_s
        self._base = self._name = name
        self._former: str | None = None
        self._nodes: dict[str, Node] = {}
        self._ranks: dict[str, list[int]] = {}
        """Of the trainer, by node; the first node collects."""
        self._writers: list[str] = []
        """Names of the trainer's ranks."""
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        """Of what is known of nodes; nothing is waited for with it."""
        self._news = threading.Condition(self._lock)
        self._hiring = threading.Lock()
        """Two that find the same courier dead are not to start two."""
        self._published: int | None = None
        self.received: dict[str, Received] = {}
        """By node: what its last transfer took."""
        self._moves = 0
        """Grows whenever bytes have moved."""

    def lay_out(self, ranks: Sequence[Worker]) -> list[str]:
        homes = [self._node(worker) for worker in ranks]
        with self._lock:
            before = sum(map(len, self._ranks.values()))
            self._ranks, self._writers = {}, [worker.spec.name for worker in ranks]
            for rank, node in enumerate(homes):
                self._ranks.setdefault(node.info.name, []).append(rank)
            if before not in (0, len(ranks)):
                self._former, self._name = self._name, f"{self._base}-{len(ranks)}"
        for node in {id(node): node for node in homes}.values():
            self._ready(node)
        return [self._folder(node) for node in homes]

    def publish(self, version: int, engines: Sequence[Worker]) -> None:
        self._assemble(version)
        wanted = {node.info.name: node for node in map(self._node, engines)}
        with self._news:
            self._published = version
            # A courier that has failed is replaced by who needs it there: that may take longer than the run can wait.
            missing = [node for node in wanted.values() if node.version != version and not node.busy and node.fit]
            for node in missing:
                node.busy = True
            self._news.notify_all()
        try:
            self._spread(version, missing)
        finally:
            with self._news:
                for node in missing:
                    node.busy = False
                self._news.notify_all()

    def where(self, worker: Worker, version: int) -> str | None:
        with self._lock:
            served = self._node(worker).served
        return served[0] if served is not None and served[1] == version else None

    def fetch(self, worker: Worker, version: int) -> None:
        node = self._node(worker)
        for _ in range(TRIES):
            self._claim(node)
            try:
                with self._lock:
                    if node.version == version or self._published != version:
                        return
                self._spread(version, [node])
            finally:
                with self._news:
                    node.busy = False
                    self._news.notify_all()
        if node.version != version and self._published == version:
            whom, why = f"courier of {node.info.name}", f"weights of version {version}"
            raise Stalled("transfer", whom, why, self._limit_s, self._limit_s)

    def moves(self) -> object:
        return self._published, self._moves

    def served(self) -> None:
        former, self._former = self._former, None
        for node in self._nodes.values() if former is not None else ():
            if node.courier is not None:
                node.courier.submit(CourierAPI.discard, str(node.info.shared / str(former)))

    # --- nodes

    def _node(self, worker: Worker) -> Node:
        info = self._cluster.node_of(worker)
        with self._lock:
            known = self._nodes.get(info.name)
            if known is None or known.info != info:
                known = self._nodes[info.name] = Node(info)
            return known

    def _folder(self, node: Node) -> str:
        return str(node.info.shared / self._name)

    @property
    def _home(self) -> Node:
        return self._nodes[next(iter(self._ranks))]

    def _ready(self, node: Node) -> None:
        """Sees to it that a node has a courier that answers, with its store open."""
        with self._hiring:
            if node.courier is not None and not node.fit:
                self._hires.dismiss([node.courier])
                node.courier = None
            if node.courier is None:
                if not self._lives(node):
                    raise LinkFailed(f"weights to {node.info.name}", node.info.name, "the node is lost")
                try:
                    node.courier, node.folder, node.stuck = self._hires.courier(node.info), "", False
                except ValueError as error:  # the cluster has no such node any more
                    raise LinkFailed(f"weights to {node.info.name}", node.info.name, str(error)) from error
        if node.folder != self._folder(node):
            writers = sum(map(len, self._ranks.values()))
            asked = node.courier.submit(CourierAPI.create, self._folder(node), self._plan.to_json(), writers)
            gather([asked], why=f"store of weights on {node.info.name}", stall_s=self._limit_s)
            node.folder = self._folder(node)

    def _lives(self, node: Node) -> bool:
        return any(each.name == node.info.name for each in self._cluster.nodes())

    def _claim(self, node: Node) -> None:
        """Waits until nobody else brings the node weights."""
        with self._news:
            waits.condition(
                self._news, lambda: not node.busy, whom=f"courier of {node.info.name}", why="its transfer under way",
                stall_s=2 * self._limit_s + ANSWER_S, progress=self.moves,
            )  # fmt: skip
            node.busy = True

    # --- transfers

    def _assemble(self, version: int) -> None:
        """The first trainer node has the whole version, and commits it. What fails is tried again, with other couriers
        where those have failed.

        Raises:
            Stalled: it did not get there; names the ranks whose part it was, as they have to make it again.
            RemoteError: what no other try would mend.
        """
        home, began = self._home, time.monotonic()
        missing = [self._nodes[name] for name in list(self._ranks)[1:]]
        for attempt in range(TRIES):
            node = home
            try:
                while missing:
                    node = missing[0]
                    carried = self._carry(version, [home], [node], self._ranks[node.info.name])
                    if carried.behind:
                        raise LinkFailed(f"to {home.info.name}", node.info.name, carried.problem)
                    missing.pop(0)
                node = home
                self._commit(version)
                return
            except FAILED as error:
                if final(error):
                    raise
                log.warning("version %d, try %d of %d: %s", version, attempt + 1, TRIES, error)
                if isinstance(error, RemoteError):  # the commit: something is not there
                    missing = [self._nodes[name] for name in list(self._ranks)[1:]]
                last = error
        whom = ", ".join(self._writers[rank] for rank in self._ranks[node.info.name])
        why = f"version {version} of the weights from {node.info.name}: {last}"
        raise Stalled("transfer", whom, why, time.monotonic() - began, self._limit_s)

    def _commit(self, version: int) -> None:
        home = self._home
        self._ready(home)
        asked = home.call().submit(CourierAPI.commit, version)
        try:
            gather([asked], why=f"commit version {version}", stall_s=self._limit_s)
        except Stalled:
            home.stuck = True
            raise
        with self._lock:
            home.served = home.folder, version

    def _spread(self, version: int, missing: Sequence[Node]) -> None:
        """From the nodes that have it to those that have not; who fails is left behind."""
        with self._lock:
            having = [node for node in self._nodes.values() if node.version == version and node.fit]
            holders = [node for node in having if self._lives(node)] or [self._home]
            ranks = sorted(rank for some in self._ranks.values() for rank in some)
        for node in self._carry(version, missing, holders, ranks).behind:
            log.warning("%s has no version %d of the weights; it is brought up to date later", node.info.name, version)

    def _carry(self, version: int, missing: Sequence[Node], holders: Sequence[Node], ranks: list[int]) -> Round:
        """A round from its beginning to its end."""
        round_ = Round(version, missing, holders, ranks, self._ready, self._begin, self._arrived)
        last: object = None

        def moved() -> object:
            nonlocal last
            if (now := round_.progress()) != last:
                last, self._moves = now, self._moves + 1
            return now

        try:
            waits.poll(
                round_.look, kind="transfer", whom=", ".join(node.info.name for node in missing) or "nobody",
                why=f"weights of version {version}", every_s=LOOK_S, progress=moved,
                stall_s=2 * self._limit_s + ANSWER_S,
            )  # fmt: skip
        except Stalled as error:
            log.warning("%s", error)
            round_.give_up()
        return round_

    def _begin(self, source: Node, target: Node, version: int, ranks: list[int]) -> Transfer:
        return Transfer.begin(source, target, version, ranks, next(self._numbers))

    def _arrived(self, transfer: Transfer, version: int) -> None:
        received = transfer.received
        assert received is not None
        self.received[transfer.target.info.name] = received
        log.info(
            "%s: version %d, %.1f of %.1f MiB in %.2f s", transfer.link.name, version, received.sent / 2**20,
            received.total / 2**20, received.seconds,
        )  # fmt: skip
        if received.whole:
            with self._lock:
                transfer.target.served = transfer.target.folder, version
