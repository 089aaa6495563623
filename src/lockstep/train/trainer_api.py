"""The remote calls that the controller makes to the trainer's ranks. They carry no tensors of the model.

`lockstep.train.trainer_service.TrainerService` implements them, one per rank; `lockstep.run.policy_service` adds the
calls about weights and is the service that the controller starts. Every call except `saved` goes to all ranks in the
same order, because the ranks enter collectives in it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.config.algorithm import TrainerOutput
from lockstep.data.micro_batch import EncodedMicroBatches
from lockstep.data.packing import PackingMode
from lockstep.train.trainer_protocol import ParameterInfo, StepStats


@dataclass(slots=True, kw_only=True)
class RankInfo:
    """What a rank of a trained or served model reports after its setup."""

    rank: int
    world: int
    device: str
    compute_dtype: str
    """Precision of forward and backward, e.g. `bfloat16`; the engines use the policy's."""
    packing: PackingMode
    packing_reason: str
    context_length: int
    slower: str = ""
    """Why the collectives run on gloo although NCCL was expected, and what they cost; empty if they run as expected."""


@dataclass(slots=True, kw_only=True)
class TrainerInfo(RankInfo):
    """What a rank of a trained model reports after its setup."""

    parameters: list[ParameterInfo]
    reference: bool
    """Whether there is a reference: a separate model, or the policy without its adapter."""
    optimizer_step: int
    """Optimizer steps taken so far: 0, or those of the loaded checkpoint."""
    has_new_head: bool = False
    """Whether the model has a new score head, because it was loaded from a language model's checkpoint."""


class TrainerAPI(ABC):
    """The calls to one rank."""

    @abstractmethod
    def setup(self, names: list[str] | None = None) -> TrainerInfo:
        """Joins the communicator and loads the model. Raises a ValueError, such as ModelError, if it cannot be loaded.

        Args:
            names: the name and node of every rank, for the error about ranks that do not join.
        """

    @abstractmethod
    def info(self) -> TrainerInfo:
        """Returns what `setup` returned, with the current optimizer step."""

    @abstractmethod
    def evaluate(self, microbatches: EncodedMicroBatches, outputs: list[TrainerOutput]) -> list[dict[str, np.ndarray]]:
        """Returns the requested values of each micro-batch, float32 `[targets]`, computed without gradients."""

    @abstractmethod
    def step(self, microbatches: EncodedMicroBatches) -> StepStats:
        """Takes one optimizer step on the role's objective. Raises NonFinite if the loss or a gradient is not finite;
        then no weight changed."""

    @abstractmethod
    def save(self, folder: str) -> None:
        """Begins to write a checkpoint, which appears as `folder` when it is complete.

        Waits for an earlier save to end, then returns as soon as the weights are copied, so that training can
        continue. Raises CheckpointError if the earlier save failed.
        """

    @abstractmethod
    def saved(self) -> bool:
        """Returns whether the last save is complete on disk, with the parts of all ranks. Raises CheckpointError if it
        failed on a rank."""

    @abstractmethod
    def load(self, folder: str) -> int:
        """Loads a complete checkpoint, written by any number of ranks, and returns its optimizer step. Raises
        CheckpointError if it is incomplete or of another model."""

    @abstractmethod
    def save_to_memory(self, folder: str, version: int) -> None:
        """Copies the content of a checkpoint into shared memory in `folder`. Raises SharedMemoryFull, or
        TrainerUnsupported if this kind of trainer writes no memory checkpoints."""

    @abstractmethod
    def load_from_memory(self, folder: str, version: int) -> int:
        """Loads a memory checkpoint, written by the same number of ranks, and returns its optimizer step. Raises
        MemoryCheckpointMissing."""

    @abstractmethod
    def export(self, folder: str, added: dict[str, Any] | None = None) -> None:
        """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads (with a score head:
        `AutoModelForSequenceClassification`). An adapter is merged into the weights.

        Args:
            added: values to add to the model's config.
        """

    @abstractmethod
    def export_adapter(self, folder: str) -> None:
        """Writes a folder that peft's `PeftModel.from_pretrained` loads. Raises ValueError without an adapter."""

    @abstractmethod
    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        """Moves parameters, optimizer state or both to host memory. Raises TrainerUnsupported if this kind of trainer
        cannot."""

    @abstractmethod
    def onload(self) -> None:
        """Moves parameters and optimizer state back to the device."""

    @abstractmethod
    def close(self) -> None:
        """Ends background work and leaves the communicator."""
