"""Objects under keys: a folder that several machines share, or an S3-compatible object store through fsspec.

An object is either complete or absent. `create` is conditional: of two writers of one key, one gets FileExistsError.
Every call is bounded and names the store as what is waited for. Credentials come from the environment or the profile of
the AWS libraries only; no address, error or log line has any.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lockstep.base import waits
from lockstep.base.folders import create_file, make_folder
from lockstep.base.secrets import redact_text, secret_values
from lockstep.base.text import count_noun, first_line
from lockstep.base.wait_state import WaitTimeout
from lockstep.ledger.durable_files import fsync_folder
from lockstep.ledger.errors import LedgerError

T = TypeVar("T")

STALL_S = 120.0
"""A transfer that moves no bytes for this long has failed, and is tried again."""
_CONNECT_S, _READ_S = 10, 60
_PART_BYTES = 16 << 20
"""Larger objects are uploaded in parts of this size, which become visible together."""
_MAX_PARTS = 9000
"""S3 takes 10,000 parts."""


class StoreError(LedgerError):
    """The store cannot be used, or did not answer. What is on the local disk is complete without it."""

    def __init__(self, url: str, problem: str) -> None:
        super().__init__(f"store {url}: {redact_text(problem, secret_values(os.environ))}")
        self.url, self.problem = url, problem


class ObjectStore(Protocol):
    """The methods raise StoreError if the store refuses or does not answer, and FileNotFoundError for a missing key."""

    url: str

    def create(self, key: str, data: bytes) -> None:
        """Writes a new object. Raises FileExistsError if there is one under the key."""

    def upload(self, key: str, file: Path, moved: Callable[[int], None]) -> None:
        """Writes an object from a file, over an equal one. Calls `moved` with numbers of bytes."""

    def read(self, key: str) -> bytes: ...

    def download(self, key: str, file: Path, moved: Callable[[int], None]) -> None: ...

    def names(self, prefix: str) -> list[str]:
        """Returns the names of the objects directly below a prefix, sorted; none if there is no such prefix."""

    def delete(self, keys: list[str]) -> None:
        """Deletes objects; those that are missing are skipped."""


def is_store_url(text: str) -> bool:
    """Whether this names a store, and not a folder."""
    return "://" in text


def open_store(url: str) -> ObjectStore:
    """Opens a store: `s3://bucket/prefix`, `file:///shared/folder`, or `memory://name` within one process. Raises
    StoreError."""
    protocol, _, rest = url.partition("://")
    url = url.rstrip("/")
    if protocol == "file":
        if not rest.startswith("/"):
            raise StoreError(url, "the path is not absolute: write file:///FOLDER")
        folder = Path(os.path.normpath(f"/{rest.lstrip('/')}"))  # one spelling of each folder
        return FolderStore(f"file://{folder}", folder)
    if protocol not in ("s3", "memory"):
        raise StoreError(url, f"{protocol!r} is not supported: use s3://BUCKET/PREFIX or file:///FOLDER")
    return FsspecStore(url, protocol, rest.strip("/"))


class FolderStore:
    """A folder on a disk that several machines share, such as NFS. Files are written under another name, synchronised,
    and then named: by a hard link, which fails if the name is taken, where that matters."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self._folder = url, folder

    def create(self, key: str, data: bytes) -> None:
        def write() -> None:
            with self._writing(key) as (target, hidden):
                hidden.write_bytes(data)
                _sync(hidden)
                os.link(hidden, target)

        self._bounded(f"write {key}", write)

    def upload(self, key: str, file: Path, moved: Callable[[int], None]) -> None:
        source = file.open("rb")  # here: an upload that is given up must not read what has its number later

        def write(count: Callable[[int], None]) -> None:
            with source, self._writing(key) as (target, hidden):
                _copy(source, hidden, count)
                _sync(hidden)
                hidden.rename(target)

        _transfer(self.url, f"upload {key}", moved, write)

    def read(self, key: str) -> bytes:
        return self._bounded(f"read {key}", (self._folder / key).read_bytes)

    def download(self, key: str, file: Path, moved: Callable[[int], None]) -> None:
        def read(count: Callable[[int], None]) -> None:
            with (self._folder / key).open("rb") as source:
                _copy(source, file, count)

        _transfer(self.url, f"download {key}", moved, read)

    def names(self, prefix: str) -> list[str]:
        def entries() -> list[str]:
            try:
                return sorted(each.name for each in (self._folder / prefix).iterdir() if not each.name.startswith("."))
            except FileNotFoundError:
                return []

        return self._bounded(f"list {prefix}", entries)

    def delete(self, keys: list[str]) -> None:
        def remove() -> None:
            for key in keys:
                path = self._folder / key
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # another object is in it
                    path.parent.rmdir()

        self._bounded(f"delete {count_noun(len(keys), 'object')}", remove)

    @contextlib.contextmanager
    def _writing(self, key: str) -> Any:
        target = self._folder / key
        make_folder(target.parent)
        hidden = target.with_name(f".{target.name[:100]}.{os.getpid()}-{threading.get_ident()}.tmp")
        try:
            hidden.unlink(missing_ok=True)
            os.close(create_file(hidden))
            yield target, hidden
            fsync_folder(target.parent)
        finally:
            hidden.unlink(missing_ok=True)

    def _bounded(self, what: str, work: Callable[[], T]) -> T:
        with _errors(self.url):
            return _wait(self.url, what, work, timeout_s=STALL_S)


class FsspecStore:
    """An object store through fsspec."""

    def __init__(self, url: str, protocol: str, path: str) -> None:
        self.url, self._path = url, path
        try:
            import fsspec

            self._files: Any = fsspec.filesystem(protocol, **(_s3_options() if protocol == "s3" else {}))
        except ImportError as error:
            remedy = "install the extra: pip install 'lockstep-rl[s3]'"
            raise StoreError(url, f"{first_line(error)}: {remedy}") from error

    def create(self, key: str, data: bytes) -> None:
        def put() -> None:
            self._files.pipe_file(self._at(key), data, mode="create")

        with _errors(self.url):
            try:
                _wait(self.url, f"write {key}", put, timeout_s=STALL_S)
            except FileNotFoundError as error:
                raise StoreError(self.url, first_line(error)) from error  # the bucket
            except OSError as error:
                if isinstance(error, FileExistsError) or "PreconditionFailed" in f"{error}{error.__cause__!r}":
                    raise FileExistsError(key) from error
                raise

    def upload(self, key: str, file: Path, moved: Callable[[int], None]) -> None:
        part = max(_PART_BYTES, file.stat().st_size // _MAX_PARTS)
        options = {"chunksize": part} if self._files.protocol != "memory" else {}
        self._transfer(f"upload {key}", moved, lambda callback: self._files.put_file(
            str(file), self._at(key), callback=callback, **options))  # fmt: skip

    def read(self, key: str) -> bytes:
        with _errors(self.url):
            return bytes(_wait(self.url, f"read {key}", lambda: self._files.cat_file(self._at(key)), timeout_s=STALL_S))

    def download(self, key: str, file: Path, moved: Callable[[int], None]) -> None:
        self._transfer(f"download {key}", moved, lambda callback: self._files.get_file(
            self._at(key), str(file), callback=callback))  # fmt: skip

    def names(self, prefix: str) -> list[str]:
        def entries() -> list[str]:
            try:
                found = self._files.ls(self._at(prefix), detail=False, refresh=True)
            except FileNotFoundError:
                return []
            return sorted(name for each in found if (name := str(each).rstrip("/").rpartition("/")[2]))

        with _errors(self.url):
            return _wait(self.url, f"list {prefix}", entries, timeout_s=STALL_S)

    def delete(self, keys: list[str]) -> None:
        def remove() -> None:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._files.rm_file(self._at(key))

        with _errors(self.url):
            _wait(self.url, f"delete {count_noun(len(keys), 'object')}", remove, timeout_s=STALL_S)

    def _transfer(self, what: str, moved: Callable[[int], None], work: Callable[[Any], None]) -> None:
        from fsspec.callbacks import Callback

        def transfer(count: Callable[[int], None]) -> None:
            class Progress(Callback):  # type: ignore[misc]
                def relative_update(self, inc: int = 1) -> None:
                    count(inc)

            work(Progress())

        _transfer(self.url, what, moved, transfer)

    def _at(self, key: str) -> str:
        return f"{self._path}/{key}"


def _s3_options() -> dict[str, Any]:
    """Options of s3fs: bounded calls, and no cache of listings, which other machines change."""
    bounds = {"connect_timeout": _CONNECT_S, "read_timeout": _READ_S, "retries": {"max_attempts": 2}}
    return {"config_kwargs": bounds, "use_listings_cache": False, "skip_instance_cache": True}


def _wait(url: str, what: str, work: Callable[[], T], **bounds: Any) -> T:
    return waits.future(waits.run_in_thread(work, "store"), waits_for=url, why=what, **bounds)


def _transfer(url: str, what: str, moved: Callable[[int], None], work: Callable[[Callable[[int], None]], None]) -> None:
    """Moves bytes in a thread, and waits as long as they move."""
    bytes_moved = [0]

    def count(number: int) -> None:
        bytes_moved[0] += number
        moved(number)

    with _errors(url):
        _wait(url, what, lambda: work(count), stall_s=STALL_S, progress=lambda: bytes_moved[0])


@contextlib.contextmanager
def _errors(url: str) -> Any:
    """Converts the many errors of the libraries to StoreError, except for missing and existing keys."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, StoreError):
        raise
    except WaitTimeout as error:
        raise StoreError(url, f"no answer for {error.waited_s:.0f} s ({error.why})") from error
    except Exception as error:
        raise StoreError(url, f"{type(error).__name__}: {first_line(error)}") from error


def _copy(source: Any, file: Path, moved: Callable[[int], None]) -> None:
    with file.open("wb") as sink:
        while block := source.read(1 << 20):
            sink.write(block)
            moved(len(block))


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
