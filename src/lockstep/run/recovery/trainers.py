"""How the trainer comes back: all ranks anew, engines kept warm, state from the newest place that has it.

A model is never used on after one of its ranks has failed: the others are in collectives that nobody will complete.
Every rank is ended and started again from the warm template.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.cluster.calls import Failed
from lockstep.cluster.protocol import RemoteError, Worker, WorkerDied
from lockstep.config.trainer import Trainer
from lockstep.ledger.ledger import Ledger
from lockstep.run.checkpoints import Checkpoints, restore
from lockstep.run.policy import Policy, set_up
from lockstep.run.publish import WeightSync
from lockstep.run.recovery.failures import failure_of
from lockstep.run.recovery.memory import MemoryCopy
from lockstep.run.recovery.policy import FewerRanks, fewer_ranks
from lockstep.run.recovery.recovery import Recovery
from lockstep.watch.waits import Stalled

log = logging.getLogger(__name__)


class Forms(Protocol):
    """Who starts and ends trainer ranks."""

    def ranks(self, count: int) -> list[Worker]: ...

    def dismiss(self, workers: Sequence[Worker]) -> None: ...


@dataclass(frozen=True, slots=True)
class Healing:
    """What recovery of the trainer needs besides the trainer."""

    recovery: Recovery
    forms: Forms
    memory: MemoryCopy | None = None
    """None where the state is not copied."""


class Trainers:
    """The policy's ranks as a whole."""

    def __init__(
        self,
        policy: Policy,
        healing: Healing,
        checkpoints: Checkpoints,
        ledger: Ledger,
        weights: WeightSync | None,
        config: Trainer,
    ) -> None:
        self.policy, self.config, self.checkpoints = policy, config, checkpoints
        self.ledger, self.weights = ledger, weights
        self.recovery, self.forms, self.memory = healing.recovery, healing.forms, healing.memory

    def heal(self, error: Failed, version: int) -> int:
        """Brings the ranks back after `error`, which came with `version` steps done; the steps behind their state.

        Raises:
            GaveUp: there is no restart for it, or none any more.
            RemoteError, WorkerDied, Stalled: `error`, where it is not the trainer's or says all there is to say.
        """
        began = time.monotonic()
        failure = failure_of(error, "policy", *self._who(error), self.recovery.step)
        self.recovery.decide(failure, error)
        ranks, restored = self.policy.ranks, None
        while restored is None:
            try:
                restored = self._rebuild(ranks)
            except (RemoteError, WorkerDied, Stalled) as again:
                who = self._who(again, others=True)
                late = failure_of(again, "policy", *who, self.recovery.step, starting=True)
                action = self.recovery.decide(late, again, fewer_ranks(self.config, ranks))
                ranks = action.ranks if isinstance(action, FewerRanks) else ranks
        count = version - restored
        told = f", {count} step{'s are' if count > 1 else ' is'} trained again" if count > 0 else ""
        self.recovery.restarted(failure, time.monotonic() - began, told, restored=restored, again=count)
        return restored

    def _who(self, error: Failed, others: bool = False) -> tuple[str, int]:
        """Name and rank of who failed. Raises `error` where it is none of the policy's, unless `others` may be meant:
        ranks that did not come up."""
        name = error.whom if isinstance(error, Stalled) else error.worker
        ranks = {worker.spec.name: worker.spec.rank for worker in self.policy.workers}
        if name in ranks:
            return name, ranks[name]
        if not others and not set(name.split(", ")) & set(ranks):
            raise error
        return name, 0

    def _rebuild(self, ranks: int) -> int:
        self.forms.dismiss(self.policy.workers)
        self.checkpoints.writer_lost()
        workers = self.forms.ranks(ranks)
        try:
            self.policy.use(workers, set_up(workers))
        except BaseException:
            self.forms.dismiss(workers)
            raise
        newest = self.checkpoints.newest() or 0
        restored = None if self.memory is None else self.memory.restore(at_least=newest)
        if restored is None:
            restored = restore(self.policy, self.ledger)
        if self.weights is not None:
            self.weights.open_on_ranks()
        return restored
