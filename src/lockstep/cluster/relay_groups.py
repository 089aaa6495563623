"""Which nodes share a call relay."""

from collections.abc import Hashable
from typing import Generic, TypeVar

from lockstep.cluster.rpc.open_calls import OpenCalls

WORKERS_PER_RELAY = 32
"""Nodes share a relay while they have at most so many workers together. Four times as many as a node has GPUs: then the
controller's work per message is no longer most of its work, and a relay that ends takes few workers with it."""

Node = TypeVar("Node", bound=Hashable)


class RelayGroup(Generic[Node]):
    """Nodes whose workers are called through the same relay.

    Args:
        shared: whether other nodes may be added, so that the relay must listen where they reach it.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.calls = OpenCalls()
        """The open calls of all workers of these nodes."""
        self.workers: dict[Node, int] = {}
        """How many workers each node will have, as far as they are planned."""

    @property
    def nodes(self) -> list[Node]:
        return list(self.workers)

    def has_room(self, workers: int) -> bool:
        """Whether a node with so many workers may be added."""
        return self.shared and sum(self.workers.values()) + workers <= WORKERS_PER_RELAY


class RelayGroups(Generic[Node]):
    """The groups of a run's nodes. A node stays in its group until it is removed, whatever comes and goes beside it."""

    def __init__(self) -> None:
        self._groups: list[RelayGroup[Node]] = []
        self._of: dict[Node, RelayGroup[Node]] = {}

    def __getitem__(self, node: Node) -> RelayGroup[Node]:
        """The group of a node. Raises KeyError."""
        return self._of[node]

    def __contains__(self, node: Node) -> bool:
        return node in self._of

    def place(self, node: Node, workers: int, shared: bool) -> RelayGroup[Node]:
        """Returns the group of a node. A new node that may share a relay joins the first group that has room for its
        workers, or begins one; otherwise it is alone.

        Args:
            workers: how many the node will have.
            shared: whether a new node may share a relay.
        """
        group = self._of.get(node)
        if group is None:
            workers = max(1, workers)
            group = next((each for each in self._groups if shared and each.has_room(workers)), None)
            if group is None:
                group = RelayGroup(shared)
                self._groups.append(group)
            group.workers[node] = workers
            self._of[node] = group
        return group

    def remove(self, node: Node) -> None:
        """Removes a node that is lost; another one may take its room. Idempotent."""
        group = self._of.pop(node, None)
        if group is not None:
            del group.workers[node]
            if not group.workers:
                self._groups.remove(group)
