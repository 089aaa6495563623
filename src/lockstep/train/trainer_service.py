"""The trainer's worker process: one rank, which the controller drives by remote calls."""

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.config.algorithm import TrainerOutput
from lockstep.config.train_role import TrainRole
from lockstep.data.micro_batch import EncodedMicroBatches, decode_micro_batches
from lockstep.models.errors import naming_fields_in
from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints
from lockstep.train.rank_service import RankService, choose_packing
from lockstep.train.step_profiler import StepProfiler
from lockstep.train.trainer_api import TrainerAPI, TrainerInfo
from lockstep.train.trainer_kinds import trainer_kind
from lockstep.train.trainer_protocol import StepStats, Trainer
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)


class TrainerService(RankService, TrainerAPI):
    """One rank of the trainer.

    Args:
        role: the `TrainRole`, as `model_dump(mode="json")` returns it.
        run_folder: the folder of the run.
        images: the folder of the run's prepared images (`ImageStore`); None if the data has none.
        rank: the keyword arguments of `RankService`.
    """

    def __init__(self, role: dict[str, Any], run_folder: str = ".", images: str | None = None, **rank: Any) -> None:
        self.role = TrainRole.model_validate(role)
        super().__init__(self.role.name, self.role.trainer.threads, self.role.trainer.malloc, **rank)
        self.run_folder = Path(run_folder)
        self.images = None if images is None else Path(images)
        profiled = self.role.trainer.profile
        self._profiler: StepProfiler | None = None
        if profiled is not None and self.rank in profiled.ranks:
            self._profiler = StepProfiler(profiled, self.run_folder, f"{self.role.name}-rank{self.rank}")
        self._trainer: Trainer | None = None
        self._info: TrainerInfo | None = None
        self._memory: MemoryCheckpoints | None = None

    def setup(self, names: list[str] | None = None) -> TrainerInfo:
        """Joins the other ranks and loads the model.

        Args:
            names: names and nodes of all ranks, to report which are missing.
        """
        if self._info is not None:
            return self.info()
        current_beacon().stage("setup")
        timeout_s, replicas = self.role.trainer.collective_timeout_s, self.role.trainer.replicas
        ranks = self.join(names or (), timeout_s, self.role.communication, replicas)
        torch.manual_seed(self.role.seed * self.world + self.rank)
        with naming_fields_in(self.role.section):
            self._trainer = trainer = trainer_kind(self.role).create(self.role, ranks, self.generation, self.images)
            packing, reason = choose_packing(self.role.model, trainer.probe_packing, self.role.field("model.packing"))
        self._info = TrainerInfo(
            rank=self.rank,
            world=self.world,
            device=str(self.device),
            compute_dtype=str(trainer.compute_dtype).removeprefix("torch."),
            parameters=trainer.parameters(),
            packing=packing,
            packing_reason=reason,
            context_length=self.role.model.max_length or trainer.context_length,
            reference=trainer.has_reference,
            optimizer_step=0,
            slower=ranks.slower,
            has_new_head=trainer.has_new_head,
        )
        log.info("rank %d of %d is ready on %s, packing %s: %s", self.rank, self.world, self.device, packing, reason)
        return self._info

    def info(self) -> TrainerInfo:
        if self._info is None:
            raise RuntimeError("the trainer is not set up; call setup() first")
        return replace(self._info, optimizer_step=self.trainer.optimizer_step)

    @property
    def trainer(self) -> Trainer:
        """The trainer that `setup` created."""
        if self._trainer is None:
            raise RuntimeError("the trainer is not set up; call setup() first")
        return self._trainer

    def evaluate(self, microbatches: EncodedMicroBatches, outputs: list[TrainerOutput]) -> list[dict[str, np.ndarray]]:
        current_beacon().stage("evaluate")
        return self.trainer.evaluate(decode_micro_batches(microbatches), outputs)

    def step(self, microbatches: EncodedMicroBatches) -> StepStats:
        current_beacon().stage("train")
        with nullcontext() if self._profiler is None else self._profiler.record(self.trainer.optimizer_step + 1):
            return self.trainer.step(decode_micro_batches(microbatches))

    def save(self, folder: str) -> None:
        current_beacon().stage("save")
        self.trainer.save(Path(folder))

    def saved(self) -> bool:
        return self.trainer.saved()

    def load(self, folder: str) -> int:
        current_beacon().stage("load")
        self.trainer.load(Path(folder))
        return self.trainer.optimizer_step

    def save_to_memory(self, folder: str, version: int) -> None:
        current_beacon().stage("copy")
        self.trainer.save_to_memory(self._memory_checkpoints(folder), version)

    def load_from_memory(self, folder: str, version: int) -> int:
        current_beacon().stage("load")
        self.trainer.load_from_memory(self._memory_checkpoints(folder), version)
        return self.trainer.optimizer_step

    def export(self, folder: str, added: dict[str, Any] | None = None) -> None:
        current_beacon().stage("export")
        self.trainer.export(Path(folder), added or {})

    def export_adapter(self, folder: str) -> None:
        current_beacon().stage("export")
        self.trainer.export_adapter(Path(folder))

    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        self.trainer.offload(parameters, optimizer)

    def onload(self) -> None:
        self.trainer.onload()

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.close()
        if self._memory is not None:
            self._memory.close()
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def _memory_checkpoints(self, folder: str) -> MemoryCheckpoints:
        if self._memory is None:
            self._memory = MemoryCheckpoints(Path(folder), self.rank, self.world)
        return self._memory
