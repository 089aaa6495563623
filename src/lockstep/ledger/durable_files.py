"""Writes files that are either complete on the disk or absent, and locks a run for one process."""

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from lockstep.base.disk_errors import REFUSED_ERRNOS, free_space, refusal_reason
from lockstep.base.folders import open_file
from lockstep.base.json_text import parse_json
from lockstep.ledger.errors import LedgerFull, LedgerReadOnly, RunIsActive


def fsync_folder(folder: Path) -> None:
    """Makes renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_refused_error(path: Path, needed: int | None, code: int | None) -> LedgerFull | LedgerReadOnly:
    """Returns the error for a write at `path` that was refused with this errno."""
    why = refusal_reason(code, path)
    return LedgerReadOnly(path, why) if code == errno.EROFS else LedgerFull(path, needed, free_space(path)[0], why)


@contextlib.contextmanager
def disk_full_as_ledger_error(path: Path, needed: int | None) -> Iterator[None]:
    """Converts the operating system's errors for a full disk to LedgerFull, and for a read-only one to
    LedgerReadOnly."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED_ERRNOS:
            raise
        raise write_refused_error(path, needed, error.errno) from error


def write_hidden(target: Path, needed: int, write: Callable[[IO[bytes]], None], suffix: str = ".tmp") -> Path:
    """Writes the content of `target` to a hidden file in the same folder, durably. The caller renames it.

    Reserves room first, so that a full disk is noticed before anything is written. If LedgerFull or an error of `write`
    is raised, no file is left."""
    hidden = target.parent / f".{target.name}{suffix}"
    try:
        with (
            disk_full_as_ledger_error(target, needed),
            os.fdopen(open_file(hidden, os.O_WRONLY | os.O_TRUNC), "wb") as file,
        ):
            _preallocate(file.fileno(), needed)
            write(file)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):  # as on a file system that has become read-only
            hidden.unlink(missing_ok=True)
        raise
    return hidden


def replace_file(target: Path, data: bytes) -> None:
    """Writes `target` atomically: it has either the old content or the new one, even after a power failure."""
    hidden = write_hidden(target, len(data), lambda file: _write_all(file, data))
    hidden.rename(target)
    fsync_folder(target.parent)


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_all(file: IO[bytes], data: bytes) -> None:
    file.write(data)


def _preallocate(descriptor: int, size: int) -> None:
    if size <= 0:
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        # Some file systems cannot reserve room; then the write itself fails.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV):
            raise


log = logging.getLogger(__name__)


class RunLock:
    """The lock of a run, held until `close` or the end of the process. The constructor raises RunIsActive, which names
    the holder, if another process has the lock.

    With `force`, continues without the lock, if a holder on another host is known to have ended. If it still runs, the
    index refuses its writes because of their generation."""

    def __init__(self, path: Path, force: bool = False) -> None:
        self._file = os.fdopen(open_file(path, os.O_RDWR | os.O_APPEND), "a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES) and not force:
                pid, host = _read_holder(self._file)
                self._file.close()
                raise RunIsActive(path.parent, pid, host) from None
            log.warning("no lock on %s (%s): only the generation in the ledger excludes other processes", path, error)
        self._file.seek(0)
        self._file.truncate()
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, self._file)
        self._file.flush()

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        self._file.close()


def lock_holder(path: Path) -> int | None:
    """Returns the pid of the process on this host that has the lock of a run; None if no process on this host has it.

    Does not write. A lock whose file names no living process of this host is not touched, so that a run that starts at
    this moment gets it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            pid, host = _read_holder(file)
            if pid is None or host != socket.gethostname() or not Path(f"/proc/{pid}").exists():
                return None
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                return pid if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    except OSError:
        pass
    return None


def _read_holder(file: IO[str]) -> tuple[int | None, str | None]:
    file.seek(0)
    try:
        holder = parse_json(file.read(4096), "the lock")
        return int(holder["pid"]), str(holder["host"])
    except (ValueError, KeyError, TypeError):
        return None, None
