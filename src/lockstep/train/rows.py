"""A micro-batch on its way to the device."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from lockstep.data.batch import Packed
from lockstep.data.layout import Layout


@dataclass(slots=True)
class Row:
    """One packed row as tensors."""

    tokens: Tensor
    """int64 `[tokens]`."""
    layout: Layout
    sources: Tensor
    """int64 `[targets]`."""
    targets: Tensor
    """int64 `[targets]`."""
    fields: dict[str, Tensor]
    """float32 `[targets]` each."""
    sequences: Tensor | None = None
    """int64 `[targets]`: equal for targets of the same sequence, numbered from 0 in this row; None where the packed
    row does not say."""

    @classmethod
    def of(cls, packed: Packed, device: torch.device) -> Self:
        def whole(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(device, non_blocking=True)

        return cls(
            tokens=whole(packed.tokens),
            layout=packed.layout,
            sources=whole(packed.sources),
            targets=whole(packed.targets),
            fields={
                name: torch.from_numpy(values.astype(np.float32)).to(device, non_blocking=True)
                for name, values in packed.fields.items()
            },
            sequences=whole(np.unique(packed.sequences, return_inverse=True)[1]) if packed.sequences.size else None,
        )
