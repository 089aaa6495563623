"""What brings published weights to the engines, as the run sees it."""

from collections.abc import Sequence
from typing import Protocol

from lockstep.cluster.protocol import Worker


class Source(Protocol):
    """Where an engine finds a version."""

    def where(self, worker: Worker, version: int) -> str | None:
        """The folder of its node's store; None where that does not have the version (yet). From any thread."""

    def fetch(self, worker: Worker, version: int) -> None:
        """Brings the version to the worker's node, which was left behind or is new. From any thread; takes as long as
        bytes move. Raises Stalled, WorkerDied, RemoteError."""

    def moves(self) -> object:
        """Changes as long as bytes of some transfer do."""


class Delivery(Source, Protocol):
    """From trainer ranks to the nodes of all engines."""

    def lay_out(self, ranks: Sequence[Worker]) -> list[str]:
        """Stores for these trainer ranks; the folder of each. Idempotent."""

    def publish(self, version: int, engines: Sequence[Worker]) -> None:
        """Makes what the ranks have written the version of every node with engines. A node that fails or makes no
        progress is left behind: `where` is None for its engines then. Raises IncompleteWeights, PlanMismatch."""

    def served(self) -> None:
        """Engines have the version that was published last: what there was before is not needed any more."""
