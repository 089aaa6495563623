"""The files of a weight store: two buffers, the plan and a control block; and leases on the buffers.

The control block has two slots for commit records, each with a checksum. A new record overwrites the older slot, and a
reader uses the newest valid one. So a reader sees either the old version or the new one, whenever the writer is killed.
Leases are file locks, which the kernel releases when the process ends.
"""

import errno
import fcntl
import mmap
import os
import shutil
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.base import waits
from lockstep.base.folders import open_file, write_atomically
from lockstep.weights.errors import NoRoom, NoStore
from lockstep.weights.weight_plan import PlanEntry, WeightPlan

_MAGIC = b"LOCKSTEPW1"
_HEADER = struct.Struct("<16s64sI")  # magic, plan digest, writers
_RECORD = struct.Struct("<QQqI")  # sequence, generation, version, buffer
_GENERATION = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_GENERATION_AT, _RECORDS_AT, _SIZE = 128, (192, 256), 4096


@dataclass(frozen=True, slots=True)
class CommittedVersion:
    """A version that readers may open."""

    sequence: int
    generation: int
    version: int
    buffer: int
    """0 or 1."""


class ControlBlock:
    """The mapped control file of a store."""

    def __init__(self, path: Path, writable: bool) -> None:
        """Raises NoStore if there is no valid control file."""
        self.path = path
        try:
            with path.open("r+b" if writable else "rb") as file:
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                self._memory = mmap.mmap(file.fileno(), _SIZE, access=access)
        except (FileNotFoundError, ValueError) as error:
            raise NoStore(path.parent, f"there is no weight store here ({error})") from error
        header = self._read(0, _HEADER)
        if header is None or header[0].rstrip(b"\0") != _MAGIC:
            raise NoStore(path.parent, "its control block is damaged, or another version of Lockstep wrote it")
        self.digest = header[1].decode("ascii")
        self.writers = int(header[2])

    @staticmethod
    def create(path: Path, digest: str, writers: int) -> None:
        """Writes a new control file, atomically."""
        block = bytearray(_SIZE)
        body = _HEADER.pack(_MAGIC, digest.encode("ascii"), writers)
        block[: len(body) + _CRC.size] = body + _CRC.pack(zlib.crc32(body))
        write_atomically(path, bytes(block))

    @property
    def generation(self) -> int:
        """The generation that owns the store; 0 before the first claim."""
        found = self._read(_GENERATION_AT, _GENERATION)
        return int(found[0]) if found else 0

    def claim(self, generation: int) -> None:
        self._write(_GENERATION_AT, _GENERATION.pack(generation))

    def newest(self) -> CommittedVersion | None:
        """Returns the current commit; None if nothing was committed."""
        found = [CommittedVersion(*map(int, record)) for at in _RECORDS_AT if (record := self._read(at, _RECORD))]
        return max(found, key=lambda commit: commit.sequence, default=None)

    def commit(self, generation: int, version: int, buffer: int) -> None:
        last = self.newest()
        sequence = last.sequence + 1 if last else 1
        self._write(_RECORDS_AT[sequence % 2], _RECORD.pack(sequence, generation, version, buffer))

    def _read(self, at: int, layout: struct.Struct) -> tuple[bytes, ...] | None:
        """Returns the record at that offset; None if it is empty or incomplete."""
        raw = self._memory[at : at + layout.size + _CRC.size]
        body = raw[: layout.size]
        if not any(raw) or _CRC.unpack(raw[layout.size :])[0] != zlib.crc32(body):
            return None
        return layout.unpack(body)

    def _write(self, at: int, body: bytes) -> None:
        self._memory[at : at + len(body) + _CRC.size] = body + _CRC.pack(zlib.crc32(body))

    def close(self) -> None:
        self._memory.close()


def remove_store(folder: Path) -> None:
    """Deletes a store's files; processes that have mapped them can still read them."""
    for path in [folder / "control", folder / "plan.json", *folder.glob("buffer-*")]:
        path.unlink(missing_ok=True)


def create_store_files(folder: Path, plan: WeightPlan, writers: int) -> None:
    """Creates the files of a new store, the control block last."""
    size = max(plan.nbytes, mmap.PAGESIZE)
    available = shutil.disk_usage(folder).free
    if available < 2 * size:
        raise NoRoom(folder, 2 * size, available)
    try:
        for buffer in (0, 1):
            descriptor = open_file(folder / f"buffer-{buffer}", os.O_WRONLY | os.O_TRUNC)
            try:
                os.posix_fallocate(descriptor, 0, size)
            finally:
                os.close(descriptor)
    except OSError as error:
        remove_store(folder)
        if error.errno != errno.ENOSPC:
            raise
        raise NoRoom(folder, 2 * size, available) from error
    write_atomically(folder / "plan.json", plan.to_json().encode())
    ControlBlock.create(folder / "control", plan.digest, writers)


def tensor_views(memory: mmap.mmap, plan: WeightPlan) -> dict[str, Tensor]:
    """Returns all tensors of a buffer by name. They share one storage, so that adjacent tensors can be viewed as
    one."""
    with warnings.catch_warnings():
        # torch warns that the memory is read-only, which is intended.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        buffer_bytes = torch.frombuffer(memory, dtype=torch.uint8)
    return {entry.name: _tensor_view(buffer_bytes, entry) for entry in plan.entries}


def _tensor_view(buffer_bytes: Tensor, entry: PlanEntry) -> Tensor:
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.torch_dtype)
    return buffer_bytes[entry.offset : entry.offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape)


T = TypeVar("T")

FENCE_TIMEOUT_S = 300.0
"""How long a writer waits for readers of the spare buffer; an engine reads while it copies the weights."""


class BufferLease:
    """A shared (reader) or exclusive (writer) lock on a file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path, exclusive: bool = False) -> "BufferLease | None":
        """Takes a lease without waiting. Returns None if another process holds a conflicting one."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def release(self) -> None:
        os.close(self._descriptor)


def lease_holders(path: Path) -> list[int]:
    """Returns the pids on this host that hold a lease on the file, as far as /proc/locks lists them."""
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    # Inode numbers alone are ambiguous, because every tmpfs numbers its inodes from one.
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found = set()
    for line in lines:
        fields = line.split()
        # "1: FLOCK ADVISORY READ 1234 00:1a:42 0 EOF"; a waiting process has "->" as second field.
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == file:
            found.add(int(fields[4]))
    return sorted(found)


def acquire_exclusive(path: Path, waits_for: str, why: str) -> BufferLease:
    """Waits for an exclusive lease. The wait names the processes that hold conflicting ones."""
    lease = BufferLease.take(path, exclusive=True)
    if lease is not None:
        return lease
    pids = ", ".join(map(str, lease_holders(path))) or "unknown"
    return poll_lease(lambda: BufferLease.take(path, exclusive=True), f"{waits_for} (pid {pids})", why)


def poll_lease(attempt: Callable[[], T | None], waits_for: str, why: str) -> T:
    """Repeats `attempt` until its result is not None, and returns it. Raises WaitTimeout."""
    return waits.poll(attempt, kind="lease", waits_for=waits_for, why=why, timeout_s=FENCE_TIMEOUT_S, every_s=0.002)
