"""The trainer as the controller sees it: typed remote calls without tensors of the model.

The service behind it is `lockstep.train.trainer_service:TrainerService`, one per rank. Every call but `saved` goes to
all ranks in the same order, because the ranks enter collectives inside.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.data.micro_batch import EncodedMicroBatches
from lockstep.data.packing import PackingMode
from lockstep.train.trainer_protocol import EvaluateOutput, ParameterInfo, StepStats

TRAINER_SERVICE = "lockstep.train.trainer_service:TrainerService"
"""The value of `WorkerSpec.service`."""

TRAINER_PRELOAD = ("torch", "transformers", "lockstep.train.trainer_service")
"""Modules that the fork server imports before it forks trainer ranks."""


@dataclass(slots=True)
class TrainerInfo:
    """A rank after its setup."""

    rank: int
    world: int
    device: str
    compute_dtype: str
    """Precision of forward and backward, e.g. `bfloat16`; the engine serves this one."""
    parameters: list[ParameterInfo]
    packing: PackingMode
    packing_reason: str
    context_length: int
    reference: bool
    """Whether there is a reference: a model of its own, or the policy without its adapter."""
    optimizer_step: int
    """Optimizer steps behind the weights: 0, or a loaded checkpoint's."""
    slower: str = ""
    """Why the collectives run on gloo although NCCL was expected, and what they cost; else empty."""


class TrainerAPI(ABC):
    """Signatures of one rank's calls."""

    @abstractmethod
    def setup(self, names: list[str] | None = None) -> TrainerInfo:
        """Joins the communicator and loads the model. `names` of all ranks with their nodes identify ranks that do not
        come. Raises ValueErrors such as ModelError for what cannot be loaded."""

    @abstractmethod
    def info(self) -> TrainerInfo:
        """What `setup` returned, with the current optimizer step."""

    @abstractmethod
    def evaluate(self, microbatches: EncodedMicroBatches, outputs: list[EvaluateOutput]) -> list[dict[str, np.ndarray]]:
        """Per micro-batch the requested values, float32 `[targets]`, without gradients."""

    @abstractmethod
    def step(self, microbatches: EncodedMicroBatches, loss: dict[str, Any]) -> StepStats:
        """One optimizer step; `loss` is the config's, as `model_dump(mode="json")`. Raises NonFinite before weights
        are touched."""

    @abstractmethod
    def save(self, folder: str) -> None:
        """Begins a checkpoint that appears under `folder` when it is complete; returns once the weights are copied,
        so that training can continue. Waits first for an earlier save to end. Raises CheckpointError."""

    @abstractmethod
    def saved(self) -> bool:
        """Whether the last save is complete, durable and visible, with the parts of all ranks; raises CheckpointError
        if it failed on any."""

    @abstractmethod
    def load(self, folder: str) -> int:
        """Loads a complete checkpoint of any number of ranks; returns the optimizer step behind it. Raises
        CheckpointError for an incomplete one or one of another model."""

    @abstractmethod
    def save_to_memory(self, folder: str, version: int) -> None:
        """Copies what a checkpoint holds into shared memory in `folder`. Raises SharedMemoryFull."""

    @abstractmethod
    def load_from_memory(self, folder: str, version: int) -> int:
        """Loads a memory checkpoint of as many ranks; returns the optimizer step behind it. Raises
        MemoryCheckpointMissing."""

    @abstractmethod
    def export(self, folder: str) -> None:
        """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads, an adapter merged."""

    @abstractmethod
    def export_adapter(self, folder: str) -> None:
        """Writes a folder that peft's `PeftModel.from_pretrained` loads. Raises ValueError without an adapter."""

    @abstractmethod
    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        """Moves parameters, optimizer state or both to host memory."""

    @abstractmethod
    def onload(self) -> None:
        """Moves them back to the device."""

    @abstractmethod
    def close(self) -> None:
        """Ends background work and leaves the communicator."""
