"""A weight reader that pauses in the middle of a copy, or is slow, at a test's request."""

import os
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from lockstep.weights.shared_memory_transport import StoreReader

SLOW_S = 0.3
"""For one tensor."""


class PausingTensors(Mapping[str, Tensor]):
    """Pauses when half of the tensors have been copied; before copying, each is read once for the check."""

    def __init__(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        self._tensors, self._folder, self._taken = tensors, folder, 0

    def __getitem__(self, name: str) -> Tensor:
        self._taken += 1
        if self._taken > len(self) and (self._folder / f"slow-{os.getpid()}").exists():
            time.sleep(SLOW_S)
        if self._taken == len(self) + len(self) // 2:
            pause_while_held(self._folder)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class PausingReader(StoreReader):
    @contextmanager
    def __call__(self, folder: Path, version: int) -> Generator[Mapping[str, Tensor]]:
        with super().__call__(folder, version) as tensors:
            yield PausingTensors(tensors, Path(os.environ["LOCKSTEP_TEST_MIDWAY"]))


def pause_while_held(folder: Path) -> None:
    """Create the file `half-<pid>`, and pause while the file `hold-<pid>` exists."""
    hold, end = folder / f"hold-{os.getpid()}", time.monotonic() + 120
    if hold.exists():
        (folder / f"half-{os.getpid()}").touch()
    while hold.exists() and time.monotonic() < end:
        time.sleep(0.005)


def complete() -> PausingReader:
    return PausingReader("complete")
