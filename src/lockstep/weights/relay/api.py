"""A node's relay as the controller sees it: typed calls, no torch.

The service behind it is `lockstep.weights:WeightRelay`, one process on each node that holds
weights.
"""

from dataclasses import dataclass
from typing import Protocol

from lockstep.cluster.protocol import concurrent

RELAY_SERVICE = "lockstep.weights.relay.weight_relay:WeightRelay"
"""What a `WorkerSpec.service` names."""

RELAY_PRELOAD = ("torch", "lockstep.weights.relay.weight_relay")
"""What a template process imports before it forks couriers."""


@dataclass(frozen=True, slots=True)
class RelayLink:
    """One way, once: from the courier of a node to that of another."""

    number: int
    """Unique in a generation of the run: keys, communicators and files are named by it."""
    sender: str
    receiver: str

    @property
    def name(self) -> str:
        """For messages and communicators."""
        return f"weights {self.number}: {self.sender} to {self.receiver}"


@dataclass(frozen=True, slots=True)
class SendProgress:
    """How far a sender is."""

    bytes: int = 0
    outcome: str | None = None
    """How it ended: empty where well; None while it is under way."""
    summed: int = 0
    """Bytes that were looked at to find out what has changed."""


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """What one transfer took."""

    sent: int
    """Bytes that travelled."""
    total: int
    """Bytes of what was asked for; more than `sent` where parcels had not changed."""
    seconds: float
    whole: bool
    """Whether these were all ranks, and the version is committed."""


class RelayAPI(Protocol):
    """Calls to a `lockstep.weights.relay.weight_relay:WeightRelay` worker. They run one after the other; what it
    sends, it sends in threads, one to each receiver, so that none waits for another."""

    def create(self, folder: str, plan: str, writers: int) -> int | None:
        """Makes (or opens) this node's store; the version that it has. Raises NoRoom, StaleGeneration."""

    def commit(self, version: int) -> None:
        """Makes a version the current one of this node. Raises IncompleteWeights, StaleGeneration, StaleVersion."""

    def version(self) -> int | None:
        """The committed version."""

    def discard(self, folder: str) -> None:
        """Deletes a store that nobody uses any more."""

    def send(self, version: int, ranks: list[int], link: RelayLink) -> None:
        """Begins to send what these ranks wrote of a version. `sent` tells how far it is."""

    def receive(self, version: int, ranks: list[int], link: RelayLink) -> ReceiveResult:
        """Takes what these ranks wrote of a version into the buffer that is not current. Where these are all ranks,
        the version is committed. Raises LinkFailed, PlanMismatch, TornWeights, StaleVersion."""

    @concurrent
    def readers(self) -> list[tuple[int, ...]]:
        """Who reads the buffer that the next version goes to: pids, each with those of its parents."""

    @concurrent
    def sent(self, number: int) -> SendProgress:
        """How far the sender of that link is; answers at any time."""
