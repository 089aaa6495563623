"""What brings published weights to the engines, as the run sees it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from lockstep.cluster.protocol import Worker
from lockstep.weights.errors import BufferHeld

Write = Callable[[], Sequence[Worker]]
"""Has the trainer's ranks write their rows of a version; the engines that are to find it on their nodes then."""


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

    def publish(self, version: int, write: Write) -> None:
        """Makes what `write` has the ranks write the version of every node with engines. From before it is written
        until it is committed nobody else brings weights to the ranks' nodes. A node that fails or makes no progress is
        left behind: `where` is None for its engines then.

        Raises:
            BufferHeld: a reader does not let go of the memory that the version needs; nothing was written.
            IncompleteWeights, PlanMismatch: it cannot be committed.
        """

    def hanging(self) -> list[BufferHeld]:
        """Readers that have kept a node without trainer ranks from getting a version, and still do. Asked before a
        publish, which does without them."""

    def reads(self, engine: Worker, held: BufferHeld) -> bool:
        """Whether it is this engine that a version could not be written for."""

    def served(self) -> None:
        """Engines have the version that was published last: what there was before is not needed any more."""
