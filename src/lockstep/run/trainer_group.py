"""The ranks of a trained role as one object: every method calls all ranks and returns one result."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from lockstep.cluster.protocol import PendingResult, Worker
from lockstep.cluster.rpc.futures import gather_identical, gather_results, wait_for_calls
from lockstep.cluster.rpc.group_calls import Scattered, submit_all
from lockstep.cluster.rpc.remote_worker import worker_and_node
from lockstep.config.algorithm import TrainerOutput
from lockstep.config.train_role import TrainRole
from lockstep.data.forest import Forest
from lockstep.data.micro_batch import MiniBatch
from lockstep.data.mini_batches import TrainingBatch, pack
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.rank_loads import SPEED_STEPS, RankLoads, measured_speeds
from lockstep.run.devices.device_turns import DeviceTurns
from lockstep.run.policy_api import PolicyAPI
from lockstep.train.trainer_api import TrainerAPI, TrainerInfo
from lockstep.train.trainer_protocol import UNKNOWN_S, RankLoad, StepStats

P = ParamSpec("P")
R = TypeVar("R")


def set_up_ranks(workers: Sequence[Worker]) -> dict[str, tuple[list[Worker], list[TrainerInfo]]]:
    """Makes the ranks of each role connect to each other and load the model, all roles at the same time: the devices
    must be free. Returns the workers and their answers, by role."""
    names: dict[str, list[str]] = {}
    for worker in workers:
        names.setdefault(worker.spec.role, []).append(worker_and_node(worker))
    calls = submit_all(workers, TrainerAPI.setup, [(names[worker.spec.role],) for worker in workers])
    ready: dict[str, tuple[list[Worker], list[TrainerInfo]]] = {role: ([], []) for role in names}
    for worker, info in zip(workers, gather_results(calls, why="load the model"), strict=True):
        own, infos = ready[worker.spec.role]
        own.append(worker)
        infos.append(info)
    return ready


@dataclass(slots=True)
class PendingFields:
    """Fields of a batch's targets that the ranks of a role are computing."""

    minibatch: MiniBatch
    fields: Mapping[str, str]
    """By field, the output that it comes from."""
    calls: Sequence[PendingResult[list[dict[str, np.ndarray]]]]
    """One for each rank; none if there are no fields."""

    def store(self, batch: TrainingBatch) -> None:
        """Adds the fields to the batch. All calls must be done."""
        values = gather_results(self.calls, why="their results")
        for name, output in self.fields.items():
            batch.set_field(name, self.minibatch, [[row[output] for row in rank] for rank in values])


class TrainerGroup:
    """The trainer ranks of one role, which are set up."""

    def __init__(
        self,
        workers: Sequence[Worker],
        infos: Sequence[TrainerInfo],
        role: TrainRole,
        turns: DeviceTurns | None = None,
    ) -> None:
        """Args:
        turns: those of its devices; None if it shares them with no other role.
        """
        self.role, self.objective = role, role.objective
        self.turns = turns or DeviceTurns()
        self.turns.join(self)
        self._offload = role.trainer.offload
        self.replace_ranks(workers, infos)

    def replace_ranks(self, workers: Sequence[Worker], infos: Sequence[TrainerInfo]) -> None:
        """Replaces the ranks by others that are already set up."""
        self.workers = list(workers)
        self.info = infos[0]
        self.speeds: Sequence[float] | None = None
        """Of the ranks, by which the rows of this step are divided; None: evenly. See `choose_speeds`."""
        self._loads: list[tuple[MiniBatch, list[RankLoad]]] = []
        self._offloaded = False
        self._open: list[Sequence[PendingResult[Any]]] = []

    @property
    def open_calls(self) -> list[Sequence[PendingResult[Any]]]:
        """Steps and evaluations that were submitted to all ranks, and whose results nobody has read."""
        return list(self._open)

    @property
    def ranks(self) -> int:
        return len(self.workers)

    def pack(self, forest: Forest, token_budget: int, whole_trees: bool = False) -> TrainingBatch:
        """Makes a batch of trees for the ranks; see `data.mini_batches.pack`."""
        return pack(forest, self.ranks, token_budget, self.info.packing, whole_trees, self.speeds)

    def submit_evaluation(
        self, minibatch: MiniBatch, want: Sequence[TrainerOutput]
    ) -> Sequence[PendingResult[list[dict[str, np.ndarray]]]]:
        """Submits an evaluation to all ranks and returns at once; see `evaluate`."""
        self.begin_turn()
        outputs = list(want)
        arguments = Scattered(minibatch.encode(), (outputs,))
        return self._opened(submit_all(self.workers, TrainerAPI.evaluate, arguments))

    def evaluate(self, minibatch: MiniBatch, want: Sequence[TrainerOutput]) -> list[list[dict[str, np.ndarray]]]:
        """Returns the wanted values, float32 `[targets]`, as dicts by `[ranks][micro-batches]`."""
        calls = self.submit_evaluation(minibatch, want)
        values = gather_results(calls, why=" and ".join(want))
        self.close_calls(calls)
        return values

    def evaluate_targets(self, batch: TrainingBatch, output: TrainerOutput) -> np.ndarray:
        """Returns an output for all targets of a batch, float32 `[targets]`, in the batch's order."""
        everything = batch.everything()
        values = self.evaluate(everything, [output])
        batch.set_field(output, everything, [[row[output] for row in rank] for rank in values])
        return batch.fields.pop(output)

    def offload(self) -> None:
        """Moves the state that the config names to host memory, once the ranks have done what they were asked before;
        other methods bring it back."""
        if self._offload.anything and not self._offloaded:
            moved = bool(self._offload.parameters), bool(self._offload.optimizer)
            gather_identical(self._submit(TrainerAPI.offload, *moved), why="offload")
            self._offloaded = True

    def ranks_killed(self) -> None:
        """Marks the ranks as killed: they have left their devices."""
        self._offloaded = True

    def begin_turn(self) -> None:
        """Makes other roles leave the devices, and brings offloaded state back."""
        self.turns.begin(self)
        if self._offloaded:
            gather_identical(self._submit(TrainerAPI.onload), why="onload")
            self._offloaded = False

    def begin_fields(self, minibatch: MiniBatch, without: Collection[str] = ()) -> PendingFields:
        """Asks the ranks for the fields of targets that they compute before the first update of a step, such as old
        log-probabilities.

        Args:
            minibatch: the whole step.
            without: fields that are not needed.
        """
        fields = {name: output for name, output in self.role.evaluated_fields.items() if name not in without}
        calls = self.submit_evaluation(minibatch, list(dict.fromkeys(fields.values()))) if fields else []
        return PendingFields(minibatch, fields, calls)

    def submit_step(self, minibatch: MiniBatch) -> Sequence[PendingResult[StepStats]]:
        """Submits an optimizer step to all ranks and returns at once; see `step`."""
        self.begin_turn()
        return self._opened(submit_all(self.workers, TrainerAPI.step, Scattered(minibatch.encode())))

    def step(self, minibatch: MiniBatch) -> dict[str, float]:
        """Does one optimizer step, and returns metrics over all ranks. Raises RemoteError for a non-finite loss, before
        weights change."""
        calls = self.submit_step(minibatch)
        wait_for_calls([calls], why="optimizer step")
        stats = calls[0].result(why="optimizer step")
        self.close_calls(calls)
        return self.step_metrics(minibatch, stats)

    def step_metrics(self, minibatch: MiniBatch, stats: StepStats) -> dict[str, float]:
        """The metrics of an optimizer step, from the result of rank 0."""
        if stats.loads and len(stats.loads) == len(minibatch.cost) == self.ranks > 1:
            self._loads.append((minibatch, stats.loads))
        if not self.objective.uses_advantages:
            return stats.values
        return {**stats.values, "batch/skipped_sequences": float(minibatch.skipped)}

    def choose_speeds(self, ledger: Ledger, step: int) -> None:
        """Chooses by which speeds the rows of a step are divided: those that the config gives, or those that were
        measured before the step. The latter are stored, so that the step is divided alike when it is trained again."""
        self._loads = []
        given, role = self.role.trainer.rank_speeds, self.role.name
        if given == "equal" or self.ranks == 1:
            self.speeds = None
        elif given == "measured":
            speeds = ledger.rank_speeds(step, role)
            if speeds is None or len(speeds) != self.ranks:
                speeds = measured_speeds(ledger.rank_loads(role, SPEED_STEPS, before=step), self.ranks)
                ledger.record_rank_speeds(step, role, speeds)
            self.speeds = speeds
        else:
            self.speeds = given if len(given) == self.ranks else None

    def take_loads(self) -> RankLoads | None:
        """What each rank had to do in the optimizer steps since the last call; None if that is not known."""
        taken, self._loads = self._loads, []
        if not taken:
            return None
        measured = np.array([loads for _, loads in taken])  # [optimizer steps, ranks, work, blocked, memory]
        seconds = np.where((measured < 0).any(axis=0), UNKNOWN_S, measured.sum(axis=0))
        tokens = np.sum([minibatch.tokens_of_ranks for minibatch, _ in taken], axis=0)
        cost = np.sum([minibatch.cost for minibatch, _ in taken], axis=0)
        memory = measured[:, :, 2].max(axis=0)
        return RankLoads(
            seconds[:, 0].tolist(), seconds[:, 1].tolist(), memory.tolist(), tokens.tolist(), cost.tolist()
        )

    def _submit(
        self, method: Callable[Concatenate[Any, P], R], *args: P.args, **_: P.kwargs
    ) -> Sequence[PendingResult[R]]:
        """Submits the same call to all ranks."""
        return submit_all(self.workers, method, [args] * self.ranks)

    def _opened(self, calls: Sequence[PendingResult[R]]) -> Sequence[PendingResult[R]]:
        self._open.append(calls)
        return calls

    def close_calls(self, calls: Sequence[PendingResult[Any]]) -> None:
        """Marks the results of a call of all ranks as read, or as not needed any more."""
        self._open = [each for each in self._open if each is not calls]

    def save(self, folder: Path) -> None:
        gather_identical(self._submit(TrainerAPI.save, str(folder)), why="copy for checkpoint")

    def saved(self) -> bool:
        """Whether the last save is complete on disk."""
        return all(gather_results(self._submit(TrainerAPI.saved), why="checkpoint"))

    def load(self, folder: Path) -> None:
        self.begin_turn()
        gather_identical(self._submit(TrainerAPI.load, str(folder)), why="load checkpoint")

    def save_to_memory(self, folder: Path, version: int) -> None:
        gather_identical(self._submit(TrainerAPI.save_to_memory, str(folder), version), why="copy")

    def load_from_memory(self, folder: Path, version: int) -> None:
        self.begin_turn()
        gather_identical(
            self._submit(TrainerAPI.load_from_memory, str(folder), version),
            why="load copy",
        )

    def export(self, folder: Path, added: Mapping[str, Any]) -> None:
        """Writes the model, with values added to its config."""
        calls = self._submit(TrainerAPI.export, str(folder), dict(added))
        gather_identical(calls, why="export")

    def export_adapter(self, folder: Path) -> None:
        gather_identical(self._submit(TrainerAPI.export_adapter, str(folder)), why="export")

    def write_weights(self, version: int) -> None:
        """Every rank writes its rows of the weights into the store's inactive buffer."""
        gather_identical(self._submit(PolicyAPI.write_weights, version), why="write weights")
