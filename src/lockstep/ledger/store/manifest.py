"""The states of a run in a store: numbered manifests, each of which names the files of one complete state.

    PREFIX/NAME/manifests/000000000012.json    state 12: which files, their sizes and digests, and who wrote it
    PREFIX/NAME/files/steps/00000040.arrow/WRITER-SHA256

A state is written as the files that the one before lacks, then the manifest, which is created only if its number is
free. So a state is complete or absent, and of two writers that continue the same state one is refused. The files' keys
have the writer's id: no writer overwrites or deletes what another one names.
"""

import re
import socket
import time

import msgspec

from lockstep.ledger.errors import LedgerError
from lockstep.ledger.store.object_store import ObjectStore, StoreError

MANIFESTS, FILES = "manifests", "files"
FORMAT = 1
_NAME = re.compile(r"\d{12}\.json")


class StoredFile(msgspec.Struct, frozen=True):
    path: str
    """Relative to the run's folder."""
    key: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    run: str
    """The run's name."""
    folder: str
    """`folder` of its config."""
    sequence: int
    writer: str
    """The id of the process that wrote it."""
    host: str
    at: float
    files: tuple[StoredFile, ...] = ()
    """Empty until the run has something to resume from."""
    format: int = FORMAT

    @property
    def when(self) -> str:
        """The local time of `at`."""
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.at))


class ContinuedElsewhere(LedgerError):
    """Another process continues the run, from this state or from a later one."""

    def __init__(self, url: str, newest: Manifest) -> None:
        super().__init__(
            f"store {url}: a process on {newest.host} has continued the run since {newest.when}; this copy of it is "
            f"behind. Resume from the store on an empty folder: lockstep train --resume {url}"
        )
        self.url, self.newest = url, newest


def can_be_stored(path: str) -> bool:
    """Whether this is the path of a file in a run's folder that a store can hold: relative, without steps upwards,
    hidden folders at the top, or characters that are not printable."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and path[:1] != "." and not {"", ".", ".."} & {*parts}


def newest_manifest(store: ObjectStore) -> Manifest | None:
    """Returns the newest state of a run; None if the store has none. Raises StoreError if it is damaged."""
    for _ in range(3):  # the newest may become an old one, and be deleted, between the two requests
        names = [name for name in store.names(MANIFESTS) if _NAME.fullmatch(name)]
        if not names:
            return None
        try:
            return _parsed(store, names[-1], store.read(f"{MANIFESTS}/{names[-1]}"))
        except FileNotFoundError:
            continue
    raise StoreError(store.url, "its manifests change faster than they can be read: try again")


def put_manifest(store: ObjectStore, manifest: Manifest) -> Manifest:
    """Writes the next state, and returns it; or that which the same process has written under this number in an earlier
    try whose answer was lost. Raises ContinuedElsewhere if another process has written it, or a later one."""
    name = f"{manifest.sequence:012d}.json"
    try:
        store.create(f"{MANIFESTS}/{name}", msgspec.json.encode(manifest))
    except FileExistsError:
        there = _parsed(store, name, store.read(f"{MANIFESTS}/{name}"))
        if there.writer != manifest.writer:
            raise ContinuedElsewhere(store.url, there) from None
        manifest = there
    newest = newest_manifest(store)
    if newest is not None and newest.sequence > manifest.sequence:
        raise ContinuedElsewhere(store.url, newest)
    return manifest


def next_manifest(before: Manifest | None, run: str, folder: str, writer: str) -> Manifest:
    """The state after this one by a writer, with the same files."""
    sequence, files = (1, ()) if before is None else (before.sequence + 1, before.files)
    return Manifest(run, folder, sequence, writer, socket.gethostname(), time.time(), files)


def left_by_killed(store: ObjectStore, newest: Manifest) -> list[str]:
    """Returns the keys of states before the newest one, which their writer was killed before it deleted, and of their
    files that the newest state does not have."""
    kept, found = {file.key for file in newest.files}, list[str]()
    for name in store.names(MANIFESTS):
        if _NAME.fullmatch(name) and int(name[:12]) < newest.sequence:
            try:
                older = _parsed(store, name, store.read(f"{MANIFESTS}/{name}"))
            except (FileNotFoundError, StoreError):  # a damaged one is nobody's: it stays, and harms nothing
                continue
            found += [f"{MANIFESTS}/{name}", *(file.key for file in older.files if file.key not in kept)]
    return found


def _parsed(store: ObjectStore, name: str, data: bytes) -> Manifest:
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(store.url, f"{name} is no manifest ({error})") from error
    if manifest.format != FORMAT:
        raise StoreError(store.url, f"{name} has format {manifest.format}, this lockstep reads {FORMAT}")
    for file in manifest.files:
        if not can_be_stored(file.path) or not file.key.startswith(f"{FILES}/{file.path}/"):
            raise StoreError(store.url, f"{name} names a file outside of the run's folder: {file.path[:200]!r}")
    return manifest
