"""Weights from the trainer to the engines: versioned, fenced, idempotent."""

from lockstep.cluster.calls import gather
from lockstep.ledger.ledger import Ledger
from lockstep.run.engines import Engines
from lockstep.run.policy import Policy
from lockstep.run.services import PolicyAPI
from lockstep.weights.shared import SharedWeights, remove


class WeightSync:
    """Publishes versions. Trainer ranks write their rows into the inactive buffer, the controller commits the
    version (only then can it be read), the engines take it."""

    def __init__(self, policy: Policy, engines: Engines, store: SharedWeights, ledger: Ledger) -> None:
        self.policy, self.engines, self.store, self.ledger = policy, engines, store, ledger
        self.published: int | None = None
        self._former: SharedWeights | None = None
        """What engines serve from until the next publish, where the number of ranks has changed."""

    def open_on_ranks(self) -> None:
        """Lets the policy's ranks write into the store, into another one where it was made for more of them."""
        if self.store.control.writers != self.policy.ranks:
            left, generation = self.store, self.store.generation
            assert generation is not None
            folder = left.folder.with_name(f"weights-{self.policy.ranks}")
            self.store = SharedWeights.create(folder, left.plan, self.policy.ranks, generation)
            if self._former is None:
                self._former = left
            else:  # nothing was published from it
                _discard(left)
        where = str(self.store.folder)
        gather([worker.submit(PolicyAPI.open_weights, where) for worker in self.policy.workers], why="open weights")

    def publish(self, version: int) -> None:
        """Makes `version` what the engines serve; does nothing where they do already, or serve a later one: steps that
        are trained again after a fault make the versions again that there were."""
        if self.published is not None and version <= self.published:
            return
        self.policy.write_weights(version)
        self.store.commit(version)
        self.engines.load_weights(str(self.store.folder), version)
        self.ledger.published(version)
        self.published = version
        if self._former is not None:
            _discard(self._former)
            self._former = None


def _discard(store: SharedWeights) -> None:
    remove(store.folder)
    store.close()
