"""Weights where trainer ranks and engines are on the controller's host: one store, in this process's reach."""

from collections.abc import Sequence
from pathlib import Path

from lockstep.cluster.protocol import Worker
from lockstep.watch import waits
from lockstep.watch.waits import WaitTimeout
from lockstep.weights.delivery import Write
from lockstep.weights.errors import BufferHeld
from lockstep.weights.fence import readers
from lockstep.weights.layout import remove
from lockstep.weights.plan import Plan
from lockstep.weights.shared import SharedWeights


class OneHost:
    """Implements `lockstep.weights.delivery.Delivery`. No process of its own, nothing is sent.

    Args:
        folder: of the store, in shared memory.
        generation: of the run.
        limit_s: how long a reader may keep memory that a version needs.
    """

    def __init__(self, folder: Path, plan: Plan, generation: int, limit_s: float = 60.0) -> None:
        self._folder, self._plan, self._generation, self._limit_s = folder, plan, generation, limit_s
        self._store: SharedWeights | None = None
        self._former: SharedWeights | None = None
        """What engines serve from until the next publish, where the number of ranks has changed."""

    @property
    def store(self) -> SharedWeights:
        """The one that the next version goes to."""
        if self._store is None:
            raise RuntimeError("no store is open; call lay_out() first")
        return self._store

    def lay_out(self, ranks: Sequence[Worker]) -> list[str]:
        left = self._store
        if left is None or left.control.writers != len(ranks):
            folder = self._folder if left is None else self._folder.with_name(f"{self._folder.name}-{len(ranks)}")
            self._store = SharedWeights.create(folder, self._plan, len(ranks), self._generation)
            if left is not None and self._former is None:
                self._former = left
            elif left is not None:  # nothing was published from it
                _discard(left)
        return [str(self.store.folder)] * len(ranks)

    def publish(self, version: int, write: Write) -> None:
        try:
            waits.poll(
                lambda: not readers(self.store) or None, kind="lease", whom="engines",
                why="they let go of the weights before the last", timeout_s=self._limit_s,
            )  # fmt: skip
        except WaitTimeout as error:
            held = tuple(readers(self.store))
            if held:
                raise BufferHeld(self.store.folder, "this host", held, self._limit_s) from error
        write()
        self.store.commit(version)

    def hanging(self) -> list[BufferHeld]:
        return []

    def reads(self, engine: Worker, held: BufferHeld) -> bool:
        return any(engine.pid in each for each in held.readers)

    def where(self, worker: Worker, version: int) -> str | None:
        stores = [self._store, self._former]
        return next((str(each.folder) for each in stores if each is not None and each.version() == version), None)

    def fetch(self, worker: Worker, version: int) -> None:
        return

    def moves(self) -> object:
        return None

    def served(self) -> None:
        if self._former is not None:
            _discard(self._former)
            self._former = None


def _discard(store: SharedWeights) -> None:
    remove(store.folder)
    store.close()
