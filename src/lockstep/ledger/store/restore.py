"""Makes the folder of a run from its newest state in a store."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from lockstep.base.folders import create_file, make_folder, make_scratch_dir
from lockstep.base.text import count_noun
from lockstep.ledger.durable_files import disk_full_as_ledger_error, fsync_folder, replace_file, sha256_file
from lockstep.ledger.errors import FolderExists, LedgerError
from lockstep.ledger.run_folder import INDEX_FILE, SUMMARY_FILE
from lockstep.ledger.store.manifest import Manifest, newest_manifest
from lockstep.ledger.store.object_store import ObjectStore, StoreError, open_store

STATE_FILE = "store.json"
"""In the run's folder: which state of the store it continues."""


class StoreState(msgspec.Struct, frozen=True):
    """What a run's folder knows of its copy in a store."""

    url: str
    """Of the run, with its name."""
    writers: tuple[str, ...]
    """Ids of the processes whose states this folder continues: the last, and the one before it."""
    complete: bool = False
    """Whether the run ended and its store has all of it."""


class NothingStored(LedgerError):
    """The store has no state of the run to resume from."""

    def __init__(self, url: str, why: str) -> None:
        super().__init__(f"store {url}: {why}")
        self.url = url


def read_state(folder: Path) -> StoreState | None:
    """Returns what a folder knows of its copy; None if it has none, or if the file is damaged."""
    try:
        return msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=StoreState)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def write_state(folder: Path, state: StoreState) -> None:
    replace_file(folder / STATE_FILE, msgspec.json.encode(state))


def restore_run(url: str, parent: Path | None = None, report: Callable[[str], None] = lambda text: None) -> Path:
    """Makes the folder of a run from the newest state in its store, and returns it.

    A folder that continues this state already is returned as it is. Every file is compared with its digest. If it
    fails, no folder is left.

    Args:
        url: of the run in the store, `s3://bucket/prefix/NAME`.
        parent: the folder for the run's own, instead of that of its config.

    Raises:
        NothingStored: the store has no such run, or nothing to resume it from.
        FolderExists: there is such a folder, with another state.
        StoreError: the store does not answer, or a file differs from its digest.
    """
    store = open_store(url)
    manifest = newest_manifest(store)
    if manifest is None:
        raise NothingStored(store.url, "there is no run: the address ends with the run's name")
    if not any(file.path == INDEX_FILE for file in manifest.files):
        raise NothingStored(store.url, "the run was begun, and has nothing to resume from: start it again")
    if store.url.rpartition("/")[2] != manifest.run:
        raise StoreError(store.url, f"its newest state is of a run of another name: {manifest.run[:200]!r}")
    folder = ((Path(manifest.folder) if parent is None else parent) / manifest.run).absolute()
    if os.path.lexists(folder):
        state = read_state(folder)
        if state is not None and state.url == store.url and manifest.writer in state.writers:
            return folder
        raise FolderExists(folder, (folder / INDEX_FILE).exists())
    for _ in range(3):
        try:
            _download(store, manifest, folder, report)
            return folder
        except FileNotFoundError:
            newest = newest_manifest(store)
            if newest is None or newest.sequence == manifest.sequence:
                raise StoreError(store.url, f"files of state {manifest.sequence} are missing") from None
            manifest = newest  # its writer deleted what it does not need any more
    raise StoreError(store.url, "its states change faster than they can be downloaded: stop the other process first")


def _download(store: ObjectStore, manifest: Manifest, folder: Path, report: Callable[[str], None]) -> None:
    total = sum(file.size for file in manifest.files)
    report(f"downloading {count_noun(len(manifest.files), 'file')} ({total / 1e6:,.1f} MB) from {store.url}")
    with disk_full_as_ledger_error(folder, total):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary, hold = make_scratch_dir(f".{folder.name}.tmp-", folder.parent)
    try:
        with disk_full_as_ledger_error(folder, total):
            for name in ("steps", "checkpoints", "logs"):
                make_folder(temporary / name)
            for file in manifest.files:
                target = temporary / file.path
                make_folder(target.parent)
                os.close(create_file(target))
                store.download(file.key, target, lambda count: None)
                if target.stat().st_size != file.size or sha256_file(target) != file.sha256:
                    problem = f"{file.key} differs from its digest: it was damaged or changed in the store"
                    raise StoreError(store.url, problem)
                with target.open("rb") as opened:
                    os.fsync(opened.fileno())
            ended = any(file.path == SUMMARY_FILE for file in manifest.files)  # only the last state of a run has it
            write_state(temporary, StoreState(store.url, (manifest.writer,), complete=ended))
            for each in {path.parent for path in temporary.rglob("*")}:
                fsync_folder(each)
            try:
                temporary.rename(folder)
            except OSError as error:
                if folder.exists():
                    raise FolderExists(folder, (folder / INDEX_FILE).exists()) from error
                raise
            fsync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        with contextlib.suppress(OSError):
            os.close(hold)
