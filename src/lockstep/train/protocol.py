"""What every trainer can do, seen from inside one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from lockstep.config.algorithm import CrossEntropy, PolicyLoss
from lockstep.data.batch import Packed

Want = Literal["logprobs", "entropy", "reference_logprobs"]


@dataclass(slots=True)
class StepStats:
    """Metrics of one optimizer step, already reduced over the ranks in one fixed vector."""

    values: dict[str, float]


class Trainer(Protocol):
    """One rank of a trainer. Every rank gets the same sequence of calls with the same number of micro-batches,
    so that the schedule of collectives is a constant of the step."""

    def evaluate(self, microbatches: Sequence[Packed], want: Sequence[Want]) -> list[dict[str, np.ndarray]]:
        """Per micro-batch the wanted values, float32 `[targets]`, without gradients."""

    def step(self, microbatches: Sequence[Packed], loss: PolicyLoss | CrossEntropy) -> StepStats:
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
