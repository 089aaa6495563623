"""Readers that pause in the middle of an update when a test asks for it."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.weights.shared_memory_transport import StoreReader


class Struck(dict[str, Tensor]):
    """Calls `strike` when the sixth tensor is taken, after names and shapes were looked at: by the check, and to find
    out how to take them."""

    def __init__(self, tensors: Mapping[str, Tensor], strike: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._strike, self._taken = strike, 0

    def __getitem__(self, name: str) -> Tensor:
        self._taken += 1
        if self._taken == 2 * len(self) + 6:
            self._strike()
        return super().__getitem__(name)

    def items(self) -> Any:
        return self._items()

    def _items(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self[name]) for name in self)


class PausedReader(StoreReader):
    """While `hold` exists beside the store, the update stops, and says so with `half`."""

    opened = 0

    @contextmanager
    def __call__(self, folder: Path, version: int) -> Generator[Mapping[str, Tensor]]:
        PausedReader.opened += 1
        with super().__call__(folder, version) as tensors:
            yield Struck(tensors, lambda: hold(folder.parent)) if PausedReader.opened == 1 else tensors


def hold(beside: Path) -> None:
    (beside / "half").touch()
    end = time.monotonic() + 120
    while (beside / "hold").exists() and time.monotonic() < end:
        time.sleep(0.005)
