"""What is trained, as it was when the run began: the reference of a KL penalty where the model without its adapter is
another one, because the adapter was there before or weights are trained beside it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class Beginning:
    """This rank's first rows, in host memory.

    Args:
        rows: of each trained parameter, by name.
    """

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self._rows = {name: tensor.detach().to("cpu", copy=True) for name, tensor in rows.items()}

    @contextmanager
    def restored(self, rows: Mapping[str, Tensor]) -> Iterator[None]:
        """The first rows stand in `rows`, and afterwards again what stood there, bit by bit. No layer may be gathered
        when it begins or ends: what was gathered would stay as it is."""
        kept = {name: tensor.clone() for name, tensor in rows.items()}
        _copy(self._rows, rows)
        try:
            yield
        finally:
            _copy(kept, rows)


@torch.no_grad()
def _copy(values: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> None:
    for name, tensor in rows.items():
        tensor.copy_(values[name])
