"""Keeps checkpoints of a rank's state in shared memory, so that a rank that replaces a dead one loses no finished step.

Two slots are used in turn: while one is written, the other stays complete. A slot is valid if its description file
exists. That file is deleted before the slot is written, and created again, by a rename, after the last byte.
"""

import contextlib
import errno
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from lockstep.base.folders import open_file, write_atomically
from lockstep.train.errors import MemoryCheckpointMissing, SharedMemoryFull

MEMORY_SLOTS = 2
_ALIGN = 64
_MEMORY_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class MemoryCheckpoints:
    """The memory checkpoints of one rank.

    Args:
        folder: a folder in shared memory that outlives the rank.
        world: number of ranks over which the state is divided; only the same number of ranks can load it.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world = folder, rank, world
        self._memory: dict[int, mmap.mmap] = {}

    def write(self, version: int, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Copies the tensors into the oldest slot. Raises SharedMemoryFull."""
        layout, size = _slot_layout(tensors)
        slot = self._slot_to_overwrite(version)
        description = self._description(slot)
        description.unlink(missing_ok=True)
        memory = memoryview(self._mapped(slot, size))
        for (_, dtype, shape, offset), tensor in zip(layout, tensors.values(), strict=True):
            if tensor.numel():
                target = torch.frombuffer(memory, dtype=getattr(torch, dtype), count=tensor.numel(), offset=offset)
                target.view(shape).copy_(tensor.detach())
        content = {
            "version": version, "world": self.world, "layout": layout, "digest": _digest(memory, size),
            "facts": dict(metadata),
        }  # fmt: skip
        write_atomically(description, json.dumps(content).encode())

    def read(self, version: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Fills the tensors from the copy of that version and returns its metadata. Raises MemoryCheckpointMissing."""
        layout, size = _slot_layout(tensors)
        for slot in range(MEMORY_SLOTS):
            found = read_slot(self.folder, self.rank, slot)
            if found is None or found["version"] != version:
                continue
            if found["world"] != self.world or found["layout"] != [list(each) for each in layout]:
                raise MemoryCheckpointMissing(self.folder, self.rank, version, "it has other tensors")
            memory = memoryview(self._mapped(slot, size))
            if found.get("digest") != _digest(memory, size):
                raise MemoryCheckpointMissing(self.folder, self.rank, version, "its content is damaged")
            for (_, dtype, shape, offset), tensor in zip(layout, tensors.values(), strict=True):
                if tensor.numel():
                    source = torch.frombuffer(memory, dtype=getattr(torch, dtype), count=tensor.numel(), offset=offset)
                    tensor.copy_(source.view(shape))
            metadata: dict[str, Any] = found["facts"]
            return metadata
        raise MemoryCheckpointMissing(self.folder, self.rank, version, "there is none")

    def close(self) -> None:
        """Unmaps the memory; the copies stay."""
        for memory in self._memory.values():
            with contextlib.suppress(BufferError):  # a tensor still uses it
                memory.close()
        self._memory.clear()

    def _slot_to_overwrite(self, version: int) -> int:
        """Returns the slot to overwrite: one that has this version or a later one, else an empty one, else the older
        one."""
        descriptions = [read_slot(self.folder, self.rank, slot) for slot in range(MEMORY_SLOTS)]
        versions = [-1 if each is None else int(each["version"]) for each in descriptions]
        obsolete = [slot for slot, each in enumerate(versions) if each >= version]
        return obsolete[0] if obsolete else versions.index(min(versions))

    def _mapped(self, slot: int, size: int) -> mmap.mmap:
        if slot not in self._memory:
            path = self.folder / f"rank-{self.rank}-{slot}"
            with os.fdopen(open_file(path, os.O_RDWR), "r+b") as file:
                try:
                    os.posix_fallocate(
                        file.fileno(), 0, size
                    )  # without it, a write to a full shared memory is a SIGBUS
                except OSError as error:
                    path.unlink(missing_ok=True)
                    if error.errno not in _MEMORY_FULL_ERRNOS:
                        raise
                    raise SharedMemoryFull(self.folder, MEMORY_SLOTS * size, _free_bytes(self.folder)) from error
                self._memory[slot] = mmap.mmap(file.fileno(), size)
        return self._memory[slot]

    def _description(self, slot: int) -> Path:
        return _slot_file(self.folder, self.rank, slot)


def memory_checkpoint_versions(folder: Path, world: int) -> set[int]:
    """Returns the versions of which all ranks have a complete copy."""
    common: set[int] | None = None
    for rank in range(world):
        found = [read_slot(folder, rank, slot) for slot in range(MEMORY_SLOTS)]
        versions = {each["version"] for each in found if each is not None and each["world"] == world}
        common = versions if common is None else common & versions
    return common or set()


def read_slot(folder: Path, rank: int, slot: int) -> dict[str, Any] | None:
    """Returns the description of a slot; None if the slot is incomplete."""
    try:
        found: dict[str, Any] = json.loads(_slot_file(folder, rank, slot).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found


def _slot_file(folder: Path, rank: int, slot: int) -> Path:
    return folder / f"rank-{rank}-{slot}.json"


def _slot_layout(tensors: Mapping[str, Tensor]) -> tuple[list[tuple[str, str, Sequence[int], int]], int]:
    """Returns (name, dtype, shape, offset) of every tensor, and their total size in bytes."""
    layout: list[tuple[str, str, Sequence[int], int]] = []
    offset = 0
    for name, tensor in tensors.items():
        layout.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset))
        offset += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
    return layout, max(offset, mmap.PAGESIZE)


def _digest(memory: memoryview, size: int) -> str:
    """The xxh3-128 of a slot's content."""
    return xxhash.xxh3_128_hexdigest(memory[:size])


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
