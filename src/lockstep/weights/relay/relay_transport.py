"""Brings weights to engines on other nodes than the trainer, by calls to the nodes' relays.

Every node holds weights in its own shared memory. The node of the first trainer rank collects the parts of ranks on
other nodes and commits the version. Then nodes that have the version send it to others. A node whose relay fails or
makes no progress misses the version, and gets it later, when an engine there needs it.
"""

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.base import waits
from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import RemoteError, Worker, WorkerLauncher
from lockstep.cluster.rpc.futures import gather_outcomes, gather_results
from lockstep.weights.errors import BufferHeld, LinkFailed
from lockstep.weights.relay.broadcast_tree import (
    RELAY_ERRORS,
    SENDER_ANSWER_S,
    BroadcastTree,
    RelayTransfer,
    is_permanent,
)
from lockstep.weights.relay.relay_api import ReceiveResult, RelayAPI
from lockstep.weights.relay.relay_manager import RELAY_POLL_S, ClusterNodes, RelayManager, RelayNode
from lockstep.weights.shared_memory_transport import ProcessLineage
from lockstep.weights.weight_plan import WeightPlan
from lockstep.weights.weight_transport import WriteVersion

log = logging.getLogger(__name__)

MAX_PUBLISH_TRIES = 5
"""Number of attempts to collect a version from the trainer's nodes in one publish."""


class RelayTransport:
    """Implements `lockstep.weights.weight_transport.WeightTransport`.

    Args:
        name: name of the stores' folder in the shared memory of every node.
        limit_s: how long a node may make no progress.
    """

    def __init__(
        self, cluster: ClusterNodes, launcher: WorkerLauncher, plan: WeightPlan, limit_s: float, name: str = "weights"
    ) -> None:
        self._cluster, self._limit_s = cluster, limit_s
        self._relays = RelayManager(cluster, launcher, plan, limit_s, name)
        self._base = name
        self._former: list[str] = []
        """Names of previous stores, which engines may read until the next publish."""
        self._nodes: dict[str, RelayNode] = {}
        self._ranks: dict[str, list[int]] = {}
        """Ranks of the trainer by node. The first node collects the version."""
        self._writers: list[str] = []
        """Names of the trainer's ranks."""
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        """Guards the state of nodes. Never held during a wait."""
        self._changed = threading.Condition(self._lock)
        self._published: int | None = None
        self._publishing = False
        self.received: dict[str, ReceiveResult] = {}
        """Result of the latest transfer to each node."""
        self._progress_count = 0
        """Incremented when a transfer makes progress."""

    def prepare_stores(self, ranks: Sequence[Worker]) -> list[str]:
        nodes_of_ranks = [self._node(worker) for worker in ranks]
        with self._lock:
            before = self._relays.writers
            self._ranks, self._writers = {}, [worker.spec.name for worker in ranks]
            for rank, node in enumerate(nodes_of_ranks):
                self._ranks.setdefault(node.info.name, []).append(rank)
            self._relays.writers = len(ranks)
            if before not in (0, len(ranks)):
                self._former = [*self._former, self._relays.name]
                self._relays.name = f"{self._base}-{len(ranks)}"
        for node in self._trainer_nodes:
            self._relays.wait(node, "where ranks write their weights")
        return [self._relays.folder(node) for node in nodes_of_ranks]

    def publish(self, version: int, write: WriteVersion) -> None:
        claim = object()
        self._publishing = True
        try:
            for node in self._trainer_nodes:
                self._claim(node, claim, urgent=True)
            self._check_spare_buffers()
            wanted = {node.info.name: node for node in map(self._node, write())}
            self._collect_and_commit(version)
            self._spread(version, self._claim_missing(version, wanted, claim))
        finally:
            self._publishing = False
            self._release(claim)

    def blocking_readers(self) -> list[BufferHeld]:
        with self._lock:
            behind = [(node, node.relay) for node in self._nodes.values() if node.behind]
        # A relay that is stuck because it waits for a reader still answers this call.
        pending = [
            (node, relay.submit(RelayAPI.readers)) for node, relay in behind if relay is not None and relay.alive()
        ]
        answers = gather_outcomes([call for _, call in pending], "readers of the spare buffer", SENDER_ANSWER_S)
        found = []
        for (node, _), readers in zip(pending, answers, strict=True):
            if not isinstance(readers, list):
                node.behind = False  # it does not answer; do not wait for it again at the next publish
            elif readers:
                found.append(self._buffer_held(node, readers))
        return found

    def holds_buffer(self, engine: Worker, held: BufferHeld) -> bool:
        node_name = self._cluster.node_of(engine).name
        return node_name == held.node and any(engine.pid in each for each in held.readers)

    def store_folder(self, worker: Worker, version: int) -> str | None:
        with self._lock:
            served = self._node(worker).served
        return served[0] if served is not None and served[1] == version else None

    def fetch(self, worker: Worker, version: int) -> None:
        node, claim, problem = self._node(worker), object(), ""
        for _ in range(MAX_PUBLISH_TRIES):
            try:
                self._claim(node, claim)
                with self._lock:
                    if node.version == version or self._published != version:
                        return
                problem = self._spread(version, [node]).problem
            finally:
                self._release(claim)
        if node.version != version and self._published == version:
            waits_for, why = f"relay of {node.info.name}", f"weights of version {version}: {problem}"
            raise Stalled("transfer", waits_for, why, self._limit_s, self._limit_s)

    def progress(self) -> object:
        return self._published, self._progress_count

    def delete_former_stores(self) -> None:
        with self._lock:
            former, self._former = [name for name in self._former if name != self._relays.name], []
            nodes = list(self._nodes.values())
        for node in nodes:
            for name in former:
                self._relays.discard(node, name)

    # --- nodes

    def _node(self, worker: Worker) -> RelayNode:
        info = self._cluster.node_of(worker)
        with self._lock:
            known = self._nodes.get(info.name)
            if known is None or known.info != info:
                known = self._nodes[info.name] = RelayNode(info)
            return known

    @property
    def _trainer_nodes(self) -> list[RelayNode]:
        """The nodes of trainer ranks; the first collects the version."""
        return [self._nodes[name] for name in self._ranks]

    def _claim(self, node: RelayNode, claim: object, urgent: bool = False) -> None:
        """Waits for the exclusive right to bring weights to the node. The trainer's claim is urgent and has
        priority."""

        def is_free() -> bool:
            return node.claim is None and (urgent or not node.urgent)

        def progress_of_transfers() -> object:
            # A publish has its own time limits, so this wait has none meanwhile.
            return self.progress(), time.monotonic() if self._publishing and not urgent else None

        with self._changed:
            node.urgent = node.urgent or urgent
            try:
                waits.condition(
                    self._changed, is_free, waits_for=f"relay of {node.info.name}", why="its transfer under way",
                    stall_s=self._limit_s + SENDER_ANSWER_S, progress=progress_of_transfers,
                )  # fmt: skip
            finally:
                node.urgent = node.urgent and not urgent
            node.claim = claim

    def _release(self, claim: object) -> None:
        with self._changed:
            for node in self._nodes.values():
                node.claim = None if node.claim is claim else node.claim
            self._changed.notify_all()

    def _claim_missing(self, version: int, wanted: dict[str, RelayNode], claim: object) -> list[RelayNode]:
        """After a commit: claims the nodes that need the version, and releases the trainer's other nodes."""
        with self._changed:
            self._published = version
            free = [node for node in wanted.values() if node.claim in (None, claim)]
            # A failed relay is not replaced now, which could take long, but when an engine needs it.
            missing = [node for node in free if node.version != version and node.usable]
            self._release(claim)
            for node in missing:
                node.claim = claim
        return missing

    def _check_spare_buffers(self) -> None:
        """Checks that ranks can write to the spare buffers of their nodes.

        Raises:
            BufferHeld: a reader holds a spare buffer.
        """
        for node in self._trainer_nodes:
            try:
                self._relays.wait(node, "weights of the trainer")
                readers = self._readers(node)
            except RELAY_ERRORS as error:
                node.stuck = node.stuck or isinstance(error, Stalled)
                # Not fatal: collecting the version tries again.
                log.warning("%s: its relay is not available: %s", node.info.name, error)
                continue
            if readers:
                raise self._buffer_held(node, readers)

    def _buffer_held(self, node: RelayNode, readers: Sequence[ProcessLineage]) -> BufferHeld:
        return BufferHeld(Path(self._relays.folder(node)), node.info.name, tuple(map(tuple, readers)), self._limit_s)

    def _readers(self, node: RelayNode) -> list[ProcessLineage]:
        """Waits until no process reads the node's spare buffer. Returns those that still do after the time limit."""
        end = time.monotonic() + self._limit_s
        while True:
            pending = node.require_relay().submit(RelayAPI.readers)
            (found,) = gather_results([pending], why="readers of the spare buffer", stall_s=self._limit_s)
            if not found or time.monotonic() > end:
                return found
            waits.sleep(RELAY_POLL_S, f"readers of the weights on {node.info.name} finish")

    # --- transfers

    def _collect_and_commit(self, version: int) -> None:
        """Collects the whole version on the first trainer node and commits it. Retries failures, with new relays if
        relays failed.

        Raises:
            Stalled: parts did not arrive. Names their ranks, which have to write the parts again.
            RemoteError: an error that would recur.
        """
        began = time.monotonic()
        first_node, *missing = self._trainer_nodes
        for attempt in range(MAX_PUBLISH_TRIES):
            node = first_node
            try:
                while missing:
                    node = missing[0]
                    tree = self._run_tree(version, [first_node], [node], self._ranks[node.info.name])
                    if tree.behind:
                        raise LinkFailed(f"to {first_node.info.name}", node.info.name, tree.problem)
                    missing.pop(0)
                node = first_node
                self._commit(first_node, version)
                return
            except RELAY_ERRORS as error:
                if is_permanent(error):
                    raise
                log.warning("version %d, try %d of %d: %s", version, attempt + 1, MAX_PUBLISH_TRIES, error)
                if isinstance(error, RemoteError):  # the commit failed: some part is missing
                    missing = self._trainer_nodes[1:]
                last = error
        waits_for = ", ".join(self._writers[rank] for rank in self._ranks[node.info.name])
        why = f"version {version} of the weights from {node.info.name}: {last}"
        raise Stalled("transfer", waits_for, why, time.monotonic() - began, self._limit_s)

    def _commit(self, first_node: RelayNode, version: int) -> None:
        self._relays.wait(first_node, f"commit version {version}")
        pending = first_node.require_relay().submit(RelayAPI.commit, version)
        try:
            gather_results([pending], why=f"commit version {version}", stall_s=self._limit_s)
        except Stalled:
            first_node.stuck = True
            raise
        with self._lock:
            first_node.served = first_node.folder, version

    def _spread(self, version: int, missing: Sequence[RelayNode]) -> BroadcastTree:
        """Sends the version from nodes that have it to those that lack it. Marks nodes that fail as behind."""
        with self._lock:
            nodes_with_version = [node for node in self._nodes.values() if node.version == version and node.usable]
            holders = [node for node in nodes_with_version if self._relays.has_node(node)] or self._trainer_nodes[:1]
            ranks = sorted(rank for some in self._ranks.values() for rank in some)
        tree = self._run_tree(version, missing, holders, ranks)
        for node in missing:
            node.behind = node in tree.behind
        for node in tree.behind:
            log.warning("%s did not get version %d of the weights; it will be updated later", node.info.name, version)
        return tree

    def _run_tree(
        self, version: int, missing: Sequence[RelayNode], holders: Sequence[RelayNode], ranks: list[int]
    ) -> BroadcastTree:
        """Runs one broadcast until it ends."""
        tree = BroadcastTree(
            version, missing, holders, ranks, self._relays.ready, self._begin, self._on_transfer_done, self._limit_s
        )  # fmt: skip
        last: object = None

        def poll_tree() -> bool | None:
            nonlocal last
            if (now := tree.progress()) != last:
                last, self._progress_count = now, self._progress_count + 1
            if any(node.urgent for node in missing):
                tree.give_up("the trainer writes a later version there")
            return tree.poll()

        # The broadcast's own time limit is shorter.
        waits.poll(
            poll_tree, kind="transfer", waits_for=", ".join(node.info.name for node in missing) or "no node",
            why=f"weights of version {version}", every_s=RELAY_POLL_S, progress=tree.progress,
            stall_s=2 * self._limit_s + SENDER_ANSWER_S,
        )  # fmt: skip
        return tree

    def _begin(self, source: RelayNode, target: RelayNode, version: int, ranks: list[int]) -> RelayTransfer:
        return RelayTransfer.begin(source, target, version, ranks, next(self._numbers))

    def _on_transfer_done(self, transfer: RelayTransfer, version: int) -> None:
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
