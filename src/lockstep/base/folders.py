"""Folders and files in places that other users share: the shared memory of the host, which holds the beacons of runs,
the temporary folder, and folders that others may have prepared. Also file locks and atomic writes.

A folder is private (mode 0700) and lies in one that nobody else can change: one of root or of this user, which others
may write to only if it has the sticky bit, like `/tmp`. Then nobody else can put a link in the way of a later write. A
file gets the access of its folder, whatever the umask is, and links in its place are not followed.
"""

import contextlib
import errno
import fcntl
import functools
import os
import pwd
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from lockstep.base.errors import PicklableError

SHARED_MEMORY = Path("/dev/shm")
STALE_AFTER_S = 60.0
"""An unused folder that was changed more recently is not removed: its owner may be about to hold it."""
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TEMPORARY_REMEDY = "set TMPDIR to a folder that belongs to you"


class UnsafePath(PicklableError, PermissionError):
    """Another user may control a path, or a link leads from it to elsewhere; nothing was written."""

    error_code = "unsafe_path"

    def __init__(self, path: Path, why: str, remedy: str) -> None:
        super().__init__(f"{path} {why}: {remedy}")
        self.path, self.why, self.remedy = path, why, remedy


def new_run_id(name: str) -> str:
    """A run id that is unique on this host: the name, without characters that folder names do not allow, and six hex
    digits."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:48] or "run"
    return f"{cleaned}-{secrets.token_hex(3)}"


def read_run_id(file: Path) -> str:
    """The run id in a file. Raises OSError, and ValueError if the file holds something else."""
    with file.open("rb") as opened:
        text = opened.read(256).decode(errors="replace").strip()
    if not _RUN_ID.fullmatch(text):
        shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
        raise ValueError(f"{file} holds no run id but {shown}: remove it; the next attempt of the run writes a new one")
    return text


def shm_root(uid: int | None = None) -> Path:
    """The folder that holds the folders of a user's runs (None: of this user), which need not exist:
    `$LOCKSTEP_BEACONS`, else `/dev/shm/lockstep-UID`, else a folder in the temporary folder."""
    chosen = os.environ.get("LOCKSTEP_BEACONS")
    if chosen:
        return Path(chosen)
    name = f"lockstep-{os.geteuid() if uid is None else uid}"
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        return SHARED_MEMORY / name
    return Path(tempfile.gettempdir()) / name / "shm"


def run_shm_dir(run: str) -> Path:
    """The path of the run's folder, which need not exist. Raises ValueError if the run id is not valid."""
    if not _RUN_ID.fullmatch(run):
        raise ValueError(f"run id {run!r}: expected up to 63 letters, digits, '.', '_' or '-'; see new_run_id()")
    return shm_root() / run


def make_run_shm_dir(run: str) -> Path:
    """Creates the run's folder with mode 0700. Raises UnsafePath if another user could change what is in it."""
    folder = run_shm_dir(run)
    if os.environ.get("LOCKSTEP_BEACONS"):
        if not folder.parent.exists():
            folder.parent.parent.mkdir(parents=True, exist_ok=True)
            make_private_dir(folder.parent, "set LOCKSTEP_BEACONS to another folder")
        check_shared_folder(folder.parent, "set LOCKSTEP_BEACONS to a folder that belongs to you")
    else:
        _make_shm_root(folder.parent)
    return make_private_dir(folder, "choose another run id")


def _make_shm_root(root: Path) -> None:
    remedy = "remove it, or set LOCKSTEP_BEACONS to a folder in memory that belongs to you"
    if root.parent == SHARED_MEMORY:
        check_shared_folder(SHARED_MEMORY, remedy)
    else:
        make_user_temp_dir()
    make_private_dir(root, remedy)


def remove_stale_run_dirs() -> None:
    """Removes what killed processes have left in shared memory: the folders of runs that no process holds. A folder
    that `LOCKSTEP_BEACONS` names may contain other things as well, and stays as it is."""
    if not os.environ.get("LOCKSTEP_BEACONS"):
        remove_stale_folders(shm_root())


def make_user_temp_dir() -> Path:
    """The folder `lockstep-UID` in the temporary folder, for this user alone. Raises UnsafePath."""
    parent = Path(tempfile.gettempdir())
    check_shared_folder(parent, _TEMPORARY_REMEDY)
    return make_private_dir(parent / f"lockstep-{os.geteuid()}", f"remove it, or {_TEMPORARY_REMEDY}")


def check_shared_folder(folder: Path, remedy: str) -> None:
    """Raises UnsafePath if others than root and this user can replace what this user creates in the folder."""
    trusted = _trusted_owners(os.geteuid())
    try:
        link = folder.lstat()
        facts = folder.stat()
    except FileNotFoundError as error:
        raise UnsafePath(folder, "does not exist", remedy) from error
    if link.st_uid not in trusted:
        kind = "is a link that" if stat.S_ISLNK(link.st_mode) else "is a folder that"
        raise UnsafePath(folder, f"{kind} belongs to {user_name(link.st_uid)}", remedy)
    if not stat.S_ISDIR(facts.st_mode):
        raise UnsafePath(folder, "is not a folder", remedy)
    if facts.st_uid not in trusted:
        raise UnsafePath(folder, f"leads to a folder that belongs to {user_name(facts.st_uid)}", remedy)
    if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(facts.st_mode)
        raise UnsafePath(folder, f"(mode {mode:04o}) can be changed by other users", f"{remedy}, or chmod +t it")


def make_private_dir(folder: Path, remedy: str) -> Path:
    """Creates a folder for this user alone (mode 0700) inside a folder that others may write to. Raises UnsafePath if
    the path is not a folder of this user, or if others could write to it; `remedy` becomes part of the message."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
            raise
        facts = folder.lstat()
        kind = "belongs" if stat.S_ISDIR(facts.st_mode) else "is not a folder and belongs"
        raise UnsafePath(folder, f"{kind} to {user_name(facts.st_uid)}", remedy) from None
    try:
        facts = os.fstat(descriptor)
        if facts.st_uid != os.geteuid():
            raise UnsafePath(folder, f"belongs to {user_name(facts.st_uid)}, not to {user_name(os.geteuid())}", remedy)
        if facts.st_mode & 0o022:
            mode = stat.S_IMODE(facts.st_mode)
            raise UnsafePath(folder, f"(mode {mode:04o}) can be changed by other users", remedy)
        if stat.S_IMODE(facts.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return folder


def user_name(uid: int) -> str:
    """`uid 1000 (anna)`; without a name if the host knows none."""
    try:
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"uid {uid}"


@functools.cache
def _trusted_owners(user: int) -> frozenset[int]:
    """Root, the user, and in a user namespace (a container) the owner of what belongs to users outside of it, who is
    root for `/tmp` and `/dev/shm`."""
    trusted = {0, user}
    with contextlib.suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            trusted.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return frozenset(trusted)


# Files


def open_file(path: Path, flags: int = os.O_WRONLY) -> int:
    """Opens a file to write to it, or creates it with the access of its folder. Returns a descriptor. Raises UnsafePath
    instead of following a link, and for anything but a regular file."""
    while True:
        with contextlib.suppress(FileExistsError):
            return create_file(path, flags)
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            return _open_existing(path, flags)


def create_file(path: Path, flags: int = os.O_WRONLY) -> int:
    """Creates a file with the access of its folder, whatever the umask is. Returns a descriptor. Raises FileExistsError
    if the path exists, also as a link."""
    descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, _file_access(path.parent))
    return descriptor


def _folder_access(folder: Path) -> int:
    """The mode of a folder in this one: the same. Where everybody may write, folders and files in it are private."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    return 0o700 if mode & 0o002 else mode | 0o700


def _file_access(folder: Path) -> int:
    return _folder_access(folder) & 0o666


def set_access(path: Path) -> None:
    """Gives what another library has written, a file or a folder with everything in it, the access of its folder."""
    if path.is_symlink():
        return
    if path.is_dir():
        path.chmod(_folder_access(path.parent))
        for each in path.iterdir():
            set_access(each)
    else:
        path.chmod(_file_access(path.parent))


def make_folder(folder: Path) -> Path:
    """Creates a folder, and those above it, with the access of the folder in which it is, whatever the umask is; one
    that exists stays as it is. Raises UnsafePath if the path is a link, or not a folder."""
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        make_folder(folder.parent)
        return make_folder(folder)
    except FileExistsError:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise UnsafePath(folder, f"is {describe_kind(folder)}, not a folder", "remove it") from None
        return folder
    folder.chmod(_folder_access(folder.parent))
    return folder


def check_no_links(folder: Path, skip: Collection[str] = ()) -> None:
    """Raises UnsafePath if something in a folder, which somebody else may have prepared, leads writes to elsewhere: a
    link out of the folder, a pipe, a socket or a device; in a folder of another user also a file that has another name
    elsewhere. Does not look into the folders named in `skip`."""
    remedy = "remove it, or use a run folder that you have created"
    top, foreign = folder.resolve(), folder.stat().st_uid != os.geteuid()
    todo = [top]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                path = Path(entry.path)
                if entry.is_symlink():
                    if not path.resolve().is_relative_to(top):
                        raise UnsafePath(path, f"is {describe_kind(path)}, out of the run folder", remedy)
                elif entry.is_dir():
                    if not (path.parent == top and entry.name in skip):
                        todo.append(path)
                elif not entry.is_file():
                    raise UnsafePath(path, f"is {describe_kind(path)}, not a file", remedy)
                elif foreign and entry.stat().st_nlink > 1:
                    raise UnsafePath(path, "has another name elsewhere (a hard link)", remedy)


def _open_existing(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise _not_a_file(path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_file(path)
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    return descriptor


def _not_a_file(path: Path) -> UnsafePath:
    return UnsafePath(path, f"is {describe_kind(path)}, not a file", "remove it")


def describe_kind(path: Path) -> str:
    """`a link to /etc/passwd`, `a folder`, `a pipe`, ... for messages."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"a link to {path.readlink()}"
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISREG, "a file"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for check, name in kinds if check(mode)), "a device")


def open_own_file(path: Path) -> int:
    """Opens a file of this user for reading, without following a link; root may read the files of all users. Returns a
    descriptor. Raises OSError, and UnsafePath if the file belongs to another user or is no regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    facts, user = os.fstat(descriptor), os.geteuid()
    if stat.S_ISREG(facts.st_mode) and user in (facts.st_uid, 0):
        return descriptor
    os.close(descriptor)
    raise UnsafePath(path, f"is no file of {user_name(user)}", "remove it")


def write_private(path: Path, data: bytes) -> None:
    """Writes a new file, which in a private folder only this user can read. Raises FileExistsError if the path exists,
    also as a link."""
    with os.fdopen(create_file(path), "wb") as file:
        file.write(data)


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file so that readers see either all of `data` or the previous content."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write_private(draft, data)
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


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


# Temporary folders


def hold_folder(folder: Path) -> int:
    """Marks a folder as in use until the returned descriptor is closed, which the kernel does however the process
    ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # the file system has no locks; then the folder is never removed as stale
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def remove_stale_folders(parent: Path, prefix: str = "", prepare: Callable[[Path], object] | None = None) -> None:
    """Removes the folders of this user in `parent` that no process holds (see `hold_folder`), which killed processes
    have left. Calls `prepare` for each before."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                _remove_if_stale(Path(entry.path), prepare)


def _remove_if_stale(folder: Path, prepare: Callable[[Path], object] | None) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            facts = os.fstat(descriptor)
            if facts.st_uid == os.geteuid() and time.time() - facts.st_mtime > STALE_AFTER_S:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if prepare is not None:
                    prepare(folder)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


def make_scratch_dir(
    prefix: str, parent: Path | None = None, prepare_removal: Callable[[Path], object] | None = None
) -> tuple[Path, int]:
    """Creates a private folder with a random name in the temporary folder or in `parent`, and removes those of this
    prefix that killed processes have left, after a call of `prepare_removal` for each. Returns the path, and a
    descriptor that holds the folder."""
    if parent is None:
        parent = Path(tempfile.gettempdir())
        check_shared_folder(parent, _TEMPORARY_REMEDY)
    remove_stale_folders(parent, prefix, prepare_removal)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    return folder, hold_folder(folder)


@contextlib.contextmanager
def scratch_dir(prefix: str) -> Iterator[Path]:
    """A private folder for the duration of the context; see `make_scratch_dir`."""
    folder, hold = make_scratch_dir(prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(hold)
