"""Helpers of all engines for loading weights: readers and receivers, the check against the model, progress."""

import importlib
import mmap
import os
import struct
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.base import waits
from lockstep.models.vision.model_parts import parameter_parts
from lockstep.models.weight_conversion import CheckpointNames
from lockstep.rollout.errors import WeightsMismatch
from lockstep.watch.beacon.writer import current_beacon

WeightReader = Callable[[Path, int], AbstractContextManager[Mapping[str, Tensor]]]
"""Opens a version in a weight store as a map of parameter names to tensors, valid inside the context. An example is
`lockstep.weights.shared_memory_transport.StoreReader`."""

ReaderSource = str | WeightReader
"""A reader, or `package.module:name` of a factory that is called in the reading process."""


class CountedTensors(Mapping[str, Tensor]):
    """Tensors by name. Reading one counts as progress of the process."""

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
    """Opens a reader whose tensors count as progress. Raises ValueError for a string that does not name a factory."""
    if not isinstance(source, str):
        return count_loaded_tensors(source)
    module, _, name = source.partition(":")
    if not name:
        raise ValueError(f"reader: {source!r} does not name a factory, expected package.module:name")
    reader: WeightReader = getattr(importlib.import_module(module), name)()
    return count_loaded_tensors(reader)


def count_loaded_tensors(reader: WeightReader) -> WeightReader:
    """Wraps a reader so that reading a tensor counts as progress."""

    @contextmanager
    def counted(source: Path, version: int) -> Generator[Mapping[str, Tensor]]:
        with reader(source, version) as tensors:
            yield CountedTensors(tensors)

    return counted


class WeightReceiver(Protocol):
    """Receives versions from the trainer's device, like `lockstep.weights.stream.weight_stream:StreamReceiver`."""

    def promised(self, where: Mapping[str, Any]) -> Mapping[str, "HasShape"]:
        """The tensors that the stream will contain, by name."""

    def stream(
        self, where: Mapping[str, Any], version: int, worker: int, device: torch.device
    ) -> AbstractContextManager[Iterator[tuple[str, Tensor]]]:
        """Yields the verified names and tensors of a version as they arrive. Raises RuntimeErrors of `lockstep.weights`
        if the version does not arrive completely."""

    def close(self) -> None:
        """Closes the connection to the senders."""


class HasShape(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


def open_receiver(where: Mapping[str, Any]) -> WeightReceiver:
    """Makes the receiver that the description of the stream names."""
    module, _, name = str(where["receiver"]).partition(":")
    receiver: WeightReceiver = getattr(importlib.import_module(module), name)()
    return receiver


class ExpectedParameters:
    """The parameters that a version must have: those of the model in transformers. Tied weights must be there once,
    under any of their names. A part of a vision-language model that is not trained may be missing as a whole: the
    engine has it from the model's folder."""

    def __init__(self, lm: nn.Module) -> None:
        """`lm` may be on the meta device."""
        self._parts = parameter_parts(lm)
        parameters = dict(lm.named_parameters(remove_duplicate=False))
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self._parameter_ids = {name: id(parameter) for name, parameter in parameters.items()}
        """Tied weights have the same id."""

    def check(self, tensors: Mapping[str, HasShape]) -> None:
        """Raises WeightsMismatch for other names or shapes."""
        unknown = sorted(set(tensors) - set(self.shapes))
        present = {self._parameter_ids[name] for name in tensors if name in self._parameter_ids}
        # A version without any known parameter lacks them all.
        sent = {self._parts[each] for each in present} or set(self._parts.values())
        missing = sorted(
            n for n, each in self._parameter_ids.items() if each not in present and self._parts[each] in sent
        )
        for name in sorted(set(tensors) & set(self.shapes)):
            actual, expected = tuple(tensors[name].shape), self.shapes[name]
            if actual != expected:
                unknown.append(f"{name} {list(actual)}")
                missing.append(f"{name} {list(expected)}")
        if unknown or missing:
            raise WeightsMismatch(unknown, missing)


class CheckpointParameters(ExpectedParameters):
    """The same for an engine that loads tensors by their names in checkpoints."""

    def __init__(self, lm: nn.Module) -> None:
        """Raises ModelError if the weights cannot be converted to those names."""
        super().__init__(lm)
        self._names = CheckpointNames(lm)
        self.buffers = frozenset(name.rpartition(".")[2] for name, _ in lm.named_buffers())
        """The last parts of the names of buffers. A version does not have them: training does not change them."""

    def checkpoint_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of a checkpoint with these weights."""
        return self._names.convert(tensors)


def join_contiguous(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenates pieces along the first dimension. Returns a view, without a copy, if they are adjacent in memory."""
    first, end = pieces[0], pieces[0].data_ptr()
    for piece in pieces:
        same_storage = piece.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same_storage or piece.data_ptr() != end or piece.dtype != first.dtype:
            return torch.cat(list(pieces))
        end += piece.numel() * piece.element_size()
    return first.as_strided((sum(len(piece) for piece in pieces), *first.shape[1:]), first.stride())


PROGRESS_POLL_S = 0.25
_COUNTER = struct.Struct("<Q")


@contextmanager
def watch_worker_progress(workers: int) -> Generator[str]:
    """During an update, copies the progress of the engine's workers to this process's beacon.

    Yields the path of the workers' shared counters, "" if the only worker is this process.
    """
    if workers == 1:
        yield ""
        return
    descriptor = os.memfd_create("worker-progress")
    try:
        os.ftruncate(descriptor, workers * _COUNTER.size)
        memory = mmap.mmap(descriptor, workers * _COUNTER.size)

        def read_counters() -> None:
            counts = [_COUNTER.unpack_from(memory, each * _COUNTER.size)[0] for each in range(workers)]
            current_beacon().progress("loading", sum(counts))

        with _repeat_in_thread(read_counters):
            yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextmanager
def publish_worker_progress(path: str, worker: int) -> Generator[None]:
    """During an update, writes a worker's progress to the shared counters. Does nothing if the path is ""."""
    if not path:
        yield
        return
    with Path(path).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    with _repeat_in_thread(lambda: _COUNTER.pack_into(memory, worker * _COUNTER.size, current_beacon().progress_count)):
        yield


@contextmanager
def _repeat_in_thread(action: Callable[[], None]) -> Generator[None]:
    """Repeats an action in a thread while in this context, and once more at its end."""
    over = threading.Event()

    def repeat() -> None:
        while not over.is_set():
            action()
            waits.sleep(PROGRESS_POLL_S, "progress of an update")

    threading.Thread(target=repeat, name="worker-progress", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        action()
