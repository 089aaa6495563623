"""The durable record of a run: rollouts, commits, and an index of everything else.

    runs/NAME/
      config.yaml             a copy of the resolved config to read; the one that counts is in the index
      ledger.sqlite           the index: steps, commits, checkpoints, evaluations, metrics, events
      steps/00000012.arrow    rollouts of step 12, immutable
      steps/00000013.partial  finished completions of step 13, which is not complete yet
      reference/00000002.safetensors  reference log-probabilities of 256 samples, immutable
      checkpoints/  logs/

A step here is an index, from 0: the number of steps done before it. Names of files, metrics and messages call it by its
number, from 1 (`Ledger.number`): the number of steps done after it.

`record_rollouts` makes the step file durable, then its row in the index, and then returns. Only one thread of one
process writes. Writes are refused when another process has claimed the run."""

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.base.folders import check_no_links, create_file, make_folder, make_scratch_dir, set_access
from lockstep.data.samples import Completion, Rollouts
from lockstep.ledger import json_values, load_blocks, metric_blocks, partial_rollouts, sqlite_index
from lockstep.ledger.config_changes import ConfigChange, allowed_changes
from lockstep.ledger.durable_files import RunLock, disk_full_as_ledger_error, fsync_folder, replace_file, sha256_file
from lockstep.ledger.errors import FolderExists, OutOfOrder, StepCollected, StepConflict, StepCorrupt
from lockstep.ledger.rank_loads import RankLoadRecords
from lockstep.ledger.reference_chunks import ReferenceChunks
from lockstep.ledger.retention import Retention
from lockstep.ledger.run_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    INPUTS_FOLDER,
    LOCK_FILE,
    REWINDING,
    add_step,
    check_run_folder,
    config_yaml,
    finish_rewind,
    holds_only_inputs,
    last_commit,
    recover_folder,
)
from lockstep.ledger.run_records import RunRecords
from lockstep.ledger.sqlite_index import CheckpointRow, CommitRow, LedgerIndex, StoredStep

_TRACKER_FOLDERS = ("wandb",)
"""Folders in which a tracker makes links of its own."""


class Ledger(ReferenceChunks, RankLoadRecords, RunRecords, Retention):
    """The ledger of a run, opened by `create`, `resume` or `reader`. A context manager. Its methods raise the errors of
    `ledger.errors`."""

    def __init__(self, folder: Path, index: LedgerIndex, lock: RunLock | None) -> None:
        self.folder = folder
        self.changes: tuple[ConfigChange, ...] = ()
        """Changes of the config that `resume` accepted."""
        super().__init__(index)
        self._lock = lock
        self._partial_log: partial_rollouts.PartialLog | None = None
        self._partial_step = -1
        """The step whose completions are in `_partial_log`."""

    @classmethod
    def create(cls, folder: Path, config: Mapping[str, Any], mode: int = 0o700) -> "Ledger":
        """Creates a run, with generation 1, in a folder of this mode, whatever the umask is. Raises FolderExists if
        `folder` exists, unless it holds only the inputs of the run, which it keeps. If it fails, no folder is left;
        what a killed process left is removed by the next attempt."""
        folder = folder.absolute()
        if os.path.lexists(folder) and not holds_only_inputs(folder):
            raise FolderExists(folder, (folder / INDEX_FILE).exists())
        with disk_full_as_ledger_error(folder, None):
            folder.parent.mkdir(parents=True, exist_ok=True)
            temporary, hold = make_scratch_dir(f".{folder.name}.tmp-", folder.parent)
        try:
            with disk_full_as_ledger_error(folder, None):
                temporary.chmod(mode)
                for name in ("steps", "checkpoints", "logs"):
                    make_folder(temporary / name)
                os.close(create_file(temporary / INDEX_FILE))
            replace_file(temporary / CONFIG_FILE, config_yaml(config))
            LedgerIndex.create(temporary / INDEX_FILE, json_values.dumps(dict(config), "config"))
            fsync_folder(temporary)
            with suppress(FileNotFoundError):
                (folder / INPUTS_FOLDER).rename(temporary / INPUTS_FOLDER)
                set_access(temporary / INPUTS_FOLDER)
            try:
                temporary.rename(folder)
            except OSError as error:  # another process may have created it meanwhile
                if folder.exists():
                    raise FolderExists(folder, (folder / INDEX_FILE).exists()) from error
                raise
            fsync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):
                folder.rmdir()  # empty if its inputs were moved
            raise
        finally:
            os.close(hold)
        return cls.resume(folder)

    @classmethod
    def resume(
        cls,
        folder: Path,
        config: Mapping[str, Any] | None = None,
        accept: Collection[str] = (),
        takeover: bool = False,
    ) -> "Ledger":
        """Resumes a run: claims the next generation, and repairs the folder if the last process was killed.

        `config`, if given, becomes the config of the run. Raises ConfigChanged, before anything is claimed, if it would
        change the result by other fields than those in `accept`. Raises RunIsActive if another process executes the
        run; with `takeover`, that process's writes are refused from then on. Raises UnsafePath if a write to the folder
        would end elsewhere."""
        folder = folder.absolute()
        check_run_folder(folder)
        check_no_links(folder, skip=_TRACKER_FOLDERS)
        lock = RunLock(folder / LOCK_FILE, force=takeover)
        try:
            changes: tuple[ConfigChange, ...] = ()
            if config is not None:
                with cls.reader(folder) as current:
                    changes = allowed_changes(folder, current.config(), config, accept, current.steps_done())
            ledger = cls(folder, LedgerIndex.write(folder / INDEX_FILE), lock)
        except BaseException:
            lock.close()
            raise
        try:
            recover_folder(folder, ledger._index)
            if config is not None and changes:
                ledger._change_config(config, changes)
        except BaseException:
            ledger.close()
            raise
        return ledger

    @classmethod
    def reader(cls, folder: Path) -> "Ledger":
        """Opens a run for reading, also while another process executes it."""
        folder = folder.absolute()
        check_run_folder(folder)
        return cls(folder, LedgerIndex.read(folder / INDEX_FILE), None)

    @property
    def generation(self) -> int:
        return self._index.generation

    def fence(self) -> None:
        """Call this before changing files outside the ledger. Raises StaleGeneration if another process has claimed the
        run."""
        with self._index.transaction():
            pass

    def close(self) -> None:
        """Closes all files. Idempotent. All data is durable without it."""
        self._end_partial()
        self._index.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Rollouts

    def keep(self, step: int, completions: Sequence[Completion]) -> None:
        """Stores finished completions of a step that is not collected yet. They are durable on return. Raises
        StepCollected."""
        with self._index.transaction() as transaction:  # raises StaleGeneration if another process has claimed the run
            if transaction.execute("SELECT 1 FROM steps WHERE step = ?", step):
                raise StepCollected(step)
            log = self._partial_log
            if log is None or self._partial_step != step:
                self._end_partial()
                log = self._partial_log = partial_rollouts.PartialLog(self._partial_path(step))
                self._partial_step = step
            log.append(completions)

    def kept_completions(self, step: int) -> list[Completion]:
        """Returns the completions that `keep` stored for a step, the latest of each request; empty if it is
        collected."""
        return partial_rollouts.read_partial(self._partial_path(step))

    def record_rollouts(self, step: int, rollouts: Rollouts, extra: Mapping[str, Any] | None = None) -> None:
        """Stores a step's scored rollouts durably, with everything that is needed to train on them again.

        Storing the same rollouts again is allowed, and repairs a damaged file.

        Args:
            extra: other values that training on the step needs, such as the packing seed.

        Raises:
            StepConflict: the step is stored with other content.
            PromptUsedTwice: an earlier step contains one of the prompts.
            ValueError, TypeError: a value cannot be stored exactly.
        """
        if rollouts.step != step:
            raise ValueError(f"rollouts of step {rollouts.step + 1} were collected as step {step + 1}")
        path = self.step_path(step)
        from lockstep.ledger import step_file  # needs pyarrow, which the core does not install

        table = step_file.rollouts_table(rollouts, dict(extra or {}), self._index.first_step)
        temporary, digest, size = step_file.write_hidden_step(path, table, self.generation)
        row_added = False
        try:
            with self._index.transaction() as transaction:
                stored = transaction.execute("SELECT sha256, removed FROM steps WHERE step = ?", step)
                if stored:
                    stored_digest, removed = stored[0]
                    if stored_digest != digest:
                        raise StepConflict(step, stored_digest, digest)
                    if removed or (path.exists() and sha256_file(path) == digest):
                        return
                else:
                    add_step(transaction, rollouts, digest, size)
                    row_added = True
                temporary.rename(path)
                fsync_folder(path.parent)
        except BaseException:
            # If the transaction was rolled back, the file has no row: delete it. An interrupt may also come after the
            # commit; then keep the file.
            if row_added and not self.is_collected(step):
                path.unlink(missing_ok=True)
            raise
        finally:
            temporary.unlink(missing_ok=True)
        self._end_partial()
        self._partial_path(step).unlink(missing_ok=True)

    def rollouts(self, step: int) -> Rollouts | None:
        """Returns a step's rollouts; None if they are not collected yet, or no longer needed and deleted."""
        stored = self.stored_step(step)
        return None if stored is None else stored.rollouts

    def stored_step(self, step: int) -> StoredStep | None:
        """Like `rollouts`, but with `extra`. Raises StepCorrupt if the file differs from what was written."""
        found = self._index.rows("SELECT sha256 FROM steps WHERE step = ? AND NOT removed", step)
        if not found:
            return None
        path, newest = self.step_path(step), self.newest_checkpoint()
        checkpoint = None if newest is None else newest.step
        try:
            if sha256_file(path) != found[0][0]:
                raise StepCorrupt(path, step, "differs from what was written (sha256)", checkpoint)
        except FileNotFoundError as error:
            raise StepCorrupt(path, step, "is missing", checkpoint) from error
        from lockstep.ledger.step_file import read_step_file  # needs pyarrow

        return read_step_file(path, step, self._index.first_step)

    def collected_steps(self) -> list[int]:
        """Returns the steps whose rollouts were stored, including deleted ones."""
        return [row[0] for row in self._index.rows("SELECT step FROM steps ORDER BY step")]

    def stored_steps(self) -> list[int]:
        """Returns the steps whose step files are kept."""
        return [row[0] for row in self._index.rows("SELECT step FROM steps WHERE NOT removed ORDER BY step")]

    def completions_of(self, step: int) -> int:
        """Returns the number of completions of a collected step."""
        return sum(row[0] for row in self._index.rows("SELECT completions FROM steps WHERE step = ?", step))

    def is_collected(self, step: int) -> bool:
        """Returns whether the step is one of `collected_steps`."""
        return bool(self._index.rows("SELECT 1 FROM steps WHERE step = ?", step))

    def prompts_used(self) -> dict[str, int]:
        """Returns the step of every prompt of a collected step, by uid."""
        return dict(self._index.rows("SELECT uid, step FROM prompts ORDER BY step, uid"))

    def draw(self, step: int, round: int, count: int) -> tuple[int, int]:
        """Assigns positions in the data to a request for prompts, permanently: (start, count). No two requests share a
        position.

        Args:
            round: how many requests for prompts the step made before.
        """
        with self._index.transaction() as transaction:
            return sqlite_index.allot_positions(transaction, step, round, count)

    # Commits

    def commit(self, step: int, stats: Mapping[str, Any]) -> None:
        """Records that a step is trained. A step that is trained again after a restart is committed again. Raises
        OutOfOrder if a step was skipped since the last commit."""
        with self._index.transaction() as transaction:
            last = last_commit(transaction)
            if last >= 0 and step > last + 1:
                raise OutOfOrder("commit of step", step + 1, last + 2)
            transaction.put("commits", step=step, stats=json_values.dumps(dict(stats), "stats"))

    def last_committed_step(self) -> int:
        """Returns the last committed step; -1 if there is none."""
        return int(self._index.rows("SELECT coalesce(max(step), -1) FROM commits")[0][0])

    def steps_done(self) -> int:
        """Returns the number of steps trained into the current weights. `last_committed_step` may be
        later if an earlier process was killed after its last checkpoint."""
        sql = "SELECT max(step) FROM commits WHERE generation = (SELECT value FROM meta WHERE key = 'generation')"
        last = self._index.rows(sql)[0][0]
        if last is None:
            newest = self.newest_checkpoint()
            last = -1 if newest is None else newest.step
        return int(last) + 1

    def commits(self) -> list[CommitRow]:
        rows = self._index.rows("SELECT step, at, generation, stats FROM commits ORDER BY step")
        return [CommitRow(step, at, generation, self._index.parse(stats, dict)) for step, at, generation, stats in rows]

    def commit_times(self) -> list[tuple[int, float, int]]:
        """Returns step, time and generation of every commit, by step."""
        rows = self._index.rows("SELECT step, at, generation FROM commits ORDER BY step")
        return [(step, at, generation) for step, at, generation in rows]

    def committed(self, step: int) -> dict[str, Any] | None:
        """Returns what was recorded with the commit of a step; None if it is not committed."""
        rows = self._index.rows("SELECT stats FROM commits WHERE step = ?", step)
        return self._index.parse(rows[0][0], dict) if rows else None

    def record_published(self, version: int) -> None:
        """Records that engines got this version of the weights. Raises OutOfOrder if the step that makes the version is
        not committed; version 1 is always allowed."""
        with self._index.transaction() as transaction:
            newest = max(last_commit(transaction), 0) + 1
            if version > newest:
                raise OutOfOrder("publish of version", version, newest)
            transaction.set_meta("published", str(version))

    def published_version(self) -> int:
        """Returns the version published last; -1 if there is none."""
        return int(self._index.meta("published"))

    # Checkpoints

    def record_checkpoint(self, step: int, path: Path, metric: float | None = None) -> None:
        """Records a checkpoint that is complete on disk. `step` is the last step trained into it (-1: none)."""
        path = path.absolute()
        stored = path.relative_to(self.folder) if path.is_relative_to(self.folder) else path
        with self._index.transaction() as transaction:
            transaction.put("checkpoints", step=step, path=str(stored), metric=metric)

    def checkpoints(self) -> list[CheckpointRow]:
        """Returns all recorded checkpoints, oldest first."""
        rows = self._index.rows("SELECT step, path, metric, at FROM checkpoints ORDER BY step")
        return [CheckpointRow(step, self.folder / path, metric, at) for step, path, metric, at in rows]

    def newest_checkpoint(self) -> CheckpointRow | None:
        return next(reversed(self.checkpoints()), None)

    def forget_checkpoint(self, step: int) -> None:
        """Removes a checkpoint from the index. The caller deletes its folder afterwards."""
        with self._index.transaction() as transaction:
            transaction.execute("DELETE FROM checkpoints WHERE step = ?", step)

    def rewind(self, done: int) -> None:
        """Discards everything after the first `done` steps, including step files and records of checkpoints, so that
        later steps run again."""
        step = done - 1
        with self._index.transaction() as transaction:
            # If the process is killed before the files are deleted, `recover_folder` deletes them.
            transaction.set_meta(REWINDING, str(step))
            metric_blocks.unpack_from(transaction, done)
            load_blocks.cut_after(transaction, step)
            for table in ("steps", "prompts", "commits", "checkpoints", "evaluations", "metrics", "samples", "loads"):
                transaction.execute(f"DELETE FROM {table} WHERE step > ?", step)
            version = min(int(transaction.execute("SELECT value FROM meta WHERE key = 'published'")[0][0]), done)
            transaction.set_meta("published", str(version))
            transaction.put("events", kind="rewound", fields=json_values.dumps({"done": done}))
        self._end_partial()
        finish_rewind(self.folder, self._index)

    def config(self) -> dict[str, Any]:
        """Returns the run's current resolved config."""
        return dict(self._index.parse(self._index.meta("config"), dict))

    def number(self, step: int) -> int:
        """Returns what files and metrics call a step: the number of steps done after it; 0 for the state before the
        first (step -1). Runs that were begun before this convention continue to count from 0, and -1."""
        return step + self._index.first_step

    def step_path(self, step: int) -> Path:
        return self.folder / "steps" / f"{self.number(step):08d}.arrow"

    def _partial_path(self, step: int) -> Path:
        return self.folder / "steps" / f"{self.number(step):08d}.partial"

    def _end_partial(self) -> None:
        if self._partial_log is not None:
            self._partial_log.close()
            self._partial_log = None

    def _change_config(self, config: Mapping[str, Any], changes: tuple[ConfigChange, ...]) -> None:
        with self._index.transaction() as transaction:
            transaction.set_meta("config", json_values.dumps(dict(config), "config"))
            fields = {"changes": [str(change) for change in changes]}
            transaction.put("events", kind="config_changed", fields=json_values.dumps(fields))
        replace_file(self.folder / CONFIG_FILE, config_yaml(config))
        self.changes = changes
