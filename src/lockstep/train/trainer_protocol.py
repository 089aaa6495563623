"""What every trainer can do, seen from inside one rank, and what it gives away: parameter shards, gathered buckets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.config.algorithm import CrossEntropy, PolicyLoss
from lockstep.data.micro_batch import MicroBatch


@dataclass(slots=True)
class ParameterShard:
    """A rank's rows of one parameter."""

    name: str
    """The parameter's name in Hugging Face checkpoints; tied weights appear once, under the first name."""
    global_shape: tuple[int, ...]
    offset: int
    """Index of the first row that this rank holds."""
    tensor: Tensor
    """`[rows, ...]` in the master precision, a view of the trainer's memory: copy it before the next step.
    A rank beyond the last row has none and yields no shard."""
    constant: bool = False
    """Whether it is the same in every version, as what an adapter does not reach is."""


BucketWeights = Sequence[tuple[str, torch.dtype]]
"""Names of weights and the types in which they leave."""
GatheredRows = dict[str, list[Tensor]]
"""By name, the rows of all ranks in their order, uint8 `[bytes]` each."""


EvaluateOutput = Literal["logprobs", "entropy", "reference_logprobs"]


@dataclass(slots=True)
class StepStats:
    """Metrics of one optimizer step, already reduced over the ranks in one fixed vector."""

    values: dict[str, float]


class Trainer(Protocol):
    """One rank of a trainer. Every rank gets the same sequence of calls with the same number of micro-batches,
    so that the schedule of collectives is a constant of the step."""

    def evaluate(
        self, microbatches: Sequence[MicroBatch], want: Sequence[EvaluateOutput]
    ) -> list[dict[str, np.ndarray]]:
        """Per micro-batch the wanted values, float32 `[targets]`, without gradients."""

    def step(self, microbatches: Sequence[MicroBatch], loss: PolicyLoss | CrossEntropy) -> StepStats:
        """Accumulates gradients over the micro-batches, clips, takes one optimizer step."""

    def save(self, folder: Path) -> None:
        """Begins writing parameters, optimizer and schedule into `folder` (asynchronously where it can)."""

    def saved(self) -> bool:
        """Whether the last `save` is complete on disk (fsync included); raises what it raised."""

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, also with another number of ranks."""

    def export(self, folder: Path) -> None:
        """Writes a folder that `AutoModelForCausalLM.from_pretrained` loads, an adapter merged."""

    def export_adapter(self, folder: Path) -> None:
        """Writes a folder that peft's `PeftModel.from_pretrained` loads."""

    def offload(self, parameters: bool = True, optimizer: bool = True) -> None: ...

    def onload(self) -> None: ...
