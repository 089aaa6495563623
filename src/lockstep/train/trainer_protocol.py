"""The protocol of a trainer within one rank, and the types of its results."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.config.algorithm import TrainerOutput
from lockstep.data.micro_batch import MicroBatch

if TYPE_CHECKING:
    from lockstep.models.packing_probe import PackingProbeResult
    from lockstep.train.memory_checkpoint import MemoryCheckpoints


@dataclass(slots=True)
class StepStats:
    """Metrics of one optimizer step, reduced over all ranks."""

    values: dict[str, float]


@dataclass(slots=True)
class ParameterInfo:
    """One weight of the policy. Tied weights are listed once; adapters are merged into the weights."""

    name: str
    """The name in Hugging Face checkpoints."""
    shape: tuple[int, ...]
    dtype: str
    """Precision of the master weights, e.g. `float32`."""


@dataclass(slots=True)
class ParameterShard:
    """A rank's rows of one parameter."""

    name: str
    """The name in Hugging Face checkpoints; tied weights appear once, under the first name."""
    global_shape: tuple[int, ...]
    offset: int
    """Index of the first row that this rank holds."""
    tensor: Tensor
    """`[rows, ...]` in the master precision, a view of the trainer's memory: copy it before the next step.
    A rank without rows yields no shard."""
    constant: bool = False
    """Whether the rows are the same in every version, because only an adapter of other weights is trained."""


BucketWeights = Sequence[tuple[str, torch.dtype]]
"""Names of weights, and the precision in which they leave the trainer."""
GatheredRows = dict[str, list[Tensor]]
"""Rows of all ranks in the order of the ranks, by name, uint8 `[bytes]` each."""


class Trainer(Protocol):
    """One rank of a trainer. Every rank gets the same sequence of calls with the same number of micro-batches,
    so that all ranks enter the same collectives."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """Precision of forward and backward."""

    @property
    def has_reference(self) -> bool:
        """Whether `reference_logprobs` can be evaluated."""

    @property
    def context_length(self) -> int:
        """The longest sequence of the model, in tokens."""

    @property
    def optimizer_step(self) -> int:
        """Number of optimizer steps taken, also those before a loaded checkpoint."""

    def parameters(self) -> list[ParameterInfo]:
        """Returns every weight that engines receive."""

    def probe_packing(self) -> "PackingProbeResult":
        """Finds out how rows may be packed for the model. All ranks call it."""

    def evaluate(
        self, microbatches: Sequence[MicroBatch[np.ndarray]], outputs: Sequence[TrainerOutput]
    ) -> list[dict[str, np.ndarray]]:
        """Computes the requested values of each micro-batch, float32 `[targets]`, without gradients."""

    def step(self, microbatches: Sequence[MicroBatch[np.ndarray]]) -> StepStats:
        """Accumulates the gradients of the role's objective over the micro-batches, clips them and takes one optimizer
        step.

        Raises:
            NonFinite: the loss or a gradient is not finite; raised on all ranks, before any weight is changed.
        """

    def shards(self) -> Iterator[ParameterShard]:
        """Yields this rank's rows of every weight, merged with the adapter. All ranks call it."""

    def gather_weights(self, buckets: Sequence[BucketWeights], everyone: bool) -> Iterator[GatheredRows | None]:
        """Yields every weight, merged with the adapter, bucket by bucket: on every rank if `everyone`, else only on the
        first (None elsewhere).

        All ranks call it and consume all buckets.
        """

    def save(self, folder: Path) -> None:
        """Begins to write trained parameters, optimizer, schedule step and random state into `folder`."""

    def saved(self) -> bool:
        """Returns whether the last `save` is complete on disk (synced). Raises CheckpointError if it failed."""

    def load(self, folder: Path) -> None:
        """Loads a checkpoint that any number of ranks wrote. Raises CheckpointError."""

    def save_to_memory(self, checkpoints: "MemoryCheckpoints", version: int) -> None:
        """Copies the content of a checkpoint into shared memory. Raises SharedMemoryFull."""

    def load_from_memory(self, checkpoints: "MemoryCheckpoints", version: int) -> None:
        """Loads a memory checkpoint that the same number of ranks wrote. Raises MemoryCheckpointMissing."""

    def export(self, folder: Path) -> None:
        """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads, with a merged adapter."""

    def export_adapter(self, folder: Path) -> None:
        """Writes a folder that peft's `PeftModel.from_pretrained` loads. Raises ValueError without an adapter."""

    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        """Moves parameters, optimizer state or both to host memory."""

    def onload(self) -> None:
        """Moves parameters and optimizer state back to the device."""

    def close(self) -> None:
        """Ends the save in progress and leaves the communicators. Raises CheckpointError."""
