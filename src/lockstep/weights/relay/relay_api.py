"""A node's relay as the controller sees it: typed calls, no torch.

The service behind it is `lockstep.weights:WeightRelay`, one process on each node that holds
weights.
"""

from dataclasses import dataclass
from typing import Protocol

from lockstep.cluster.protocol import concurrent

RELAY_SERVICE = "lockstep.weights.relay.weight_relay:WeightRelay"
"""The `WorkerSpec.service` of relays."""

RELAY_PRELOAD = ("torch", "lockstep.weights.relay.weight_relay")
"""What the fork server imports before it forks relays."""


@dataclass(frozen=True, slots=True)
class RelayLink:
    """One transfer, from the relay of a node to that of another."""

    number: int
    """Unique in a generation of the run; names keys, communicators and files."""
    sender: str
    receiver: str

    @property
    def name(self) -> str:
        """Its name in messages and communicators."""
        return f"weights {self.number}: {self.sender} to {self.receiver}"


@dataclass(frozen=True, slots=True)
class SendProgress:
    """A sender's progress."""

    bytes: int = 0
    outcome: str | None = None
    """None while it runs, empty after success, else the error."""
    summed: int = 0
    """Bytes digested so far, to find out what has changed."""


@dataclass(frozen=True, slots=True)
class ReceiveResult:
    """Size and duration of one transfer."""

    sent: int
    """Bytes sent."""
    total: int
    """Bytes of the requested part; more than `sent` if some chunks had not changed."""
    seconds: float
    whole: bool
    """Whether it covered all ranks, so that the version is committed."""


class RelayAPI(Protocol):
    """Calls to a `lockstep.weights.relay.weight_relay:WeightRelay` worker, which run one after the other. It
    sends in threads, one for each receiver, so that no receiver waits for another."""

    def create(self, folder: str, plan: str, writers: int) -> int | None:
        """Creates or opens this node's store; returns its version. Raises NoRoom, StaleWriter."""

    def commit(self, version: int) -> None:
        """Makes a version this node's current one. Raises IncompleteWeights, StaleWriter, StaleVersion."""

    def version(self) -> int | None:
        """The committed version."""

    def discard(self, folder: str) -> None:
        """Deletes a store that is no longer used."""

    def send(self, version: int, ranks: list[int], link: RelayLink) -> None:
        """Starts to send what these ranks wrote of a version; `sent` returns the progress."""

    def receive(self, version: int, ranks: list[int], link: RelayLink) -> ReceiveResult:
        """Receives what these ranks wrote of a version into the spare buffer; commits the version if these are all
        ranks. Raises LinkFailed, PlanMismatch, TornWeights, StaleVersion."""

    @concurrent
    def readers(self) -> list[tuple[int, ...]]:
        """Processes that read the buffer that the next version needs: pids, each followed by those of its parents."""

    @concurrent
    def sent(self, number: int) -> SendProgress:
        """Progress of the sender of that link; answers at any time."""
