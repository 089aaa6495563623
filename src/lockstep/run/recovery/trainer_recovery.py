"""Restarts the trainer after a failure: replaces all ranks of the role that failed, keeps the engines and the ranks of
other roles running, and restores the state of all roles from the newest checkpoint in memory or on disk.

Once a rank has failed, the other ranks of its role are in collectives that will never complete. So each of them is
killed and started again, from a fork server.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.base import waits
from lockstep.base.wait_state import Stalled, WaitTimeout
from lockstep.cluster.protocol import RemoteError, Worker, WorkerDied, WorkerLauncher
from lockstep.cluster.rpc.futures import CallError, wait_for_calls
from lockstep.cluster.worker_failures import WorkerFailure, describe_failure, failed_worker, is_effect
from lockstep.config.roles import name_of_ranks
from lockstep.ledger.ledger import Ledger
from lockstep.run.checkpoint_manager import CheckpointManager, restore_checkpoint
from lockstep.run.devices.device_turns import divide_into_waves
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.run.recovery.restart_policy import FewerRanks, next_smaller_ranks
from lockstep.run.trained_roles import TrainedRoles
from lockstep.run.trainer_group import TrainerGroup, set_up_ranks
from lockstep.run.weight_sync import WeightPublisher
from lockstep.train.checkpoints.memory_checkpoint import memory_checkpoint_versions
from lockstep.train.errors import MemoryCheckpointMissing, SharedMemoryFull
from lockstep.train.trainer_api import TrainerAPI
from lockstep.watch.recorder.commands import VERDICT_WAIT_S

log = logging.getLogger(__name__)

ABORT_LIMIT_S = VERDICT_WAIT_S + 1.0
"""Time limit for ranks to leave an aborted collective. A rank that is still computing then is killed."""


class MemoryCheckpointer:
    """Writes checkpoints of all trained roles to shared memory and restores them."""

    def __init__(self, trained: TrainedRoles, folder: Path) -> None:
        self.trained, self.folder = trained, folder
        self._full = False
        shutil.rmtree(folder, ignore_errors=True)  # checkpoints of an earlier controller may be of later steps
        for role in trained:
            trained.part_folder(folder, role).mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, version: int) -> None:
        """Makes every rank copy its part. If there is no room, logs a warning and never copies again."""
        if self._full:
            return
        try:
            self.trained.save_to_memory(self.folder, version)
        except RemoteError as error:
            if error.code != SharedMemoryFull.error_code:
                raise
            log.warning("%s; after a fault, steps since the newest checkpoint will be trained again", error.message)
            self._full = True
            shutil.rmtree(self.folder, ignore_errors=True)

    def restore(self, at_least: int) -> int | None:
        """Loads the newest copy that all ranks of all roles have and returns its version. Returns None if there is
        none, or if it is older than `at_least`."""
        version = self._newest()
        if version is None or version < at_least:
            return None
        try:
            self.trained.load_from_memory(self.folder, version)
        except RemoteError as error:
            if error.code != MemoryCheckpointMissing.error_code:
                raise
            log.warning("%s; restoring the checkpoint instead", error.message)
            return None
        return version

    def _newest(self) -> int | None:
        versions = [
            memory_checkpoint_versions(self.trained.part_folder(self.folder, role), group.ranks)
            for role, group in self.trained.items()
        ]
        return max(set.intersection(*versions), default=None)


@dataclass(frozen=True, slots=True)
class RecoveryContext:
    """Parts of the controller that recovery needs."""

    manager: RecoveryManager
    launcher: WorkerLauncher
    memory: MemoryCheckpointer | None = None
    """The checkpoints in shared memory; None if the state is not copied there."""


class TrainerRecovery:
    """Restarts the ranks of a trained role, all together, and rolls all roles back to the same version."""

    def __init__(
        self,
        trained: TrainedRoles,
        context: RecoveryContext,
        checkpoints: CheckpointManager,
        ledger: Ledger,
        weights: WeightPublisher | None,
    ) -> None:
        self.trained, self.checkpoints = trained, checkpoints
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
        failures, restored = {failure.role: failure}, None
        ranks = {failure.role: self.trained[failure.role].ranks}
        while restored is None:
            try:
                restored = self._rebuild(ranks)
            except (RemoteError, WorkerDied, Stalled) as start_error:
                again = self._decide_again(start_error, failure.role, ranks)
                failures.setdefault(again.role, again)
        repeated = steps_done - restored
        text = f", {repeated} step{'s are' if repeated > 1 else ' is'} trained again" if repeated > 0 else ""
        for each in failures.values():
            self.manager.restarted(each, time.monotonic() - began, text, restored=restored, again=repeated)
        return restored

    def _decide_again(self, error: CallError, role: str, ranks: dict[str, int]) -> WorkerFailure:
        """Decides how many ranks of which role to start after a failed recovery, and adds it to `ranks`. Returns the
        failure.

        Args:
            role: the role that failed first, and so the one that failed again if the error does not tell.
        """
        failed, worker, rank = self._find_worker(error, starting=True) or (role, failed_worker(error), None)
        starting = failed in ranks
        if starting:
            failure = describe_failure(error, failed, worker, rank, self.manager.step, starting=True)
        else:  # ranks of a role that was to be kept
            failure = self._root_cause(error)
        group = self.trained[failed]
        count = ranks.setdefault(failed, group.ranks)
        fewer = next_smaller_ranks(group.role.trainer, count) if starting else None
        action = self.manager.decide(failure, error, fewer)
        if isinstance(action, FewerRanks):
            ranks[failed] = action.ranks
        return failure

    def _root_cause(self, error: CallError) -> WorkerFailure:
        """Finds the failure that came first. If the error comes from an aborted collective, the cause is another rank:
        one that died meanwhile, or one that a verdict names, whichever is known first. Raises `error` if it is not from
        the trainer."""
        found = self._find_worker(error)
        if found is None:
            raise error
        role = found[0]
        failure = describe_failure(error, *found, self.manager.step)
        if not is_effect(error) and not isinstance(error, WorkerDied):
            return failure
        dead = self._wait_for_aborts(role)  # in any case, so that the logs of all ranks are complete
        if isinstance(error, WorkerDied):
            return failure
        if dead is not None:
            return describe_failure(dead, role, dead.worker, dead.rank, self.manager.step)
        return self.manager.accused_rank(role, self.trained[role].workers) or failure

    def _wait_for_aborts(self, role: str) -> WorkerDied | None:
        """Waits until the ranks have left their aborted collectives, so that their logs say why they did. Returns the
        death of a rank, if one died."""
        # A rank runs its calls in order, so these calls end after the call that is in the aborted collective.
        calls = [worker.submit(TrainerAPI.info) for worker in self.trained[role].workers]
        with contextlib.suppress(WaitTimeout):
            waits.poll(
                lambda: all(call.done() for call in calls) or None, kind="call", waits_for=name_of_ranks(role),
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

    def _find_worker(self, error: CallError, starting: bool = False) -> tuple[str, str, int | None] | None:
        """Returns role, name and rank of the worker that failed; None if it is not from a trained role. For a wait for
        several ranks, and for a rank that is still starting, the rank is None."""
        name = failed_worker(error)
        names = name.split(", ")  # a wait for several ranks lists their names
        for role, group in self.trained.items():
            ranks = {worker.spec.name: worker.spec.rank for worker in group.workers}
            if name in ranks:
                return role, name, ranks[name]
            if set(names) & set(ranks) or (starting and names[0].rpartition("-")[0] == role):
                return role, name, None
        return None

    def _rebuild(self, ranks: Mapping[str, int]) -> int:
        """Starts this many ranks of the given roles, and restores the state of all roles. Returns the number of steps
        in the state."""
        for role in ranks:
            self.launcher.kill(self.trained[role].workers)
            self.trained[role].ranks_killed()
        if kept := [group for role, group in self.trained.items() if role not in ranks]:
            self._finish_calls(kept)
        self.checkpoints.writer_lost()
        self._replace_ranks(ranks)
        newest = self.checkpoints.newest() or 0
        restored = None if self.memory is None else self.memory.restore(at_least=newest)
        if restored is None:
            restored = restore_checkpoint(self.trained, self.ledger)
        everything = {role: ranks.get(role, group.ranks) for role, group in self.trained.items()}
        if not restored and len(ranks) < len(everything):  # only new ranks have the state before the first step
            return self._rebuild(everything)
        if self.weights is not None and self.trained.policy.role.name in ranks:
            self.weights.open_on_ranks()
        return restored

    def _replace_ranks(self, ranks: Mapping[str, int]) -> None:
        workers: list[Worker] = []
        try:
            for role, count in ranks.items():
                workers += self.launcher.launch(role, range(count))
            for wave in divide_into_waves(ranks, lambda role: self.trained[role].turns):
                for role in wave:
                    self.trained[role].turns.begin(self.trained[role])
                ready = set_up_ranks([worker for worker in workers if worker.spec.role in wave])
                for role, (own, infos) in ready.items():
                    self.trained[role].replace_ranks(own, infos)
        except BaseException:
            self.launcher.kill(workers)
            raise

    def _finish_calls(self, kept: Sequence[TrainerGroup]) -> None:
        """Waits until the ranks that are kept have finished what they were doing when another role failed, and their
        part of a checkpoint. They may take as long as they make progress; the results are dropped.

        Raises:
            RemoteError, WorkerDied, Stalled: a call failed. Its rank has left a collective, or never will, so all ranks
                of its role must be replaced too.
        """
        names = " and ".join(name_of_ranks(group.role.name) for group in kept)
        opened = [(group, calls) for group in kept for calls in group.open_calls]
        wait_for_calls([calls for _, calls in opened], why="what they were doing when another role failed")
        for group, calls in opened:
            group.close_calls(calls)
        self.checkpoints.wait_for_files(
            lambda: all(group.saved() for group in kept), waits_for=names, why="their part of a checkpoint"
        )
