"""The controller's typed calls to the weight relays, without importing torch.

The service is `lockstep.weights.relay.weight_relay:WeightRelay`, one process on each node that holds weights.
"""

from dataclasses import dataclass
from typing import Protocol

from lockstep.cluster.protocol import concurrent

RELAY_SERVICE = "lockstep.weights.relay.weight_relay:WeightRelay"
"""The `WorkerSpec.service` of relays."""

RELAY_PRELOAD = ("torch", "lockstep.weights.relay.weight_relay")
"""Modules that the fork server may import before it forks relays; benchmarks and tests use it."""


@dataclass(frozen=True, slots=True)
class RelayLink:
    """Identifies one transfer between the relays of two nodes."""

    number: int
    """Unique within one start of the controller; part of the names of store keys, communicators and files."""
    sender: str
    receiver: str

    @property
    def name(self) -> str:
        """Returns the transfer's name in messages and communicators."""
        return f"weights {self.number}: {self.sender} to {self.receiver}"


@dataclass(frozen=True, slots=True)
class SendProgress:
    """Reports how far a sender is."""

    bytes: int = 0
    outcome: str | None = None
    """The error; None while the transfer runs, empty after success."""
    summed: int = 0
    """Number of bytes of which digests were computed so far, to find the chunks that have changed."""


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """Reports size and duration of one transfer."""

    sent: int
    """Number of bytes sent."""
    total: int
    """Number of bytes of the requested parts; more than `sent` if some chunks had not changed."""
    seconds: float
    whole: bool
    """Whether the transfer included the parts of all ranks; the version was then committed."""


class RelayAPI(Protocol):
    """Calls to a `lockstep.weights.relay.weight_relay:WeightRelay` worker. They run one after the other, but a relay
    sends in one thread per receiver, so that no receiver waits for another."""

    def create(self, folder: str, plan: str, writers: int) -> int | None:
        """Creates or opens this node's store; returns its version. Raises NoRoom, StaleWriter."""

    def commit(self, version: int) -> None:
        """Makes a version the current one on this node. Raises IncompleteWeights, StaleWriter, StaleVersion."""

    def version(self) -> int | None:
        """Returns the committed version."""

    def discard(self, folder: str) -> None:
        """Deletes a store that is no longer used."""

    def send(self, version: int, ranks: list[int], link: RelayLink) -> None:
        """Starts sending these ranks' parts of a version; `sent` returns the progress."""

    def receive(self, version: int, ranks: list[int], link: RelayLink) -> ReceiveResult:
        """Receives these ranks' parts of a version into the spare buffer, and commits the version if these are all
        ranks. Raises LinkFailed, PlanMismatch, TornWeights, StaleVersion."""

    @concurrent
    def readers(self) -> list[tuple[int, ...]]:
        """Returns the processes that read the buffer that the next version needs: for each, its pid and those of its
        parents."""

    @concurrent
    def sent(self, number: int) -> SendProgress:
        """Returns the progress of the sender of that link. Can be called while another call runs."""
