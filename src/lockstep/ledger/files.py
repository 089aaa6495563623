"""Files that are either there, complete and on the disk, or not there."""

import contextlib
import errno
import hashlib
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from lockstep.ledger.errors import LedgerFull

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def fsync_folder(folder: Path) -> None:
    """Makes renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def full(path: Path, needed: int | None, limited: bool = False) -> LedgerFull:
    """The error for a write at `path` for which there was no room. `limited`: by the process's file size limit."""
    folder = next(parent for parent in (path, *path.parents) if parent.is_dir())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return LedgerFull(path, needed, shutil.disk_usage(folder).free, limit if limited and limit >= 0 else None)


@contextlib.contextmanager
def room_for(path: Path, needed: int | None) -> Iterator[None]:
    """Turns the operating system's ways of saying "no room" into LedgerFull."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise full(path, needed, limited=error.errno == errno.EFBIG) from error


def prepare(target: Path, needed: int, write: Callable[[IO[bytes]], None], suffix: str = ".tmp") -> Path:
    """Writes what will become `target` under a hidden name beside it and makes it durable; the caller renames it.

    Room is reserved first, so that a full disk is noticed before a byte is written. LedgerFull, or whatever else
    `write` raises, leaves nothing behind."""
    hidden = target.parent / f".{target.name}{suffix}"
    try:
        with room_for(target, needed), hidden.open("wb") as file:
            _reserve(file.fileno(), needed)
            write(file)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    return hidden


def replace(target: Path, data: bytes) -> None:
    """Writes `target` whole: another process sees the old content or the new one, also after a power cut."""
    hidden = prepare(target, len(data), lambda file: _write_all(file, data))
    hidden.rename(target)
    fsync_folder(target.parent)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_all(file: IO[bytes], data: bytes) -> None:
    file.write(data)


def _reserve(descriptor: int, size: int) -> None:
    if size <= 0:
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        # Some file systems cannot reserve; the write itself will then say whether there is room.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV):
            raise
