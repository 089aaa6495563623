"""The trainer's worker process: one rank, driven by remote calls of the controller."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import TypeAdapter

from lockstep.cluster.rpc.worker_main import tune_malloc
from lockstep.config.algorithm import Loss
from lockstep.config.recipes import RecipeConfig
from lockstep.data.micro_batch import EncodedMicroBatches
from lockstep.models.model_loader import context_length
from lockstep.models.packing_probe import probe_packing
from lockstep.train.api import ParameterInfo, TrainerAPI, TrainerInfo
from lockstep.train.distributed import join_ranks
from lockstep.train.fsdp import FSDP2Trainer
from lockstep.train.memory_checkpoint import MemoryCheckpoints
from lockstep.train.parallelize import free_gathered
from lockstep.train.trainer_protocol import EvaluateOutput, StepStats
from lockstep.watch.beacon import writer

log = logging.getLogger(__name__)

_CONFIG_ADAPTER: TypeAdapter[RecipeConfig] = TypeAdapter(RecipeConfig)
_LOSS_ADAPTER: TypeAdapter[Loss] = TypeAdapter(Loss)


class TrainerService(TrainerAPI):
    """One rank of the trainer.

    Args:
        config: of the run, resolved, as `model_dump(mode="json")`.
        rank, world: among the ranks of this role.
        store_host, store_port: of the store at which two or more ranks meet.
        generation: of the run.
        life: how often this role was started before in it; a restarted one meets under keys of its own.
        device: `cpu`, `cuda` or `cuda:1`; `auto` takes a GPU where there is one.
        role: prefix of the store's keys.
    """

    def __init__(
        self,
        config: dict[str, Any],
        rank: int = 0,
        world: int = 1,
        store_host: str | None = None,
        store_port: int | None = None,
        run_folder: str = ".",
        device: str = "auto",
        generation: int = 1,
        role: str = "policy",
        life: int = 0,
    ) -> None:
        self.config = _CONFIG_ADAPTER.validate_python(config)
        self.rank, self.world, self.generation, self.role, self.life = rank, world, generation, role, life
        self.run_folder = Path(run_folder)
        self.store = None if store_host is None or store_port is None else (store_host, store_port)
        self.device = choose_device(device, rank)
        self._trainer: FSDP2Trainer | None = None
        self._info: TrainerInfo | None = None
        self._copies: MemoryCheckpoints | None = None
        if self.config.trainer.malloc == "tuned":
            tune_malloc()
        torch.set_num_threads(self.config.trainer.threads or max(1, (os.cpu_count() or 1) // world))

    def setup(self, names: list[str] | None = None) -> TrainerInfo:
        """Joins the other ranks, whose names and nodes are told, and loads the model."""
        if self._info is not None:
            return self.info()
        writer.current_beacon().stage("setup")
        ranks = join_ranks(
            self.rank,
            self.world,
            self.device,
            self.store,
            prefix=f"gen{self.generation}/{self.role}/{self.life}",
            timeout_s=self.config.trainer.collective_timeout_s,
            replicas=self.config.trainer.replicas,
            fallback=self.config.communication.fallback,
            names=names or (),
        )
        torch.manual_seed(self.config.seed * self.world + self.rank)
        self._trainer = trainer = FSDP2Trainer(self.config, ranks, self.generation)
        packing, reason = self._packing(trainer)
        self._info = TrainerInfo(
            rank=self.rank,
            world=self.world,
            device=str(self.device),
            compute_dtype=str(trainer.compute).removeprefix("torch."),
            parameters=[
                ParameterInfo(name, trainer.outgoing.shape(name), str(parameter.dtype).removeprefix("torch."))
                for name, parameter in trainer.outgoing.weights.items()
            ],
            packing=packing,
            packing_reason=reason,
            context_length=self.config.model.max_length or context_length(trainer.policy.config),
            reference=trainer.has_reference,
            optimizer_step=0,
            slower=ranks.slower,
        )
        log.info("rank %d of %d is ready on %s, packing %s: %s", self.rank, self.world, self.device, packing, reason)
        return self._info

    def info(self) -> TrainerInfo:
        if self._info is None:
            raise RuntimeError("the trainer is not set up; call setup() first")
        return replace(self._info, optimizer_step=self.trainer.optimizer.steps)

    @property
    def trainer(self) -> FSDP2Trainer:
        """What `setup` made."""
        if self._trainer is None:
            raise RuntimeError("the trainer is not set up; call setup() first")
        return self._trainer

    def evaluate(self, hand: EncodedMicroBatches, want: list[EvaluateOutput]) -> list[dict[str, np.ndarray]]:
        writer.current_beacon().stage("evaluate")
        return self.trainer.evaluate(hand.rows(), want)

    def step(self, hand: EncodedMicroBatches, loss: dict[str, Any]) -> StepStats:
        writer.current_beacon().stage("train")
        return self.trainer.step(hand.rows(), _LOSS_ADAPTER.validate_python(loss))

    def save(self, folder: str) -> None:
        writer.current_beacon().stage("save")
        self.trainer.save(Path(folder))

    def saved(self) -> bool:
        return self.trainer.saved()

    def load(self, folder: str) -> int:
        writer.current_beacon().stage("load")
        self.trainer.load(Path(folder))
        return self.trainer.optimizer.steps

    def copy_state(self, folder: str, version: int) -> None:
        writer.current_beacon().stage("copy")
        self.trainer.copy_state(self._copies_in(folder), version)

    def load_copy(self, folder: str, version: int) -> int:
        writer.current_beacon().stage("load")
        self.trainer.load_copy(self._copies_in(folder), version)
        return self.trainer.optimizer.steps

    def export(self, folder: str) -> None:
        writer.current_beacon().stage("export")
        self.trainer.export(Path(folder))

    def export_adapter(self, folder: str) -> None:
        writer.current_beacon().stage("export")
        self.trainer.export_adapter(Path(folder))

    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        self.trainer.offload(parameters, optimizer)

    def onload(self) -> None:
        self.trainer.onload()

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def _copies_in(self, folder: str) -> MemoryCheckpoints:
        if self._copies is None:
            self._copies = MemoryCheckpoints(Path(folder), self.rank, self.world)
        return self._copies

    def _packing(self, trainer: FSDP2Trainer) -> tuple[Literal["forest", "block", "single"], str]:
        """The configured packing, or what the probe finds the model to compute correctly."""
        chosen = self.config.model.packing
        if chosen != "auto":
            return chosen, "model.packing says so"
        found = probe_packing(trainer.policy, trainer.compute)
        free_gathered(trainer.policy)
        return found.mode, found.reason


def choose_device(name: str, rank: int) -> torch.device:
    """`auto` is the rank's own GPU where the host has GPUs, else the CPU; a bare `cuda` is the rank's own.

    Raises:
        ValueError: a GPU is asked for that this host does not have.
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
            f"device {name!r} was asked for rank {rank}, but this host has {count} GPUs; set cluster.device"
        )
    return torch.device("cuda", index)
