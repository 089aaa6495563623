"""Copies a run to its store while it trains, in a thread.

The thread looks once a second at the ledger for a new step file or checkpoint. The files of a state are opened before
the first one is sent, so that what the run deletes meanwhile can still be read, and at most one state is held. What the
store refuses is tried again, with growing pauses; training continues, and `finish` says what is missing.
"""

import contextlib
import hashlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path

import msgspec

from lockstep.base import waits
from lockstep.base.folders import scratch_dir
from lockstep.base.text import count_noun
from lockstep.base.wait_state import WaitTimeout
from lockstep.config.fault_tolerance import StoreConfig
from lockstep.ledger.durable_files import RunLock
from lockstep.ledger.errors import LedgerError, StaleGeneration
from lockstep.ledger.ledger import Ledger
from lockstep.ledger.run_folder import CONFIG_FILE, INDEX_FILE, INPUTS_FOLDER, LOCK_FILE, SUMMARY_FILE
from lockstep.ledger.sqlite_index import CheckpointRow, LedgerIndex
from lockstep.ledger.store.manifest import (
    FILES,
    MANIFESTS,
    ContinuedElsewhere,
    Manifest,
    StoredFile,
    can_be_stored,
    left_by_killed,
    newest_manifest,
    next_manifest,
    put_manifest,
)
from lockstep.ledger.store.object_store import ObjectStore, StoreError, open_store
from lockstep.ledger.store.restore import StoreState, read_state, write_state

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pauses after a failed try; each is twice as long as the one before."""
_KEPT_FOLDERS = (INPUTS_FOLDER, "reference", "images")
"""Folders of immutable files besides steps and checkpoints."""
_AT_END = (SUMMARY_FILE, CONFIG_FILE, "report.html", "metrics.jsonl")


class StoreIncomplete(LedgerError):
    """The run ended, and its store lacks files. They are complete on the local disk."""

    def __init__(self, url: str, folder: Path, missing: int, problem: str) -> None:
        super().__init__(
            f"store {url} lacks {count_noun(missing, 'file')} of the run, which are complete in {folder}: {problem}. "
            f"Upload them with: lockstep train --resume {folder}"
        )
        self.url, self.folder, self.missing, self.problem = url, folder, missing, problem


@dataclass(slots=True)
class _State:
    """The open files of a state to copy, by path in the run's folder."""

    steps: dict[int, str]
    """The digests of the step files that the ledger has."""
    index: str
    """What the copy of the index depends on."""
    files: dict[str, BufferedReader] = field(default_factory=dict)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


class StoreMirror:
    """The copy of a run in a store.

    Args:
        report: shows a line to the user.
        finish_s: how long the end of the run waits for uploads that move no bytes.
    """

    def __init__(
        self, url: str, run: str, parent: str, report: Callable[[str], None] = log.warning, finish_s: float = 300.0
    ) -> None:
        self.report, self.finish_s = report, finish_s
        self._run, self._parent = run, parent
        self._store: ObjectStore = _run_store(url, run)
        self.url = self._store.url
        self._writer = uuid.uuid4().hex
        self._newest: Manifest | None = None
        self._older: Manifest | None = None
        self._folder = Path()
        self._done: tuple[dict[int, str], str, tuple[str, ...]] | None = None
        """Steps, index and files at the end of the run that are in the store."""
        self._known: dict[tuple[int, int, int], StoredFile] = {}
        """Uploaded files, by device, inode and time of their change."""
        self._garbage: list[str] = []
        self._left_out: set[str] = set()
        """Paths that are not copied, which was said."""
        self._moved: dict[str, int] = {}
        """The most bytes of each file that a try moved. What each try moves again is no progress."""
        self._missing = 0
        self._problem = ""
        self._failed = False
        self._superseded: ContinuedElsewhere | None = None
        self._at_end: tuple[str, ...] = ()
        self._ending, self._stopped, self._complete = threading.Event(), threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, folder: Path | None) -> None:
        """Becomes the writer of the run: from here on, the writes of earlier processes are refused.

        Args:
            folder: the run's folder, to resume it; None for a new run.

        Raises:
            ContinuedElsewhere: another process has continued the run since this folder did, or does so at this moment.
            StoreError: the store has another run of this name, or does not answer.
        """
        self._newest = newest_manifest(self._store)
        state = None if folder is None else read_state(folder)
        if self._newest is not None and self._newest.files:
            if folder is None:
                remedy = f"resume it (--resume {self.url}), choose another name, or another store"
                raise StoreError(self.url, f"already holds a run of {self._newest.host}: {remedy}")
            if state is None or state.url != self.url or self._newest.writer not in state.writers:
                raise ContinuedElsewhere(self.url, self._newest)
        elif self._newest is not None and folder is None:
            began = f"a process on {self._newest.host} began a run of this name at {self._newest.when}"
            self.report(f"store {self.url}: {began} and has stored nothing: if it still runs, it will stop")
        claimed = next_manifest(self._newest, self._run, self._parent, self._writer)
        if folder is not None:  # before the claim: if this process is killed after it, the folder still continues it
            before = () if self._newest is None else (self._newest.writer,)
            write_state(folder, StoreState(self.url, (self._writer, *before)))
        put_manifest(self._store, claimed)
        self._garbage = [] if self._newest is None else left_by_killed(self._store, self._newest)
        self._older, self._newest = self._newest, claimed

    def start(self, folder: Path) -> None:
        """Begins to copy the folder of the run, which exists now."""
        self._folder = folder
        write_state(folder, StoreState(self.url, (self._writer,)))
        self._thread = threading.Thread(target=self._follow, name="store", daemon=True)
        self._thread.start()

    def finish(self, exports: Sequence[str] = ()) -> None:
        """Copies the end of the run, with its reports and these folders, and waits for it as long as bytes move. Raises
        StoreIncomplete, or ContinuedElsewhere."""
        self._at_end = (*_AT_END, *exports)
        self._ending.set()
        assert self._thread is not None
        try:
            why = "the last files of the run"
            waits.event(self._complete, waits_for=self.url, why=why, stall_s=self.finish_s, progress=self._progress)
        except WaitTimeout as error:
            problem = self._problem or f"no bytes moved for {error.waited_s:.0f} s"
            raise StoreIncomplete(self.url, self._folder, max(self._missing, 1), problem) from error
        finally:
            self._stopped.set()
        if self._superseded is not None:
            raise self._superseded
        write_state(self._folder, StoreState(self.url, (self._writer,), complete=True))

    def stop(self) -> None:
        """Ends the thread after its present try, without the end of the run."""
        self._stopped.set()
        self._ending.set()

    def copy_now(self) -> bool:
        """Copies what is new. Returns whether the store has everything that it should have now."""
        at_end = self._at_end if self._ending.is_set() else ()
        with scratch_dir("lockstep-store-") as scratch:
            state = self._open_state(at_end, scratch)
            if state is None:
                return True
            try:
                self._put_state(state)
            finally:
                state.close()
        self._done = state.steps, state.index, at_end
        return not self._ending.is_set() or bool(at_end)

    def _follow(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._stopped.is_set():
            ending = self._ending.is_set()
            try:
                complete = self.copy_now()
                if self._failed:
                    self.report(f"store {self.url}: works again, everything up to now is copied")
                self._failed, pause, self._problem = False, FIRST_PAUSE_S, ""
                if ending and complete:
                    break
            except ContinuedElsewhere as error:
                self._superseded = error
                self.report(f"{error}. This run stops")
                self._stop_run()
                break
            except Exception as error:  # noqa: BLE001  # whatever it is, the thread must not end without a word
                self._problem = str(error) or type(error).__name__
                if not self._failed:
                    self.report(f"{self._problem}; training continues, and the copy is tried again")
                log.info("copying to %s failed, next try in %g s: %s", self.url, pause, error)
                self._failed = True
                self._pause(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
                continue
            if not ending:
                self._pause(LOOK_EVERY_S)
        self._complete.set()

    def _pause(self, seconds: float) -> None:
        event = self._stopped if self._ending.is_set() else self._ending
        with contextlib.suppress(WaitTimeout):
            waits.event(event, waits_for="the run", why="its next step", timeout_s=seconds)

    def _stop_run(self) -> None:
        """Claims the next generation of the ledger, so that the writes of this run are refused."""
        with contextlib.suppress(LedgerError, OSError):
            LedgerIndex.write(self._folder / INDEX_FILE).close()

    def _open_state(self, at_end: tuple[str, ...], scratch: Path) -> _State | None:
        """Opens the files of the run's present state; None if the store has it, or if there is nothing to resume. If
        the run deletes some of them before they are open, its index lists others by then, and those are opened."""
        with Ledger.reader(self._folder) as ledger:
            while True:
                checkpoints, steps = listed = _listed(ledger)
                mark = f"{ledger.generation} {[(row.step, row.at) for row in checkpoints]} {ledger.draws()} {at_end}"
                if not (checkpoints or steps) or self._done == (steps, mark, at_end):
                    return None
                state = _State(steps, mark)
                try:
                    self._open_files(ledger, state, [row.path for row in checkpoints], scratch, at_end)
                    if _listed(ledger)[0] == checkpoints:
                        return state
                except BaseException as error:
                    state.close()
                    if not isinstance(error, FileNotFoundError) or _listed(ledger) == listed:
                        raise
                state.close()

    def _open_files(
        self, ledger: Ledger, state: _State, checkpoints: list[Path], scratch: Path, at_end: tuple[str, ...]
    ) -> None:
        done = self._done
        appended = done is not None and done[1] == state.index and done[0].items() <= state.steps.items()
        if not appended:  # else the index in the store is completed from the step files
            ledger.copy_index(scratch / INDEX_FILE, min(state.steps, default=0))
            state.files[INDEX_FILE] = (scratch / INDEX_FILE).open("rb")
        paths = [ledger.step_path(step) for step in state.steps]
        folders = [*checkpoints, *(self._folder / name for name in _KEPT_FOLDERS)]
        for extra in at_end:
            path = Path(os.path.normpath(self._folder / extra))
            if path.exists() and self._is_copied(path):
                (folders if path.is_dir() else paths).append(path)
        for top in folders:
            paths += [each for each in sorted(top.rglob("*")) if each.is_file() and not each.name.startswith(".")]
        for path in filter(self._is_copied, paths):
            state.files[str(path.relative_to(self._folder))] = path.open("rb")

    def _is_copied(self, path: Path) -> bool:
        """Whether a file or folder can be copied. If not, says so once."""
        inside = path.is_relative_to(self._folder) and path.resolve().is_relative_to(self._folder.resolve())
        copied = inside and can_be_stored(str(path.relative_to(self._folder)))
        if not copied and str(path) not in self._left_out:
            self._left_out.add(str(path))
            why = "its name has characters that a store cannot hold" if inside else "it is outside of the run's folder"
            self.report(f"store {self.url}: {str(path)!r} is not copied: {why}")
        return copied

    def _put_state(self, state: _State) -> None:
        """Uploads what the store lacks of a state, and then its manifest."""
        assert self._newest is not None
        index = [file for file in self._newest.files if file.path == INDEX_FILE and INDEX_FILE not in state.files]
        stored, self._missing = list(index), len(state.files)
        for path, opened in state.files.items():
            stored.append(self._uploaded(path, opened))
            self._missing -= 1
        self._missing = 1  # the manifest, without which the files are none
        older = self._older
        while True:
            manifest = next_manifest(self._newest, self._run, self._parent, self._writer)
            manifest = msgspec.structs.replace(manifest, files=tuple(stored))
            there = put_manifest(self._store, manifest)
            if there.files == manifest.files:
                break
            self._older, self._newest = self._newest, there  # of an earlier try, whose answer was lost
        self._missing, self._moved = 0, {}
        self._delete_older(there, older)

    def _uploaded(self, path: str, opened: BufferedReader) -> StoredFile:
        facts = os.fstat(opened.fileno())
        identity = facts.st_dev, facts.st_ino, facts.st_mtime_ns
        known = self._known.get(identity)
        if known is not None and known.path == path and known.size == facts.st_size:
            return known
        opened.seek(0)
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        before = () if self._newest is None else self._newest.files
        same = next((each for each in before if (each.path, each.sha256) == (path, digest)), None)
        if same is not None:  # of the process that this one continues
            self._known[identity] = same
            return same
        key = f"{FILES}/{path}/{self._writer}-{digest}"
        # The file may have no name any more: this one leads to it all the same.
        moved = [0]

        def count(number: int) -> None:
            moved[0] += number
            self._moved[path] = max(self._moved.get(path, 0), moved[0])

        self._store.upload(key, Path(f"/proc/self/fd/{opened.fileno()}"), count)
        stored = StoredFile(path, key, facts.st_size, digest)
        self._known[identity] = stored
        return stored

    def _progress(self) -> int:
        return sum(dict(self._moved).values())

    def _delete_older(self, newest: Manifest, oldest: Manifest | None) -> None:
        """Deletes the states from the oldest one to that before the last, and their files that no kept state has. Files
        are named by what this process has read or written, so that those of another writer stay."""
        dropped = {each.sequence: each for each in (oldest, self._older) if each is not None}
        self._older, self._newest = self._newest, newest
        kept = {file.key for manifest in (self._older, newest) if manifest is not None for file in manifest.files}
        for each in dropped.values():
            self._garbage.append(f"{MANIFESTS}/{each.sequence:012d}.json")
            self._garbage += [file.key for file in each.files]
        self._garbage = [key for key in dict.fromkeys(self._garbage) if key not in kept]
        self._known = {identity: file for identity, file in self._known.items() if file.key in kept}
        try:
            self._store.delete(self._garbage)
            self._garbage = []
        except (StoreError, OSError) as error:
            log.info("old files are not deleted yet: %s", error)


def claim_store(config: StoreConfig | None, run: str, parent: str, folder: Path | None) -> StoreMirror | None:
    """Becomes the writer of the copy of a run, see `StoreMirror.claim`; None if the run has no store. Raises
    RunIsActive if a process executes the run in this folder: it would be refused from then on."""
    if config is None:
        return None
    mirror = StoreMirror(config.url, run, parent, finish_s=config.finish_s)
    with contextlib.nullcontext() if folder is None else contextlib.closing(RunLock(folder / LOCK_FILE)):
        mirror.claim(folder)
    return mirror


def has_all(config: StoreConfig | None, run: str, folder: Path) -> bool:
    """Whether the store of a run that ended has all of it, as far as its folder knows; True if it has no store."""
    if config is None:
        return True
    state = read_state(folder)
    return state is not None and state.complete and state.url == _run_store(config.url, run).url


def _listed(ledger: Ledger) -> tuple[list[CheckpointRow], dict[int, str]]:
    """Returns the checkpoints, and the digests of the step files that a run needs to go on from the older of the newest
    two."""
    checkpoints = ledger.checkpoints()
    first = checkpoints[-2].step + 1 if len(checkpoints) > 1 else 0
    return checkpoints, {step: digest for step, digest in ledger.step_digests().items() if step >= first}


def _run_store(url: str, run: str) -> ObjectStore:
    return open_store(f"{url.rstrip('/')}/{run}")


@contextlib.contextmanager
def mirrored(
    mirror: StoreMirror | None, ledger: Ledger, exports: Sequence[str], report: Callable[[str], None]
) -> Iterator[None]:
    """Copies the run of a ledger to its store as long as the context lasts, and at its end what is left. If the run
    failed, an incomplete copy is a warning besides; else it raises StoreIncomplete."""
    if mirror is None:
        yield
        return
    mirror.report = report
    mirror.start(ledger.folder)
    try:
        yield
    except StaleGeneration:
        mirror.stop()
        raise
    except BaseException:
        try:
            mirror.finish(exports)
        except LedgerError as error:
            report(str(error))
        raise
    mirror.finish(exports)
