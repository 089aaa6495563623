"""Restarts the trainer after a failure: replaces all ranks, keeps the engines running, and restores the state from the
newest checkpoint in memory or on disk.

Once a rank has failed, the other ranks are in collectives that will never complete. So every rank is killed and started
again, from a fork server.
"""

import contextlib
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from lockstep.base import waits
from lockstep.base.wait_state import Stalled, WaitTimeout
from lockstep.cluster.protocol import RemoteError, WorkerDied, WorkerLauncher
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

ABORT_LIMIT_S = VERDICT_WAIT_S + 1.0
"""Time limit for ranks to leave an aborted collective. A rank that is still computing then is killed."""
VERDICT_AFTER_ABORT_S = 2.0
"""Longest wait, after the ranks have left their collectives, for the verdict that names the culprit."""


class MemoryCheckpointer:
    """Writes checkpoints to shared memory and restores them."""

    def __init__(self, policy: TrainerGroup, folder: Path) -> None:
        self.policy, self.folder = policy, folder
        self._full = False
        shutil.rmtree(folder, ignore_errors=True)  # checkpoints of an earlier controller may be of later steps
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, version: int) -> None:
        """Makes every rank copy its part. If there is no room, logs a warning and never copies again."""
        if self._full:
            return
        try:
            self.policy.save_to_memory(self.folder, version)
        except RemoteError as error:
            if error.code != SharedMemoryFull.error_code:
                raise
            log.warning("%s; after a fault, steps since the newest checkpoint will be trained again", error.message)
            self._full = True
            shutil.rmtree(self.folder, ignore_errors=True)

    def restore(self, at_least: int) -> int | None:
        """Loads the newest copy that all ranks have and returns its version. Returns None if there is none, or if it is
        older than `at_least`."""
        version = newest_memory_checkpoint(self.folder, self.policy.ranks)
        if version is None or version < at_least:
            return None
        try:
            self.policy.load_from_memory(self.folder, version)
        except RemoteError as error:
            if error.code != MemoryCheckpointMissing.error_code:
                raise
            log.warning("%s; restoring the checkpoint instead", error.message)
            return None
        return version


@dataclass(frozen=True, slots=True)
class RecoveryContext:
    """Parts of the controller that recovery needs."""

    manager: RecoveryManager
    launcher: WorkerLauncher
    memory: MemoryCheckpointer | None = None
    """The checkpoints in shared memory; None if the state is not copied there."""


class TrainerRecovery:
    """Restarts the trainer ranks of the policy, all together."""

    def __init__(
        self,
        policy: TrainerGroup,
        context: RecoveryContext,
        checkpoints: CheckpointManager,
        ledger: Ledger,
        weights: WeightPublisher | None,
        config: TrainerConfig,
    ) -> None:
        self.policy, self.config, self.checkpoints = policy, config, checkpoints
        self.ledger, self.weights = ledger, weights
        self.manager, self.launcher, self.memory = context.manager, context.launcher, context.memory

    def recover(self, error: CallError, steps_done: int) -> int:
        """Restarts the ranks after an error. Returns the number of steps in the restored state.

        Args:
            steps_done: the number of steps that were trained before the error.

        Raises:
            GaveUp: the ranks are not restarted (again).
            RemoteError, WorkerDied, Stalled: `error` itself, if it is not from the trainer, or if the recovery policy
                does not restart after such an error and has no reason to add.
        """
        began = time.monotonic()
        failure = self._root_cause(error)
        self.manager.decide(failure, error)  # raises if there is no restart
        ranks, restored = self.policy.ranks, None
        while restored is None:
            try:
                restored = self._rebuild(ranks)
            except (RemoteError, WorkerDied, Stalled) as start_error:
                culprit = self._culprit(start_error, starting=True)
                failed_start = describe_failure(start_error, "policy", *culprit, self.manager.step, starting=True)
                action = self.manager.decide(failed_start, start_error, next_smaller_ranks(self.config, ranks))
                ranks = action.ranks if isinstance(action, FewerRanks) else ranks
        repeated = steps_done - restored
        text = f", {repeated} step{'s are' if repeated > 1 else ' is'} trained again" if repeated > 0 else ""
        self.manager.restarted(failure, time.monotonic() - began, text, restored=restored, again=repeated)
        return restored

    def _root_cause(self, error: CallError) -> WorkerFailure:
        """Finds the failure that came first. If the error comes from an aborted collective, the cause is another rank:
        one that died meanwhile, or one that a verdict names, whichever is known first. Raises `error` if it is not from
        the trainer."""
        failure = describe_failure(error, "policy", *self._culprit(error), self.manager.step)
        if not is_effect(error) and not isinstance(error, WorkerDied):
            return failure
        ranks = {worker.spec.name: worker.spec.rank for worker in self.policy.workers}
        dead = self._wait_for_aborts()  # in any case, so that the logs of all ranks are complete
        if isinstance(error, WorkerDied):
            return failure
        if dead is not None:
            return describe_failure(dead, "policy", dead.worker, dead.rank, self.manager.step)
        name = self.manager.accused_worker(ranks, VERDICT_AFTER_ABORT_S)
        if name is None:
            return failure
        return WorkerFailure("policy", name, ranks[name], "stalled", "held up the other ranks", step=self.manager.step)

    def _wait_for_aborts(self) -> WorkerDied | None:
        """Waits until the ranks have left their aborted collectives, so that their logs say why they did. Returns the
        death of a rank, if one died."""
        # A rank runs its calls in order, so these calls end after the call that is in the aborted collective.
        calls = [worker.submit(PolicyAPI.info) for worker in self.policy.workers]
        with contextlib.suppress(WaitTimeout):
            waits.poll(
                lambda: all(call.done() for call in calls) or None, kind="call", waits_for="trainer ranks",
                why="their collectives end", timeout_s=ABORT_LIMIT_S, notice_after_s=None,
            )  # fmt: skip
        for call in calls:
            try:
                if call.done():
                    call.result(why="their collectives end")
            except WorkerDied as death:
                return death
            except RemoteError:
                continue
        return None

    def _culprit(self, error: CallError, starting: bool = False) -> tuple[str, int | None]:
        """Returns name and rank of the trainer's worker that failed. For a wait for several ranks, and for a rank that
        is still starting, the rank is None. Raises `error` if it is not from a rank of the trainer; while ranks are
        starting, every error is from one."""
        name = error.waits_for if isinstance(error, Stalled) else error.worker
        ranks = {worker.spec.name: worker.spec.rank for worker in self.policy.workers}
        if name in ranks:
            return name, ranks[name]
        waited_for = set(name.split(", "))  # a wait for several ranks lists their names
        if not starting and not waited_for & set(ranks):
            raise error
        return name, None

    def _rebuild(self, ranks: int) -> int:
        """Starts this many ranks and restores their state. Returns the number of steps in the state."""
        self.launcher.kill(self.policy.workers)
        self.checkpoints.writer_lost()
        workers = self.launcher.launch("policy", range(ranks))
        try:
            self.policy.replace_ranks(workers, set_up_ranks(workers))
        except BaseException:
            self.launcher.kill(workers)
            raise
        newest = self.checkpoints.newest() or 0
        restored = None if self.memory is None else self.memory.restore(at_least=newest)
        if restored is None:
            restored = restore_checkpoint(self.policy, self.ledger)
        if self.weights is not None:
            self.weights.open_on_ranks()
        return restored
