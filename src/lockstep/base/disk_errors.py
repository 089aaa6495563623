"""Says why a file system refuses a write, with the numbers that show it and a remedy."""

import errno
import os
import resource
from pathlib import Path

FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""There is no room: on the disk, in its table of inodes, in a quota, or below the limit for the size of a file."""
REFUSED_ERRNOS = FULL_ERRNOS | {errno.EROFS}


def refusal_reason(code: int | None, path: Path) -> str:
    """Why a write at `path` was refused with this errno, and what to do about it."""
    folder = existing_folder(path)
    match code:
        case errno.EROFS:
            return (
                f"the file system of {folder} is mounted read-only: choose another folder, or mount it for writing "
                "(Linux makes a file system read-only after an error of its disk, see `dmesg`)"
            )
        case errno.EDQUOT:
            return f"the disk quota of user {os.getuid()} is used up: make room, or ask for more (`quota -s`)"
        case errno.EFBIG if (limit := file_size_limit()) is not None:
            return f"the process may not write files over {limit:,} bytes: raise it with `ulimit -f`"
        case errno.EFBIG:
            return f"the file system of {folder} allows no larger file: choose another one"
    free, inodes, all_inodes = free_space(path)
    if all_inodes and not inodes:
        return (
            f"its file system has no inodes left (0 of {all_inodes:,}), though {free:,} bytes are free: remove files, "
            f"however small (`df -i {folder}` counts them)"
        )
    return f"its disk has {free:,} bytes free: make room"


def existing_folder(path: Path) -> Path:
    """The path, or the folder nearest to it that exists."""
    return next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())


def free_space(path: Path) -> tuple[int, int, int]:
    """Free bytes, free inodes and all inodes of the file system that holds a path, for this user. A file system without
    a fixed number of inodes has 0 of 0."""
    state = os.statvfs(existing_folder(path))
    return state.f_bavail * state.f_frsize, state.f_favail, state.f_files


def file_size_limit() -> int | None:
    """The process's limit for the size of a file, in bytes; None without one."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return limit if limit >= 0 else None
