"""The folder of a run in the host's shared memory, which holds the beacons; also private folders, file locks and atomic
writes."""

import contextlib
import fcntl
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def new_run_id(name: str) -> str:
    """A run id that is unique on this host: the name, without characters that folder names do not allow, and six hex
    digits."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:48] or "run"
    return f"{cleaned}-{secrets.token_hex(3)}"


def shm_root() -> Path:
    """The folder that holds the folders of runs."""
    chosen = os.environ.get("LOCKSTEP_BEACONS")
    if chosen:
        return Path(chosen)
    shared = Path("/dev/shm")
    root = shared if shared.is_dir() and os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return root / "lockstep"


def run_shm_dir(run: str) -> Path:
    """The path of the run's folder, which need not exist. Raises ValueError if the run id is not valid."""
    if not _RUN_ID.fullmatch(run):
        raise ValueError(f"run id {run!r}: expected up to 63 letters, digits, '.', '_' or '-'; see new_run_id()")
    return shm_root() / run


@contextlib.contextmanager
def file_lock(descriptor: int, seconds: float = 2.0) -> Iterator[None]:
    """Holds the lock of an open file. Raises TimeoutError if another process, which may be stopped, holds the lock for
    too long."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= until:
                raise TimeoutError(f"cannot lock a shared file within {seconds:g} s") from None
            time.sleep(1e-3)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that readers see either all of `data` or the previous content."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(data)
    draft.rename(path)


def make_run_shm_dir(run: str) -> Path:
    """Creates the run's folder with mode 0700. Raises PermissionError when another user owns it."""
    folder = run_shm_dir(run)
    base = folder.parent
    if not base.is_dir():
        base.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            base.chmod(0o1777)  # like /tmp: several users share a host
    return make_private_dir(folder, "choose another run id")


def make_private_dir(folder: Path, remedy: str) -> Path:
    """Creates a folder for this user alone (mode 0700) inside a folder that others may write to. Raises PermissionError
    if the path is not a folder of this user; `remedy` becomes part of the message."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        kind = "" if stat.S_ISDIR(facts.st_mode) else " is not a folder and"
        raise PermissionError(f"{folder}{kind} belongs to uid {facts.st_uid}, not to {os.getuid()}: {remedy}")
    if facts.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def write_private(path: Path, data: bytes) -> None:
    """Writes a new file that only this user can read. Raises FileExistsError if the path exists, also as a link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
