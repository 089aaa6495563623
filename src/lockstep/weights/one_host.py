"""Weights where trainer ranks and engines are on the controller's host: one store, in this process's reach."""

from collections.abc import Sequence
from pathlib import Path

from lockstep.cluster.protocol import Worker
from lockstep.weights.layout import remove
from lockstep.weights.plan import Plan
from lockstep.weights.shared import SharedWeights


class OneHost:
    """Implements `lockstep.weights.delivery.Delivery`. No process of its own, nothing is sent.

    Args:
        folder: of the store, in shared memory.
        generation: of the run.
    """

    def __init__(self, folder: Path, plan: Plan, generation: int) -> None:
        self._folder, self._plan, self._generation = folder, plan, generation
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

    def publish(self, version: int, engines: Sequence[Worker]) -> None:
        self.store.commit(version)

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
