"""The trained models of a run, such as policy and critic, as one: their state is saved and restored together."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np

from lockstep.cluster.protocol import PendingResult
from lockstep.cluster.rpc.futures import gather_results, last_settled_at, wait_for_calls
from lockstep.config.algorithm import TrainerOutput
from lockstep.data.micro_batch import MiniBatch
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.rank_loads import REMARK_STEPS, SlowRank, slow_ranks
from lockstep.run.devices.device_turns import divide_into_waves
from lockstep.run.trainer_group import TrainerGroup
from lockstep.train.checkpoints.checkpoint_retention import part_folder
from lockstep.train.trainer_protocol import StepStats

REMARK_EVERY = 16
"""Steps between two looks for ranks that are persistently slow."""
SubmittedStep = tuple[MiniBatch, Sequence[PendingResult[StepStats]]]


class TrainedRoles(Mapping[str, TrainerGroup]):
    """The ranks of every trained role, by role. A checkpoint has a part for each role; see `part_folder`."""

    def __init__(self, groups: Sequence[TrainerGroup]) -> None:
        """Args:
        groups: the policy first.
        """
        self._groups = {group.role.name: group for group in groups}

    def __getitem__(self, role: str) -> TrainerGroup:
        return self._groups[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def policy(self) -> TrainerGroup:
        """The role whose weights are published and exported."""
        return next(iter(self._groups.values()))

    @property
    def others(self) -> list[TrainerGroup]:
        """All roles except the policy."""
        return list(self._groups.values())[1:]

    @property
    def parts(self) -> tuple[str, ...]:
        """The subfolders of a checkpoint; none if there is only one role."""
        return tuple(self._groups) if len(self._groups) > 1 else ()

    def part_folder(self, folder: Path, role: str) -> Path:
        """Where a role's part of the state in `folder` is."""
        return part_folder(folder, role, self._groups)

    def step(self, minibatches: Mapping[str, Iterable[MiniBatch]]) -> dict[str, list[dict[str, float]]]:
        """Trains several roles, with one optimizer step for each mini-batch: at the same time, except those that share
        devices, which are trained one after the other in the order of `minibatches`.

        Each role has the next step in its queue while it does one, so that ranks need not wait for the controller. It
        has no more than that, so that after a failure of another role it has soon finished.

        Args:
            minibatches: those of each role, by role. They are made while ranks compute.

        Returns:
            The metrics of each step, by role; `train_s` is how long its ranks took.

        Raises:
            RemoteError, WorkerDied, Stalled: the first failure. Other roles may still be computing: `TrainerRecovery`
                waits for them.
        """
        metrics: dict[str, list[dict[str, float]]] = {role: [] for role in minibatches}
        for wave in divide_into_waves(minibatches, lambda role: self[role].turns):
            self._step_together({role: minibatches[role] for role in wave}, metrics)
        return metrics

    def _step_together(
        self, minibatches: Mapping[str, Iterable[MiniBatch]], metrics: dict[str, list[dict[str, float]]]
    ) -> None:
        """Trains several roles at the same time, and adds the metrics of their steps."""
        ended = dict.fromkeys(minibatches, time.monotonic())
        under_way: dict[str, SubmittedStep] = {}
        for of_roles in zip_longest(*minibatches.values()):
            chosen = zip(minibatches, of_roles, strict=True)
            submitted = {role: (each, self[role].submit_step(each)) for role, each in chosen if each is not None}
            self._finish_steps(under_way, metrics, ended)
            under_way = submitted
        self._finish_steps(under_way, metrics, ended)

    def _finish_steps(
        self, steps: Mapping[str, SubmittedStep], metrics: dict[str, list[dict[str, float]]], ended: dict[str, float]
    ) -> None:
        """Waits for one step of several roles, and adds its metrics.

        Args:
            ended: when the ranks of each role had finished their step before.
        """
        wait_for_calls([calls for _, calls in steps.values()], why="optimizer steps")
        for role, (minibatch, calls) in steps.items():
            began, ended[role] = ended[role], last_settled_at(calls)
            found = self[role].step_metrics(minibatch, calls[0].result(why="optimizer steps"))
            metrics[role].append({**found, "train_s": ended[role] - began})
            self[role].close_calls(calls)

    def evaluate(
        self, wanted: Mapping[str, tuple[MiniBatch, Sequence[TrainerOutput]]]
    ) -> dict[str, list[list[dict[str, np.ndarray]]]]:
        """Evaluates several roles, at the same time unless they share devices. Returns what `TrainerGroup.evaluate`
        returns, by role. Raises what `step` raises.

        Args:
            wanted: the mini-batch and the wanted values, by role.
        """
        calls = {role: self[role].submit_evaluation(*each) for role, each in wanted.items()}
        wait_for_calls(calls.values(), why="evaluation")
        values = {role: gather_results(own, why="evaluation") for role, own in calls.items()}
        for role, own in calls.items():
            self[role].close_calls(own)
        return values

    def begin_step(self, ledger: Ledger, step: int) -> None:
        """Chooses how the rows of a step are divided among ranks; see `TrainerGroup.choose_speeds`."""
        for group in self._groups.values():
            group.choose_speeds(ledger, step)

    def record_loads(self, ledger: Ledger, step: int) -> list[SlowRank]:
        """Stores what each rank had to do in a step. Returns the ranks that are slow now, if it is time to look."""
        loads = {name: found for name, group in self._groups.items() if (found := group.take_loads()) is not None}
        if loads:
            ledger.record_rank_loads(step, loads)
        if not loads or (step + 1) % REMARK_EVERY:
            return []
        return [each for name in loads for each in slow_ranks(ledger.rank_loads(name, REMARK_STEPS))]

    def save(self, folder: Path) -> None:
        """Begins to write a checkpoint of every role."""
        for name, group in self._groups.items():
            group.save(self.part_folder(folder, name))

    def saved(self) -> bool:
        """Whether the parts of the last save are complete on disk."""
        return all(group.saved() for group in self._groups.values())

    def load(self, folder: Path) -> None:
        """Loads a checkpoint into all roles."""
        for name, group in self._groups.items():
            group.load(self.part_folder(folder, name))

    def save_to_memory(self, folder: Path, version: int) -> None:
        """Copies the state of all roles into shared memory."""
        for name, group in self._groups.items():
            group.save_to_memory(self.part_folder(folder, name), version)

    def load_from_memory(self, folder: Path, version: int) -> None:
        """Loads a copy of all roles."""
        for name, group in self._groups.items():
            group.load_from_memory(self.part_folder(folder, name), version)

    def offload(self) -> None:
        """Frees the devices of the roles whose config says so, except of those that take turns with others on them."""
        for group in self._groups.values():
            if not group.turns.shared:
                group.offload()
