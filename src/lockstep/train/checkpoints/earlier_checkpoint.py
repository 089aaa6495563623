"""Reads checkpoints of format 1, which torch.distributed.checkpoint wrote: their index and their tensors are pickled.

Nothing in them is executed: the index is read by an unpickler that knows the few classes such an index consists of, and
puts inert records in their place; tensors are read with `weights_only`.
"""

import io
import logging
import pickle
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from lockstep.train.checkpoints.checkpoint_files import CheckpointIndex, StoredPart, StoredTensor
from lockstep.train.errors import CheckpointError

log = logging.getLogger(__name__)

_INDEX_FILE = ".metadata"
_DAMAGED = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError,
    MemoryError, RecursionError, RuntimeError, OSError,
)  # fmt: skip
"""Errors that reading a damaged file may raise."""


class _Record:
    """Stands for an object of the index. Has the same attributes, and no code."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Key(_Record):
    """The place of a part of a tensor: `fqn` and `offset`."""

    def __hash__(self) -> int:
        return id(self)


_TORCH_DCP = "torch.distributed.checkpoint"
_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("pathlib", "PosixPath"): PurePosixPath,
    (f"{_TORCH_DCP}.metadata", "MetadataIndex"): _Key,
    ("torch.serialization", "_get_layout"): _Record,
    **{
        (f"{_TORCH_DCP}.metadata", name): _Record
        for name in (
            "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (f"{_TORCH_DCP}.filesystem", "_StorageInfo"): _Record,
}  # fmt: skip


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no index of a checkpoint does")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it asks for a persistent object, which no index of a checkpoint does")


def open_earlier_files(folder: Path, manifest: dict[str, Any]) -> CheckpointIndex:
    """Opens a checkpoint of format 1, whose manifest was read. Raises CheckpointError if its index is damaged."""
    log.warning(
        "%s was written by an earlier version, without digests: damage to its files cannot be noticed. The next "
        "checkpoint has them",
        folder,
    )
    try:
        index = _IndexUnpickler(io.BytesIO((folder / _INDEX_FILE).read_bytes())).load()
        stored = {(key.fqn, *key.offset): info for key, info in index.storage_data.items()}
        places: dict[tuple[str, int], tuple[str, int, int]] = {}
        tensors: dict[str, StoredTensor] = {}
        for name, each in index.state_dict_metadata.items():
            found = tensors[name] = StoredTensor(tuple(each.size))
            for chunk in each.chunks:
                info = stored[(name, *chunk.offsets)]
                first, rows = (chunk.offsets[0], chunk.sizes[0]) if chunk.offsets else (0, 1)
                found.parts.append(StoredPart(info.relative_path, first, rows, ""))
                places[name, first] = info.relative_path, info.offset, info.length
    except _DAMAGED as error:
        raise CheckpointError(folder, f"{_INDEX_FILE} cannot be read: {type(error).__name__}: {error}") from error

    def read_part(name: str, part: StoredPart) -> Tensor:
        file, offset, length = places[name, part.first]
        try:
            with (folder / file).open("rb") as raw:
                raw.seek(offset)
                tensor: Tensor = torch.load(io.BytesIO(raw.read(length)), map_location="cpu", weights_only=True)
        except _DAMAGED as error:
            raise CheckpointError(folder, f"is damaged: {name!r} in {file} cannot be read: {error}") from error
        return tensor

    return CheckpointIndex({key: value for key, value in manifest.items() if key != "files"}, tensors, read_part)
