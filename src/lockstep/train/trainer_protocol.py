"""The protocol of a trainer within one rank, and the types of its results."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.config.algorithm import TrainerOutput
from lockstep.data.micro_batch import MicroBatch

if TYPE_CHECKING:
    from lockstep.models.packing_probe import PackingProbeResult
    from lockstep.train.checkpoints.memory_checkpoint import MemoryCheckpoints


UNKNOWN_S = -1.0


class RankLoad(NamedTuple):
    """What a rank had to do in an optimizer step, until it exchanged its metrics. `UNKNOWN_S` where it cannot tell."""

    work_s: float
    """Seconds outside of blocking collectives."""
    blocked_s: float
    """Seconds in blocking collectives: waiting for other ranks, or moving data."""
    memory: float
    """Bytes: of a GPU, the most that tensors have taken; of a process on the CPU, its memory at the end of the step."""


@dataclass(slots=True)
class StepStats:
    """The result of one optimizer step."""

    values: dict[str, float]
    """Metrics, reduced over all ranks, so that each rank has the same: those of the objective, `grad_norm` (the global
    norm before clipping), and `lr` (the rate of this step)."""
    loads: list[RankLoad] = field(default_factory=list)
    """Those of all ranks; only rank 0 returns them: thousands of ranks would send thousands of times the same."""


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
    """`[rows, ...]` in the master precision. It may be a view of the trainer's memory: copy it before the next call."""
    constant: bool = False
    """Whether the rows are the same in every version, because only an adapter of other weights is trained."""


BucketWeights = Sequence[tuple[str, torch.dtype]]
"""Names of weights, and the precision in which they leave the trainer."""
GatheredRows = dict[str, list[Tensor]]
"""By name, all rows of a weight in order, in one or more pieces (such as one of each rank), uint8 `[bytes]` each."""


class Trainer(Protocol):
    """One rank of a trainer: a model, its optimizer, and a reference if the objective needs one.

    `lockstep.train.trainer_service.TrainerService` drives it by the calls of the controller. Every rank gets the same
    sequence of calls, with the same number of micro-batches; `saved` is the exception. All methods may enter
    collectives, and which ones does not depend on a rank's data. `save` returns before its files are written, so its
    collectives have a communicator of their own (`ParallelContext.storage`).

    Waits are those of `lockstep.base.waits`, and the beacon gets the progress of `evaluate` and `step`, so that a rank
    that makes no progress is noticed.

    Some kinds of trainers lack memory checkpoints, offloading or adapters. Then the planner's `check` (or None as its
    `memory_checkpoint`) refuses the settings, and the methods raise TrainerUnsupported.
    """

    @property
    def compute_dtype(self) -> torch.dtype:
        """Precision of forward and backward."""

    @property
    def has_reference(self) -> bool:
        """Whether `reference_logprobs` can be evaluated."""

    @property
    def has_new_head(self) -> bool:
        """Whether the model has a score head that its checkpoint lacks."""

    @property
    def context_length(self) -> int:
        """The longest sequence of the model, in tokens."""

    @property
    def optimizer_step(self) -> int:
        """Number of optimizer steps taken, also those before a loaded checkpoint."""

    def parameters(self) -> list[ParameterInfo]:
        """Returns every weight that engines receive, the same on all ranks."""

    def probe_packing(self) -> "PackingProbeResult":
        """Finds out how rows may be packed for the model."""

    def evaluate(
        self, microbatches: Sequence[MicroBatch[np.ndarray]], outputs: Sequence[TrainerOutput]
    ) -> list[dict[str, np.ndarray]]:
        """Computes the requested values of each micro-batch, float32 `[targets]`, without gradients.

        Raises:
            ValueError: reference log-probabilities are requested and there is no reference.
        """

    def step(self, microbatches: Sequence[MicroBatch[np.ndarray]]) -> StepStats:
        """Takes one optimizer step on the sum of the losses of all targets of all ranks, with gradients clipped to
        `max_grad_norm`. Gradients are added, not averaged: the weights of the targets include the denominators.

        Raises:
            ValueError: there are no micro-batches, or a field that the loss needs is missing; raised before any
                collective.
            NonFinite: the loss or a gradient is not finite; raised on all ranks. No weight and no optimizer state was
                changed, and the next step may follow.
            CollectiveStalled: the node agent has aborted this rank's collectives; no weight was changed.
        """

    def shards(self) -> Iterator[ParameterShard]:
        """Yields rows of weights, merged with the adapter. Together, the ranks yield each row of each weight once.
        Ranks may yield different numbers of shards, or none, so no collective follows the first one."""

    def gather_weights(self, buckets: Sequence[BucketWeights], everyone: bool) -> Iterator[GatheredRows | None]:
        """Yields every weight, merged with the adapter, bucket by bucket: on every rank if `everyone`, else only on the
        first (None elsewhere). All ranks consume all buckets."""

    def save(self, folder: Path) -> None:
        """Waits for an earlier save, and begins to write everything that a resumed run needs, as it is now, so that
        the next steps are bitwise those that would have followed: trained parameters, optimizer, schedule step, random
        state.

        `folder` appears when it is complete and synced; one of this name is replaced. Until then, the files are in
        folders beside it that are named `<folder>.tmp-...`, which the controller deletes after a crash.

        Raises:
            CheckpointError: the earlier save failed, and `saved` has not reported it yet.
        """

    def saved(self) -> bool:
        """Returns whether no save is in progress: the last one is complete, with the parts of all ranks. Raises
        CheckpointError, once and on every rank, if a rank could not write its part; nothing is left of it then."""

    def load(self, folder: Path) -> None:
        """Loads a checkpoint that any number of ranks wrote.

        Raises:
            CheckpointError: the checkpoint is incomplete or belongs to another model; nothing was changed.
        """

    def save_to_memory(self, checkpoints: "MemoryCheckpoints", version: int) -> None:
        """Copies the content of a checkpoint into shared memory. Raises SharedMemoryFull, TrainerUnsupported."""

    def load_from_memory(self, checkpoints: "MemoryCheckpoints", version: int) -> None:
        """Loads a memory checkpoint that the same number of ranks wrote. Raises MemoryCheckpointMissing,
        TrainerUnsupported."""

    def export(self, folder: Path, added: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads (with a score head:
        `AutoModelForSequenceClassification`), with a merged adapter. It appears when it is complete. Raises
        CheckpointError, possibly only on the rank that could not write.

        Args:
            added: values to add to the model's config.
        """

    def export_adapter(self, folder: Path) -> None:
        """Writes a folder that peft's `PeftModel.from_pretrained` loads. Raises ValueError without an adapter."""

    def offload(self, parameters: bool = True, optimizer: bool = True) -> None:
        """Moves parameters, optimizer state or both to host memory. Until `onload`, weights can be published and
        checkpoints saved; `evaluate`, `step` and `load` are not called. Raises TrainerUnsupported."""

    def onload(self) -> None:
        """Moves parameters and optimizer state back to the device."""

    def close(self) -> None:
        """Ends the save in progress and leaves the communicators. Raises CheckpointError."""
