"""The durable record of a run: rollouts, commits, and an index of everything else.

    runs/NAME/
      config.yaml             a copy of the resolved config to read; the one that counts is in the index
      ledger.sqlite           the index: steps, commits, checkpoints, evaluations, metrics, events
      steps/00000012.arrow    rollouts of step 12, immutable
      steps/00000013.partial  finished completions of step 13, which is not complete yet
      checkpoints/  logs/

`record_rollouts` makes the step file durable, then its row in the index, and then returns. Only one thread of one
process writes. Writes are refused when another process has claimed the run."""

import dataclasses
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.data.samples import Completion, Rollouts
from lockstep.ledger import json_values, partial_rollouts, sqlite_index
from lockstep.ledger.config_changes import ConfigChange, allowed_changes
from lockstep.ledger.durable_files import RunLock, disk_full_as_ledger_error, fsync_folder, replace_file, sha256_file
from lockstep.ledger.errors import FolderExists, OutOfOrder, StepCollected, StepConflict, StepCorrupt
from lockstep.ledger.run_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    REWINDING,
    add_step,
    check_run_folder,
    config_yaml,
    finish_rewind,
    last_commit,
    recover_folder,
)
from lockstep.ledger.sqlite_index import (
    CheckpointRow,
    CommitRow,
    EvaluationRow,
    EvaluationSample,
    EventRow,
    LedgerIndex,
    MetricsRow,
    StoredStep,
)


class Ledger:
    """The ledger of a run, opened by `create`, `resume` or `reader`. A context manager. Its methods raise the errors of
    `ledger.errors`."""

    def __init__(self, folder: Path, index: LedgerIndex, lock: RunLock | None) -> None:
        self.folder = folder
        self.changes: tuple[ConfigChange, ...] = ()
        """Changes of the config that `resume` accepted."""
        self._index, self._lock = index, lock
        self._partial_log: partial_rollouts.PartialLog | None = None
        self._partial_step = -1
        """The step whose completions are in `_partial_log`."""

    @classmethod
    def create(cls, folder: Path, config: Mapping[str, Any]) -> "Ledger":
        """Creates a run, with generation 1. Raises FolderExists if `folder` exists. If it fails, or the process is
        killed, no folder is left."""
        folder = folder.absolute()
        if os.path.lexists(folder):
            raise FolderExists(folder, (folder / INDEX_FILE).exists())
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        try:
            with disk_full_as_ledger_error(folder, None):
                shutil.rmtree(temporary, ignore_errors=True)
                for name in ("steps", "checkpoints", "logs"):
                    (temporary / name).mkdir(parents=True)
            replace_file(temporary / CONFIG_FILE, config_yaml(config))
            LedgerIndex.create(temporary / INDEX_FILE, json_values.dumps(dict(config), "config"))
            fsync_folder(temporary)
            try:
                temporary.rename(folder)
            except OSError as error:  # another process may have created it meanwhile
                if folder.exists():
                    raise FolderExists(folder, (folder / INDEX_FILE).exists()) from error
                raise
            fsync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
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
        run; with `takeover`, that process's writes are refused from then on."""
        folder = folder.absolute()
        check_run_folder(folder)
        lock = RunLock(folder / "lock", force=takeover)
        try:
            changes: tuple[ConfigChange, ...] = ()
            if config is not None:
                with cls.reader(folder) as current:
                    changes = allowed_changes(folder, current.config(), config, accept)
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
            raise ValueError(f"rollouts of step {rollouts.step} were collected as step {step}")
        path = self.step_path(step)
        from lockstep.ledger import step_file  # needs pyarrow, which the core does not install

        table = step_file.rollouts_table(rollouts, dict(extra or {}))
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

        return read_step_file(path, step)

    def collected_steps(self) -> list[int]:
        """Returns the steps whose rollouts were stored, including deleted ones."""
        return [row[0] for row in self._index.rows("SELECT step FROM steps ORDER BY step")]

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
                raise OutOfOrder("commit of step", step, last + 1)
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
        return [CommitRow(step, at, generation, json_values.loads(stats)) for step, at, generation, stats in rows]

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

    def delete_unneeded_steps(self) -> list[int]:
        """Deletes the step files that neither of the two newest checkpoints needs, and returns their steps."""
        checkpoints = self.checkpoints()
        if len(checkpoints) < 2:
            return []
        with self._index.transaction() as transaction:
            sql = "UPDATE steps SET removed = 1 WHERE step <= ? AND NOT removed RETURNING step"
            steps = sorted(row[0] for row in transaction.execute(sql, checkpoints[-2].step))
        for step in steps:
            self.step_path(step).unlink(missing_ok=True)
        return steps

    def rewind(self, step: int) -> None:
        """Discards everything after `step`, including step files and records of checkpoints, so that these steps run
        again."""
        with self._index.transaction() as transaction:
            # If the process is killed before the files are deleted, `recover_folder` deletes them.
            transaction.set_meta(REWINDING, str(step))
            for table in ("steps", "prompts", "commits", "checkpoints", "evaluations", "metrics"):
                transaction.execute(f"DELETE FROM {table} WHERE step > ?", step)
            version = min(int(transaction.execute("SELECT value FROM meta WHERE key = 'published'")[0][0]), step + 1)
            transaction.set_meta("published", str(version))
            transaction.put("events", kind="rewound", fields=json_values.dumps({"step": step}))
        self._end_partial()
        finish_rewind(self.folder, self._index)

    # Reports

    def record_evaluation(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[EvaluationSample] = ()
    ) -> None:
        """Records an evaluation of the weights after `step` (-1: before the first), and replaces an earlier one."""
        shown = json_values.dumps([dataclasses.asdict(sample) for sample in samples], "samples")
        with self._index.transaction() as transaction:
            transaction.put(
                "evaluations", step=step, metrics=json_values.dumps(dict(metrics), "metrics"), samples=shown
            )

    def evaluations(self) -> list[EvaluationRow]:
        rows = self._index.rows("SELECT step, at, metrics, samples FROM evaluations ORDER BY step")
        found = []
        for step, at, metrics, stored in rows:
            samples = [EvaluationSample(**sample) for sample in json_values.loads(stored)]
            found.append(EvaluationRow(step, at, json_values.loads(metrics), samples))
        return found

    def record_metrics(self, step: int, row: Mapping[str, float]) -> None:
        """Adds values to the metrics of a step, and replaces those with the same names."""
        with self._index.transaction() as transaction:
            found = transaction.execute('SELECT "values" FROM metrics WHERE step = ?', step)
            merged = {**(json_values.loads(found[0][0]) if found else {}), **row}
            transaction.put("metrics", step=step, values=json_values.dumps(merged, "metrics"))

    def metrics_rows(self, after: int | None = None) -> list[MetricsRow]:
        """Returns the metrics by step, only of steps later than `after`."""
        where = "" if after is None else f"WHERE step > {int(after)}"
        rows = self._index.rows(f'SELECT step, at, generation, "values" FROM metrics {where} ORDER BY step')
        return [MetricsRow(step, at, generation, json_values.loads(row)) for step, at, generation, row in rows]

    def record_event(self, kind: str, **fields: Any) -> None:
        """Records an event with the current time."""
        with self._index.transaction() as transaction:
            transaction.put("events", kind=kind, fields=json_values.dumps(fields, kind))

    def events(self) -> list[EventRow]:
        """Returns all events, oldest first."""
        rows = self._index.rows("SELECT at, generation, kind, fields FROM events ORDER BY id")
        return [EventRow(at, generation, kind, json_values.loads(fields)) for at, generation, kind, fields in rows]

    def config(self) -> dict[str, Any]:
        """Returns the run's current resolved config."""
        return dict(json_values.loads(self._index.meta("config")))

    def step_path(self, step: int) -> Path:
        return self.folder / "steps" / f"{step:08d}.arrow"

    def _partial_path(self, step: int) -> Path:
        return self.folder / "steps" / f"{step:08d}.partial"

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
