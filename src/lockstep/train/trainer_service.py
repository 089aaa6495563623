"""The trainer's worker process: one rank, which the controller drives by remote calls."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.base.malloc import tune_malloc
from lockstep.config.algorithm import TrainerOutput
from lockstep.config.train_role import TrainRole
from lockstep.data.micro_batch import EncodedMicroBatches, decode_micro_batches
from lockstep.data.packing import PackingMode
from lockstep.models.errors import naming_fields_in
from lockstep.train.distributed import join_ranks
from lockstep.train.memory_checkpoint import MemoryCheckpoints
from lockstep.train.trainer_api import TrainerAPI, TrainerInfo
from lockstep.train.trainer_kinds import trainer_kind
from lockstep.train.trainer_protocol import StepStats, Trainer
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)


class TrainerService(TrainerAPI):
    """One rank of the trainer.

    Args:
        role: the `TrainRole`, as `model_dump(mode="json")` returns it; its name is the prefix of the store's keys.
        rank, world: number of this rank, and number of all ranks of the role.
        store_host, store_port: the store for the rendezvous of two or more ranks.
        generation: generation of the run.
        restarts: number of earlier starts of this role in this generation; each start uses its own keys.
        device: `cpu`, `cuda` or `cuda:1`; `auto` uses a GPU if there is one.
    """

    def __init__(
        self,
        role: dict[str, Any],
        rank: int = 0,
        world: int = 1,
        store_host: str | None = None,
        store_port: int | None = None,
        run_folder: str = ".",
        device: str = "auto",
        generation: int = 1,
        restarts: int = 0,
    ) -> None:
        self.role = TrainRole.model_validate(role)
        self.rank, self.world, self.generation, self.restarts = rank, world, generation, restarts
        self.run_folder = Path(run_folder)
        self.store = None if store_host is None or store_port is None else (store_host, store_port)
        self.device = choose_device(device, rank)
        self._trainer: Trainer | None = None
        self._info: TrainerInfo | None = None
        self._memory: MemoryCheckpoints | None = None
        if self.role.trainer.malloc == "tuned":
            tune_malloc()
        torch.set_num_threads(self.role.trainer.threads or max(1, (os.cpu_count() or 1) // world))

    def setup(self, names: list[str] | None = None) -> TrainerInfo:
        """Joins the other ranks and loads the model.

        Args:
            names: names and nodes of all ranks, to report which are missing.
        """
        if self._info is not None:
            return self.info()
        current_beacon().stage("setup")
        ranks = join_ranks(
            self.rank,
            self.world,
            self.device,
            self.store,
            prefix=f"gen{self.generation}/{self.role.name}/{self.restarts}",
            timeout_s=self.role.trainer.collective_timeout_s,
            replicas=self.role.trainer.replicas,
            fallback=self.role.communication.fallback,
            names=names or (),
        )
        torch.manual_seed(self.role.seed * self.world + self.rank)
        with naming_fields_in(self.role.section):
            self._trainer = trainer = trainer_kind(self.role).create(self.role, ranks, self.generation)
            packing, reason = self._packing(trainer)
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

    def export(self, folder: str) -> None:
        current_beacon().stage("export")
        self.trainer.export(Path(folder))

    def export_adapter(self, folder: str) -> None:
        current_beacon().stage("export")
        self.trainer.export_adapter(Path(folder))

    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        self.trainer.offload(parameters, optimizer)

    def onload(self) -> None:
        self.trainer.onload()

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def _memory_checkpoints(self, folder: str) -> MemoryCheckpoints:
        if self._memory is None:
            self._memory = MemoryCheckpoints(Path(folder), self.rank, self.world)
        return self._memory

    def _packing(self, trainer: Trainer) -> tuple[PackingMode, str]:
        """Returns the configured packing, or else the densest one that the model computes correctly, and the reason."""
        chosen = self.role.model.packing
        if chosen != "auto":
            return chosen, f"set by {self.role.field('model.packing')}"
        probed = trainer.probe_packing()
        return probed.mode, probed.reason


def choose_device(name: str, rank: int) -> torch.device:
    """Resolves a device name: `auto` is the rank's own GPU if the host has GPUs, else the CPU; `cuda` is the rank's
    own.

    Raises:
        ValueError: this host does not have that GPU.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    index = rank % max(count, 1) if device.type == name else device.index
    if index >= count:
        raise ValueError(
            f"device {name!r} was requested for rank {rank}, but this host has {count} GPUs; set cluster.device"
        )
    return torch.device("cuda", index)
