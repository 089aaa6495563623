"""The served models of a run, such as the reference: their ranks, what they compute for a batch, and their restart.

A served model never changes, so a restart restores nothing: new ranks load it, and the call that failed is repeated.
The ranks of all other roles keep running, and the step continues.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from lockstep.base.text import count_noun, first_line
from lockstep.base.wait_state import Stalled
from lockstep.cluster.protocol import PendingResult, RemoteError, Worker, WorkerDied, WorkerLauncher
from lockstep.cluster.rpc.futures import CallError, gather_results
from lockstep.cluster.rpc.group_calls import Scattered, submit_all
from lockstep.cluster.rpc.remote_worker import worker_and_node
from lockstep.cluster.worker_failures import WorkerFailure, describe_failure, failed_worker, is_effect
from lockstep.config.algorithm import ModelOutput
from lockstep.config.roles import name_of_ranks
from lockstep.config.serve_role import ServeRole
from lockstep.data.forest import Forest
from lockstep.data.micro_batch import MiniBatch
from lockstep.data.mini_batches import TrainingBatch, pack
from lockstep.run.devices.device_turns import DeviceTurns, divide_into_waves
from lockstep.run.recovery.recovery_manager import RecoveryManager
from lockstep.run.trainer_group import PendingFields, TrainerGroup
from lockstep.train.served_model import ServedModelAPI
from lockstep.train.trainer_api import RankInfo

log = logging.getLogger(__name__)


class ServedGroup:
    """The ranks of a served role.

    Args:
        workers: its processes; `begin_setup` makes them load the model.
        turns: those of its devices; None if it shares them with no other role.
    """

    def __init__(
        self,
        role: ServeRole,
        workers: Sequence[Worker],
        launcher: WorkerLauncher,
        manager: RecoveryManager,
        turns: DeviceTurns | None = None,
    ) -> None:
        self.role, self._launcher, self._manager = role, launcher, manager
        self.turns = turns or DeviceTurns()
        self.turns.join(self)
        self.workers = list(workers)
        self._offloaded = True  # nothing is on the devices before the setup

    def begin_setup(self) -> None:
        """Makes the ranks load the model, and returns at once unless other roles have to leave the devices."""
        self.turns.begin(self)
        self._offloaded = False
        workers = self.workers
        names = [worker_and_node(worker) for worker in workers]
        self._setup: Sequence[PendingResult[RankInfo]] = submit_all(
            workers, ServedModelAPI.setup, [(names,)] * len(workers)
        )

    def finish_setup(self) -> None:
        """Waits until the ranks have loaded the model."""
        self.info = gather_results(self._setup, why=f"load the {self.role.name} model")[0]
        if self.info.slower:
            log.warning("%s", self.info.slower)

    def offload(self) -> None:
        """Moves the weights to host memory, once the ranks have done what they were asked before. Ranks that fail are
        killed, so that they leave the devices all the same; their next use says so."""
        if self._offloaded:
            return
        self._offloaded = True
        try:
            gather_results(submit_all(self.workers, ServedModelAPI.offload, [()] * len(self.workers)), why="offload")
        except (RemoteError, WorkerDied, Stalled) as error:
            log.warning("%s could not leave the devices: %s", name_of_ranks(self.role.name), first_line(error))
            self._launcher.kill(self.workers)

    def _begin_turn(self) -> None:
        """Makes other roles leave the devices, and brings the weights back."""
        self.turns.begin(self)
        if self._offloaded:
            gather_results(submit_all(self.workers, ServedModelAPI.onload, [()] * len(self.workers)), why="onload")
            self._offloaded = False

    def begin_fields(self, batch: TrainingBatch, everything: MiniBatch) -> PendingFields:
        """Asks the ranks for the role's fields. They get the policy's rows, unless this model needs another packing.

        Args:
            everything: the whole batch, as it is packed for the policy.
        """
        packing = self.info.packing
        minibatch = everything if packing == batch.mode else batch.everything(packing)
        return self._begin(minibatch, self.role.fields)

    def begin_scores(self, forest: Forest, token_budget: int) -> tuple[TrainingBatch, PendingFields]:
        """Asks the ranks for the score of each sequence of a forest with one target per sequence. The rows, and so the
        scores, do not depend on the number of ranks."""
        batch = pack(forest, 1, token_budget, self.info.packing)
        return batch, self._begin(batch.everything(), {"score": "scores"})

    def _begin(self, minibatch: MiniBatch, fields: Mapping[str, ModelOutput]) -> PendingFields:
        self._begin_turn()
        minibatch = minibatch.spread(len(self.workers))
        outputs = list(dict.fromkeys(fields.values()))
        arguments = Scattered(minibatch.encode(), (outputs,))
        calls = submit_all(self.workers, ServedModelAPI.evaluate, arguments)
        return PendingFields(minibatch, fields, calls)

    def failed(self, error: CallError) -> bool:
        """Whether the error is that of a call to one of the ranks."""
        return not {worker.spec.name for worker in self.workers}.isdisjoint(failed_worker(error).split(", "))

    def restart(self, error: CallError) -> None:
        """Replaces all ranks after an error.

        Raises:
            GaveUp: the ranks are not restarted (again).
            RemoteError, WorkerDied, Stalled: `error` itself, if a restart cannot help.
        """
        began = time.monotonic()
        failure = self._describe(error)
        self._manager.decide(failure, error)
        while True:
            self._launcher.kill(self.workers)
            self._offloaded = True
            try:
                self.workers = list(self._launcher.launch(self.role.name, range(self.role.ranks)))
                self.begin_setup()
                self.finish_setup()
                break
            except (RemoteError, WorkerDied, Stalled) as start_error:
                self._manager.decide(self._describe(start_error, starting=True), start_error)
        self._manager.restarted(failure, time.monotonic() - began, "")

    def _describe(self, error: CallError, starting: bool = False) -> WorkerFailure:
        """Describes how a rank failed. If the error comes from an aborted collective, it is the rank that a verdict
        names."""
        if is_effect(error) and (accused := self._manager.accused_rank(self.role.name, self.workers, starting)):
            return accused
        name = failed_worker(error)
        rank = next((worker.spec.rank for worker in self.workers if worker.spec.name == name), None)
        return describe_failure(error, self.role.name, name, rank, self._manager.step, starting)


class ServedScorer:
    """Implements `lockstep.rewards.model_reward.ServedScores` with the ranks of a served role. If one fails, all are
    replaced and compute again.

    Args:
        restarting: wraps a restart.
    """

    def __init__(self, group: ServedGroup, restarting: Callable[[], AbstractContextManager[None]]) -> None:
        self._group, self._restarting = group, restarting

    @property
    def longest(self) -> int:
        return self._group.info.context_length - 1  # the target of a score has a place after the last token

    def begin(self, forest: Forest, token_budget: int) -> Callable[[], np.ndarray]:
        """Raises GaveUp, or RemoteError, WorkerDied, Stalled if a restart cannot help or another role failed."""
        batch, begun = self._submit(forest, token_budget)

        def scores() -> np.ndarray:
            """Raises what `begin` raises."""
            pending = begun
            while True:
                try:
                    gather_results(pending.calls, why=f"scores of {count_noun(batch.targets, 'text')}")
                    break
                except (RemoteError, WorkerDied, Stalled) as error:
                    self._restart(error)
                    pending = self._submit(forest, token_budget)[1]
            pending.store(batch)
            found = np.empty(batch.targets, np.float32)
            found[batch.sequences] = batch.fields["score"]
            return found

        return scores

    def _submit(self, forest: Forest, token_budget: int) -> tuple[TrainingBatch, PendingFields]:
        """Asks the ranks; if one fails before they compute, all are replaced."""
        while True:
            try:
                return self._group.begin_scores(forest, token_budget)
            except (RemoteError, WorkerDied, Stalled) as error:
                if not self._group.failed(error):  # a role that should have left the devices
                    raise
                self._restart(error)

    def _restart(self, error: CallError) -> None:
        with self._restarting():
            self._group.restart(error)


def annotate_batches(
    batches: Sequence[tuple[TrainerGroup, TrainingBatch]],
    served: Sequence[ServedGroup],
    restarting: Callable[[], AbstractContextManager[None]],
    without: Collection[str] = (),
) -> None:
    """Adds to the targets of batches what the objectives of their roles need before the first update of a step. All
    roles compute at the same time, except those that share devices, which compute one after the other: served ones, and
    then the trained ones. A served role that fails is restarted and computes again.

    Args:
        batches: trained roles with their batches, the policy first, whose batch gets the fields of served roles.
        restarting: wraps a restart.
        without: fields that trained roles do not compute.

    Raises:
        GaveUp: a served role is not restarted (again).
        RemoteError, WorkerDied, Stalled: a rank of a trained role failed, or a restart cannot help a served role.
    """
    served = [group for group in served if group.role.fields]
    if not served and not any(group.role.evaluated_fields.keys() - without for group, _ in batches):
        return
    batch = batches[0][1]
    everything = batch.everything()
    groups: list[TrainerGroup | ServedGroup] = [*served, *(group for group, _ in batches)]
    own: list[tuple[TrainerGroup, TrainingBatch, PendingFields]] = []
    found: list[PendingFields] = []
    for wave in divide_into_waves(groups, lambda group: group.turns):
        of_wave = [
            (group, each, group.begin_fields(everything if each is batch else each.everything(), without))
            for group, each in batches
            if group in wave
        ]
        asked = [group for group in wave if isinstance(group, ServedGroup)]
        found += _wait_for_fields([fields for *_, fields in of_wave], asked, batch, everything, restarting)
        own += of_wave
    for group, of_role, fields in own:
        group.close_calls(fields.calls)
        fields.store(of_role)
    for each in found:
        each.store(batch)


def _wait_for_fields(
    own: Sequence[PendingFields],
    served: Sequence[ServedGroup],
    batch: TrainingBatch,
    everything: MiniBatch,
    restarting: Callable[[], AbstractContextManager[None]],
) -> list[PendingFields]:
    """Asks served roles for their fields, and waits for them and for those that trained roles are computing. Returns
    the fields of the served roles. Raises what `annotate_batches` raises."""
    pending: dict[ServedGroup, PendingFields] = {}
    while True:
        try:
            for group in served:
                if group not in pending:
                    pending[group] = group.begin_fields(batch, everything)
            parts = [*own, *pending.values()]
            why = " and ".join(name for each in parts for name in each.fields)
            gather_results([call for each in parts for call in each.calls], why=why)
            return list(pending.values())
        except (RemoteError, WorkerDied, Stalled) as error:
            failed = next((group for group in served if group.failed(error)), None)
            if failed is None:
                raise
            with restarting():
                failed.restart(error)
            pending.pop(failed, None)
