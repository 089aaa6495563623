"""Space and write speed of the folders that a run writes to."""

import os
import time
from pathlib import Path

from lockstep.doctor.check.facts import Disk
from lockstep.doctor.check.limits import filesystem_of
from lockstep.doctor.check.system import System

WRITE_BYTES = 64 << 20
WRITE_S = 1.0
_BLOCK = bytes(4 << 20)
_flush = getattr(os, "fdatasync", os.fsync)
"""macOS has no fdatasync."""


def gather_disk(system: System, folder: Path, purpose: str, most: int = WRITE_BYTES, bound_s: float = WRITE_S) -> Disk:
    """Space of the folder, or of the nearest one above it that exists, and how fast a file is written there: at most so
    many bytes and about so many seconds. The file is removed."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    room = os.statvfs(there)
    kind, _ = filesystem_of(system.proc, there)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    files = room.f_favail if room.f_files else None
    if room.f_flag & os.ST_RDONLY:
        return Disk(str(folder), purpose, kind, total, free, files, True, problem="the file system is read-only")
    try:
        written, took = _write(there, min(most, free // 4), bound_s)
    except OSError as error:
        return Disk(str(folder), purpose, kind, total, free, files, problem=f"{error.strerror} ({there})")
    return Disk(str(folder), purpose, kind, total, free, files, False, written, round(took, 4))


def _write(folder: Path, most: int, bound_s: float) -> tuple[int, float]:
    """Bytes and seconds, what the disk has to say included (fsync)."""
    path = folder / f".lockstep-check-{os.getpid()}-{time.monotonic_ns()}"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        begun, written = time.monotonic(), 0
        while written < most and time.monotonic() - begun < bound_s:
            written += os.write(handle, _BLOCK[: min(len(_BLOCK), most - written)])
            _flush(handle)
        return written, time.monotonic() - begun
    finally:
        os.close(handle)
        path.unlink(missing_ok=True)
