"""Forward passes of an evaluation that the next optimizer step continues, instead of computing them again.

No weight changes between the evaluation of a step and its first update: a critic's values before the update are those
of its forward pass in the update. What is kept are the tensors for the backward pass, so it costs memory, and changes
no bit of a gradient.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
from torch import Tensor

from lockstep.config.algorithm import ModelOutput
from lockstep.config.train_role import TrainRole
from lockstep.data.micro_batch import MicroBatch
from lockstep.train.objective import Objective
from lockstep.train.router_objective import ROUTER_METRICS

Outputs = Mapping[ModelOutput, Tensor]
"""A model's outputs for the targets of a micro-batch, `[targets]` each, with their graph."""


class KeptForward:
    """The forward passes of the first micro-batches of an evaluation.

    Args:
        most: the number of micro-batches whose passes may be kept; each needs the memory of its activations.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._passes: list[tuple[MicroBatch[np.ndarray], Outputs]] = []
        """The last one belongs to the first micro-batch: it is computed last, and its backward pass comes first."""

    @classmethod
    def of(cls, role: TrainRole, objective: Objective) -> "KeptForward":
        """As the role says; none if routers are recorded, which happens in the forward passes of a step."""
        return cls(0 if objective.metrics.keys() & ROUTER_METRICS.keys() else role.kept_microbatches)

    def add(self, microbatch: MicroBatch[np.ndarray], outputs: Outputs) -> None:
        """Keeps a pass. Those of later micro-batches must have been added before."""
        self._passes.append((microbatch, outputs))

    def match(self, microbatches: Sequence[MicroBatch[np.ndarray]]) -> None:
        """Releases all passes unless they are those of the first of these micro-batches."""
        rows = [microbatch for microbatch, _ in reversed(self._passes)]
        found = list(islice(microbatches, len(rows)))
        if len(found) < len(rows) or not all(map(_same_row, rows, found)):
            self.clear()

    def pop(self) -> Outputs | None:
        """Returns the outputs of the next micro-batch, the first one first; None if they are not kept."""
        return self._passes.pop()[1] if self._passes else None

    def clear(self) -> None:
        """Releases all passes. To be called whenever weights change or leave the device."""
        self._passes.clear()


def _same_row(a: MicroBatch[np.ndarray], b: MicroBatch[np.ndarray]) -> bool:
    """Whether two micro-batches have the same forward pass, whatever their fields are."""
    names = "tokens", "lengths", "parents", "sources", "targets"
    same = all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)
    return same and _digests(a) == _digests(b)


def _digests(row: MicroBatch[np.ndarray]) -> list[str] | None:
    return None if row.images is None else [image.digest for image in row.images]
