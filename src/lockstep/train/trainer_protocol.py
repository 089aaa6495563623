"""What every trainer can do, seen from inside one rank, and the types of what it returns."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.config.algorithm import CrossEntropy, PolicyLoss
from lockstep.data.micro_batch import MicroBatch

if TYPE_CHECKING:
    from lockstep.models.packing_probe import PackingProbeResult
    from lockstep.train.memory_checkpoint import MemoryCheckpoints

EvaluateOutput = Literal["logprobs", "entropy", "reference_logprobs"]


@dataclass(slots=True)
class StepStats:
    """Metrics of one optimizer step, already reduced over the ranks in one fixed vector."""

    values: dict[str, float]


@dataclass(slots=True)
class ParameterInfo:
    """One weight of the policy, tied ones once; an adapter is merged into them."""

    name: str
    """The name in Hugging Face checkpoints."""
    shape: tuple[int, ...]
    dtype: str
    """The master weights', e.g. `float32`."""


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
    A rank beyond the last row holds no rows and yields no shard."""
    constant: bool = False
    """Whether it is the same in every version, as weights without an adapter are beside adapted ones."""


BucketWeights = Sequence[tuple[str, torch.dtype]]
"""Names of weights, and the precision in which they leave the trainer."""
GatheredRows = dict[str, list[Tensor]]
"""By name, the rows of all ranks in their order, uint8 `[bytes]` each."""


class Trainer(Protocol):
    """One rank of a trainer. Every rank gets the same sequence of calls with the same number of micro-batches,
    so that the schedule of collectives is a constant of the step."""

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
        """Optimizer steps behind the weights."""

    def parameters(self) -> list[ParameterInfo]:
        """Every weight that goes to engines."""

    def probe_packing(self) -> "PackingProbeResult":
        """How rows may be packed for the model. All ranks call it."""

    def evaluate(
        self, microbatches: Sequence[MicroBatch[np.ndarray]], outputs: Sequence[EvaluateOutput]
    ) -> list[dict[str, np.ndarray]]:
        """Per micro-batch the requested values, float32 `[targets]`, without gradients."""

    def step(self, microbatches: Sequence[MicroBatch[np.ndarray]], loss: PolicyLoss | CrossEntropy) -> StepStats:
        """Accumulates gradients over the micro-batches, clips them and takes one optimizer step.

        Raises:
            NonFinite: on all ranks alike, before any weight is changed.
        """

    def shards(self) -> Iterator[ParameterShard]:
        """This rank's rows of every weight, merged with the adapter. All ranks call it."""

    def gather_weights(self, buckets: Sequence[BucketWeights], everyone: bool) -> Iterator[GatheredRows | None]:
        """Every weight, merged with the adapter, bucket by bucket: on each rank, or on the first alone (None
        elsewhere).

        All ranks call it and consume all buckets.
        """

    def save(self, folder: Path) -> None:
        """Begins writing parameters, optimizer, schedule and random state into `folder`."""

    def saved(self) -> bool:
        """Whether the last `save` is complete on disk (fsync included); raises CheckpointError if it failed."""

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, with any number of ranks. Raises CheckpointError."""

    def save_to_memory(self, checkpoints: "MemoryCheckpoints", version: int) -> None:
        """Copies what a checkpoint holds into shared memory. Raises SharedMemoryFull."""

    def load_from_memory(self, checkpoints: "MemoryCheckpoints", version: int) -> None:
        """Continues from a memory checkpoint of as many ranks. Raises MemoryCheckpointMissing."""

    def export(self, folder: Path) -> None:
        """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads, an adapter merged."""

    def export_adapter(self, folder: Path) -> None:
        """Writes a folder that peft's `PeftModel.from_pretrained` loads. Raises ValueError without an adapter."""

    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        """Moves parameters, optimizer state or both to host memory."""

    def onload(self) -> None:
        """Moves them back to the device."""

    def close(self) -> None:
        """Ends the save in progress and leaves the communicators. Raises CheckpointError."""
