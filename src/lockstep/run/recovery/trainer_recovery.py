"""Restarts the trainer after a failure: all ranks are replaced, engines stay warm, and state is restored from the
newest in-memory or on-disk checkpoint.

A model is never used after one of its ranks has failed: the others are in collectives that nobody will complete.
Every rank is ended and started again from the warm template.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lockstep.base import waits
from lockstep.base.bounded_wait import Stalled, WaitTimeout
from lockstep.cluster.protocol import RemoteError, Worker, WorkerDied
from lockstep.cluster.rpc.futures import CallError
from lockstep.cluster.worker_failures import WorkerFailure, describe_failure, is_effect
from lockstep.config.trainer import TrainerConfig
from lockstep.ledger.ledger import Ledger
from lockstep.run.checkpoint_manager import CheckpointManager, restore_checkpoint
from lockstep.run.policy_api import PolicyAPI
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.run.recovery.restart_policy import FewerRanks, next_smaller_ranks
from lockstep.run.trainer_group import TrainerGroup, set_up_ranks
from lockstep.run.weight_sync import WeightPublisher
from lockstep.train.errors import MemoryCheckpointMissing, SharedMemoryFull
from lockstep.train.memory_checkpoint import newest_memory_checkpoint
from lockstep.watch.recorder.commands import VERDICT_WAIT_S

log = logging.getLogger(__name__)


class MemoryCheckpointer:
    """Written after every commit; gone with the run's shared memory, unlike a checkpoint."""

    def __init__(self, policy: TrainerGroup, folder: Path) -> None:
        self.policy, self.folder = policy, folder
        self._full = False
        shutil.rmtree(folder, ignore_errors=True)  # what an earlier controller's ranks have left goes beyond our steps
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, version: int) -> None:
        """Has every rank copy its part. Where there is no room after all, that is said, and not tried again."""
        if self._full:
            return
        try:
            self.policy.copy_state(self.folder, version)
        except RemoteError as error:
            if error.code != SharedMemoryFull.error_code:
                raise
            log.warning("%s; after a fault, steps since the newest checkpoint will be trained again", error.message)
            self._full = True
            shutil.rmtree(self.folder, ignore_errors=True)

    def restore(self, at_least: int) -> int | None:
        """Loads the newest copy that all ranks have, unless it is older than that; which version it is of."""
        version = newest_memory_checkpoint(self.folder, self.policy.ranks)
        if version is None or version < at_least:
            return None
        try:
            self.policy.load_copy(self.folder, version)
        except RemoteError as error:
            if error.code != MemoryCheckpointMissing.error_code:
                raise
            log.warning("%s; going on from the checkpoint", error.message)
            return None
        return version


ABORT_LIMIT_S = VERDICT_WAIT_S + 1.0
"""Within which ranks are out of a collective that is ended; who is not computes, and is ended as it is."""
VERDICT_LIMIT_S = 2.0
"""After the ranks were let go of, within which the verdict that says why is heard."""


class TrainerLauncher(Protocol):
    """Who starts and ends trainer ranks."""

    def ranks(self, count: int) -> list[Worker]: ...

    def dismiss(self, workers: Sequence[Worker]) -> None: ...


@dataclass(frozen=True, slots=True)
class RecoveryContext:
    """What recovery of the trainer needs besides the trainer."""

    recovery: RecoveryManager
    forms: TrainerLauncher
    memory: MemoryCheckpointer | None = None
    """None where the state is not copied."""


class TrainerRecovery:
    """The policy's ranks as a whole."""

    def __init__(
        self,
        policy: TrainerGroup,
        healing: RecoveryContext,
        checkpoints: CheckpointManager,
        ledger: Ledger,
        weights: WeightPublisher | None,
        config: TrainerConfig,
    ) -> None:
        self.policy, self.config, self.checkpoints = policy, config, checkpoints
        self.ledger, self.weights = ledger, weights
        self.recovery, self.forms, self.memory = healing.recovery, healing.forms, healing.memory

    def heal(self, error: CallError, version: int) -> int:
        """Brings the ranks back after `error`, which came with `version_numbers` steps done; the steps behind their
        state.

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
                late = describe_failure(again, "policy", *who, self.recovery.step, starting=True)
                action = self.recovery.decide(late, again, next_smaller_ranks(self.config, ranks))
                ranks = action.ranks if isinstance(action, FewerRanks) else ranks
        count = version - restored
        told = f", {count} step{'s are' if count > 1 else ' is'} trained again" if count > 0 else ""
        self.recovery.restarted(failure, time.monotonic() - began, told, restored=restored, again=count)
        return restored

    def _cause(self, error: CallError) -> WorkerFailure:
        """What failed first. An error of a rank whose collective was ended is an effect: it was who died meanwhile, or
        whom a verdict names, whichever of the two is heard of first. Raises `error` where it is not the trainer's."""
        failure = describe_failure(error, "policy", *self._who(error), self.recovery.step)
        if not is_effect(error) and not isinstance(error, WorkerDied):
            return failure
        ranks = {worker.spec.name: worker.spec.rank for worker in self.policy.workers}
        dead = self._let_go()
        if isinstance(error, WorkerDied):
            return failure
        if dead is not None:
            return describe_failure(dead, "policy", dead.worker, dead.rank, self.recovery.step)
        name = self.recovery.accused(ranks, VERDICT_LIMIT_S)
        if name is None:
            return failure
        return WorkerFailure("policy", name, ranks[name], "stalled", "held up the other ranks", step=self.recovery.step)

    def _let_go(self) -> WorkerDied | None:
        """Waits until the ranks are out of what they were in: those whose collective was ended are told why, and say so
        in their logs. The rank that is found to have died."""
        asked = [worker.submit(PolicyAPI.info) for worker in self.policy.workers]
        with contextlib.suppress(WaitTimeout):
            waits.poll(
                lambda: all(each.done() for each in asked) or None, kind="call", whom="trainer ranks",
                why="their collectives end", timeout_s=ABORT_LIMIT_S, notice_after_s=None,
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

    def _who(self, error: CallError, others: bool = False) -> tuple[str, int]:
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
            self.policy.use(workers, set_up_ranks(workers))
        except BaseException:
            self.forms.dismiss(workers)
            raise
        newest = self.checkpoints.newest() or 0
        restored = None if self.memory is None else self.memory.restore(at_least=newest)
        if restored is None:
            restored = restore_checkpoint(self.policy, self.ledger)
        if self.weights is not None:
            self.weights.open_on_ranks()
        return restored
