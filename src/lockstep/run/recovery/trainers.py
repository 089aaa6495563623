"""How the trainer comes back: all ranks anew, engines kept warm, state from the newest place that has it.

A model is never used on after one of its ranks has failed: the others are in collectives that nobody will complete.
Every rank is ended and started again from the warm template.
"""

import contextlib
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
from lockstep.run.recovery.failures import Failure, failure_of, is_effect
from lockstep.run.recovery.memory import MemoryCopy
from lockstep.run.recovery.policy import FewerRanks, fewer_ranks
from lockstep.run.recovery.recovery import Recovery
from lockstep.run.services import PolicyAPI
from lockstep.watch import waits
from lockstep.watch.orders import VERDICT_S
from lockstep.watch.waits import Stalled, WaitTimeout

log = logging.getLogger(__name__)

FREED_S = VERDICT_S + 1.0
"""Within which ranks are out of a collective that is ended; who is not computes, and is ended as it is."""
BLAMED_S = 2.0
"""After the ranks were let go of, within which the verdict that says why is heard."""


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
        failure = self._cause(error)
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

    def _cause(self, error: Failed) -> Failure:
        """What failed first. An error of a rank whose collective was ended is an effect: it was who died meanwhile, or
        whom a verdict names, whichever of the two is heard of first. Raises `error` where it is not the trainer's."""
        failure = failure_of(error, "policy", *self._who(error), self.recovery.step)
        if not is_effect(error) and not isinstance(error, WorkerDied):
            return failure
        ranks = {worker.spec.name: worker.spec.rank for worker in self.policy.workers}
        dead = self._let_go()
        if isinstance(error, WorkerDied):
            return failure
        if dead is not None:
            return failure_of(dead, "policy", dead.worker, dead.rank, self.recovery.step)
        name = self.recovery.accused(ranks, BLAMED_S)
        if name is None:
            return failure
        return Failure("policy", name, ranks[name], "stalled", "held up the other ranks", step=self.recovery.step)

    def _let_go(self) -> WorkerDied | None:
        """Waits until the ranks are out of what they were in: those whose collective was ended are told why, and say so
        in their logs. The rank that is found to have died."""
        asked = [worker.submit(PolicyAPI.info) for worker in self.policy.workers]
        with contextlib.suppress(WaitTimeout):
            waits.poll(
                lambda: all(each.done() for each in asked) or None, kind="call", whom="trainer ranks",
                why="their collectives end", timeout_s=FREED_S, notice_after_s=None,
            )  # fmt: skip
        for each in asked:
            try:
                if each.done():
                    each.result(why="their collectives end")
            except WorkerDied as death:
                return death
            except RemoteError:
                continue
        return None

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
