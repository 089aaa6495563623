"""A weight reader that pauses in the middle of an update at a test's request."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.weights.shared_memory_transport import StoreReader


class InterruptibleTensors(dict[str, Tensor]):
    """Calls `interrupt` when the sixth tensor is copied. Before copying, all tensors are read twice: for the check of
    names and shapes, and to plan the copies."""

    def __init__(self, tensors: Mapping[str, Tensor], interrupt: Callable[[], None]) -> None:
        super().__init__(tensors)
        self._interrupt, self._taken = interrupt, 0

    def __getitem__(self, name: str) -> Tensor:
        self._taken += 1
        if self._taken == 2 * len(self) + 6:
            self._interrupt()
        return super().__getitem__(name)

    def items(self) -> Any:
        return self._items()

    def _items(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self[name]) for name in self)


class PausedReader(StoreReader):
    """Pauses the update while the file `hold` exists in the store's parent folder, and creates the file `half`
    there."""

    opened = 0

    @contextmanager
    def __call__(self, folder: Path, version: int) -> Generator[Mapping[str, Tensor]]:
        PausedReader.opened += 1
        with super().__call__(folder, version) as tensors:
            yield InterruptibleTensors(tensors, lambda: pause(folder.parent)) if PausedReader.opened == 1 else tensors


def pause(folder: Path) -> None:
    (folder / "half").touch()
    end = time.monotonic() + 120
    while (folder / "hold").exists() and time.monotonic() < end:
        time.sleep(0.005)
