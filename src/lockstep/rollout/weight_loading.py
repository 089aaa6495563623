"""What all engines share about loading weights: sources, the check against the model, counters of progress."""

import importlib
import mmap
import os
import struct
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.base import waits
from lockstep.rollout.errors import WeightsMismatch
from lockstep.watch.beacon.writer import current_beacon

WeightReader = Callable[[Path, int], AbstractContextManager[Mapping[str, Tensor]]]
"""Opens a version in a weight store: parameter names to tensors, valid inside the context. An example is
`lockstep.weights.shared_memory_transport.StoreReader`."""

ReaderSource = str | WeightReader
"""A reader, or `package.module:name` of its factory, to be called in the reading process."""


class CountedTensors(Mapping[str, Tensor]):
    """Tensors that count as progress of the process when they are read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        current_beacon().add("tensors")
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def open_reader(source: ReaderSource) -> WeightReader:
    """A reader that counts the tensors. Raises ValueError for a path that names no factory."""
    if not isinstance(source, str):
        return count_loaded_tensors(source)
    module, _, name = source.partition(":")
    if not name:
        raise ValueError(f"reader: {source!r} is not a factory, expected package.module:name")
    made: WeightReader = getattr(importlib.import_module(module), name)()
    return count_loaded_tensors(made)


def count_loaded_tensors(reader: WeightReader) -> WeightReader:
    @contextmanager
    def counted(source: Path, version: int) -> Generator[Mapping[str, Tensor]]:
        with reader(source, version) as tensors:
            yield CountedTensors(tensors)

    return counted


class WeightReceiver(Protocol):
    """Receives versions from the trainer's device, like `lockstep.weights.stream.weight_stream:StreamReceiver`."""

    def promised(self, where: Mapping[str, Any]) -> Mapping[str, "HasShape"]:
        """The tensors that a version will have, by name."""

    def stream(
        self, where: Mapping[str, Any], version: int, worker: int, device: torch.device
    ) -> AbstractContextManager[Iterator[tuple[str, Tensor]]]:
        """The names and tensors of a version as they arrive, checked. Raises RuntimeErrors of `lockstep.weights` if the
        version does not arrive completely."""

    def close(self) -> None:
        """Closes the connection to the senders."""


class HasShape(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


def open_receiver(where: Mapping[str, Any]) -> WeightReceiver:
    """The receiver that the controller names."""
    module, _, name = str(where["receiver"]).partition(":")
    made: WeightReceiver = getattr(importlib.import_module(module), name)()
    return made


class ExpectedParameters:
    """The parameters that a version must have: those of the model in transformers. Tied weights come once, under any of
    their names."""

    def __init__(self, lm: nn.Module) -> None:
        """`lm` may be on the meta device."""
        own = dict(lm.named_parameters(remove_duplicate=False))
        self.shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        self._same = {name: id(parameter) for name, parameter in own.items()}

    def check(self, tensors: Mapping[str, HasShape]) -> None:
        """Raises WeightsMismatch for other names or shapes."""
        unknown = sorted(set(tensors) - set(self.shapes))
        given = {self._same[name] for name in tensors if name in self._same}
        missing = sorted(name for name, each in self._same.items() if each not in given)
        for name in sorted(set(tensors) & set(self.shapes)):
            found, expected = tuple(tensors[name].shape), self.shapes[name]
            if found != expected:
                unknown.append(f"{name} {list(found)}")
                missing.append(f"{name} {list(expected)}")
        if unknown or missing:
            raise WeightsMismatch(unknown, missing)


def join_contiguous(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenates pieces along the first dimension; a view if they are adjacent in memory, which saves a copy."""
    first, end = pieces[0], pieces[0].data_ptr()
    for piece in pieces:
        together = piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not together or piece.data_ptr() != end or piece.dtype != first.dtype:
            return torch.cat(list(pieces))
        end += piece.numel() * piece.element_size()
    return first.as_strided((sum(len(piece) for piece in pieces), *first.shape[1:]), first.stride())


PROGRESS_POLL_S = 0.25
_COUNTER = struct.Struct("<Q")


@contextmanager
def watch_worker_progress(workers: int) -> Generator[str]:
    """Shows the progress of the engine's workers in the engine's beacon during an update.

    Yields the path of the shared counters, "" if the only worker is this process.
    """
    if workers == 1:
        yield ""
        return
    descriptor = os.memfd_create("tally")
    try:
        os.ftruncate(descriptor, workers * _COUNTER.size)
        memory = mmap.mmap(descriptor, workers * _COUNTER.size)

        def look() -> None:
            counts = [_COUNTER.unpack_from(memory, each * _COUNTER.size)[0] for each in range(workers)]
            current_beacon().progress("loading", sum(counts))

        with _repeat_in_thread(look):
            yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextmanager
def publish_worker_progress(path: str, worker: int) -> Generator[None]:
    """Writes a worker's progress into the shared counters, during an update. Does nothing for the path ""."""
    if not path:
        yield
        return
    with Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    with _repeat_in_thread(lambda: _COUNTER.pack_into(memory, worker * _COUNTER.size, current_beacon().progress_count)):
        yield


@contextmanager
def _repeat_in_thread(look: Callable[[], None]) -> Generator[None]:
    over = threading.Event()

    def walk() -> None:
        while not over.is_set():
            look()
            waits.sleep(PROGRESS_POLL_S, "progress of an update")

    threading.Thread(target=walk, name="tally", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        look()
