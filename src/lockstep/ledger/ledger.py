"""The durable record of a run: rollouts, commits, and an index of everything else.

    runs/NAME/
      config.yaml             a readable copy of the resolved config; the ledger has another one
      ledger.sqlite           the index: steps, commits, checkpoints, evaluations, metrics, events
      steps/00000012.arrow    rollouts of step 12, immutable
      steps/00000013.partial  finished completions of step 13, which is not complete yet
      checkpoints/  logs/

A step file is on the disk before its row in the index, and the row before `collected` returns. Only one thread of one
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
from lockstep.ledger.config_changes import ConfigChange, compare_config
from lockstep.ledger.durable_files import RunLock, disk_full_as_ledger_error, fsync_folder, replace_file, sha256_file
from lockstep.ledger.errors import (
    ConfigChanged,
    FolderExists,
    OutOfOrder,
    StepConflict,
    StepCorrupt,
)
from lockstep.ledger.run_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    add_step,
    check_run_folder,
    config_yaml,
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
        self._partial: tuple[int, partial_rollouts.PartialLog] | None = None

    @classmethod
    def create(cls, folder: Path, config: Mapping[str, Any]) -> "Ledger":
        """Creates a run, with generation 1. Raises FolderExists if `folder` exists. If it fails, or the process is
        killed, no folder is left."""
        folder = folder.absolute()
        if os.path.lexists(folder):
            raise FolderExists(folder, (folder / INDEX_FILE).exists())
        hidden = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        try:
            with disk_full_as_ledger_error(folder, None):
                shutil.rmtree(hidden, ignore_errors=True)
                for name in ("steps", "checkpoints", "logs"):
                    (hidden / name).mkdir(parents=True)
            replace_file(hidden / CONFIG_FILE, config_yaml(config))
            LedgerIndex.create(hidden / INDEX_FILE, json_values.dumps(dict(config), "config"))
            fsync_folder(hidden)
            try:
                hidden.rename(folder)
            except OSError as error:  # another process may have created it meanwhile
                if folder.exists():
                    raise FolderExists(folder, (folder / INDEX_FILE).exists()) from error
                raise
            fsync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
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
            changes = _check_changes(folder, config, accept)
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
        """Stores finished completions of a step that is not collected yet. They are durable on return."""
        with self._index.transaction() as transaction:  # raises StaleGeneration if another process has claimed the run
            if transaction.execute("SELECT 1 FROM steps WHERE step = ?", step):
                raise OutOfOrder("partial results of step", step, step + 1)
            if self._partial is None or self._partial[0] != step:
                self._end_partial()
                self._partial = (step, partial_rollouts.PartialLog(self._partial_path(step)))
            self._partial[1].append(completions)

    def kept(self, step: int) -> list[Completion]:
        """Returns the completions that `keep` stored for a step, the latest of each request; empty if it is
        collected."""
        return partial_rollouts.read_partial(self._partial_path(step))

    def collected(self, step: int, rollouts: Rollouts, extra: Mapping[str, Any] | None = None) -> None:
        """Stores a step's scored rollouts durably, with everything that is needed to train on them again.

        Storing the same rollouts again is allowed, and repairs a damaged file. Raises StepConflict if the step is
        stored with other content; PromptUsedTwice; LedgerFull; ValueError or TypeError for values that cannot be stored
        exactly."""
        if rollouts.step != step:
            raise ValueError(f"rollouts of step {rollouts.step} were collected as step {step}")
        path = self.step_path(step)
        from lockstep.ledger import step_file  # needs pyarrow, which the core does not install

        table = step_file.rollouts_table(rollouts, dict(extra or {}))
        hidden, digest, size = step_file.write_hidden_step(path, table, self.generation)
        row_added = False
        try:
            with self._index.transaction() as transaction:
                stored = transaction.execute("SELECT sha256, removed FROM steps WHERE step = ?", step)
                if stored and stored[0][0] != digest:
                    raise StepConflict(step, stored[0][0], digest)
                if stored and (stored[0][1] or (path.exists() and sha256_file(path) == digest)):
                    return
                if not stored:
                    add_step(transaction, rollouts, digest, size)
                    row_added = True
                hidden.rename(path)
                fsync_folder(path.parent)
        except BaseException:
            # Deletes a file without a row. After an interrupt, the row may be durable.
            if row_added and not self.is_collected(step):
                path.unlink(missing_ok=True)
            raise
        finally:
            hidden.unlink(missing_ok=True)
        self._end_partial()
        self._partial_path(step).unlink(missing_ok=True)

    def rollouts(self, step: int) -> Rollouts | None:
        """Returns a step's rollouts; None if they are not collected yet, or `retain` has deleted them."""
        stored = self.stored(step)
        return None if stored is None else stored.rollouts

    def stored(self, step: int) -> StoredStep | None:
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
        """Returns the steps whose rollouts were stored, including those that `retain` has deleted."""
        return [row[0] for row in self._index.rows("SELECT step FROM steps ORDER BY step")]

    def is_collected(self, step: int) -> bool:
        """Returns whether the step is one of `collected_steps`."""
        return bool(self._index.rows("SELECT 1 FROM steps WHERE step = ?", step))

    def prompts_used(self) -> dict[str, int]:
        """Returns the step of every prompt of a collected step, by uid."""
        return dict(self._index.rows("SELECT uid, step FROM prompts ORDER BY step, uid"))

    def draw(self, step: int, round: int, count: int) -> tuple[int, int]:
        """Assigns positions in the data to a round of a step, permanently: (start, count). No two rounds share a
        position."""
        with self._index.transaction() as transaction:
            return sqlite_index.allot_positions(transaction, step, round, count)

    # Commits

    def commit(self, step: int, stats: Mapping[str, Any]) -> None:
        """Records that a step is trained. A step that is trained again after a restart is committed again. Raises
        OutOfOrder if a step was skipped."""
        with self._index.transaction() as transaction:
            last = last_commit(transaction)
            if last >= 0 and step > last + 1:
                raise OutOfOrder("commit of step", step, last + 1)
            transaction.put("commits", step=step, stats=json_values.dumps(dict(stats), "stats"))

    def committed(self) -> int:
        """Returns the last committed step; -1 if there is none."""
        return int(self._index.rows("SELECT coalesce(max(step), -1) FROM commits")[0][0])

    def done(self) -> int:
        """Returns the number of steps trained into the current weights. `committed` may be larger if an earlier process
        was killed after its last checkpoint."""
        sql = "SELECT max(step) FROM commits WHERE generation = (SELECT value FROM meta WHERE key = 'generation')"
        last, newest = self._index.rows(sql)[0][0], self.newest_checkpoint()
        return int(last if last is not None else -1 if newest is None else newest.step) + 1

    def commits(self) -> list[CommitRow]:
        rows = self._index.rows("SELECT step, at, generation, stats FROM commits ORDER BY step")
        return [CommitRow(step, at, generation, json_values.loads(stats)) for step, at, generation, stats in rows]

    def published(self, version: int) -> None:
        """Records that engines got this version of the weights. Raises OutOfOrder before its commit."""
        with self._index.transaction() as transaction:
            newest = max(last_commit(transaction), 0) + 1
            if version > newest:
                raise OutOfOrder("publish of version", version, newest)
            transaction.set_meta("published", str(version))

    def published_version(self) -> int:
        """Returns the version published last; -1 if there is none."""
        return int(self._index.meta("published"))

    # Checkpoints

    def checkpoint(self, step: int, path: Path, metric: float | None = None) -> None:
        """Records a checkpoint that is complete on disk. `step` is the last step trained into it (-1: none)."""
        path = path.absolute()
        stored = path.relative_to(self.folder) if path.is_relative_to(self.folder) else path
        with self._index.transaction() as transaction:
            transaction.put("checkpoints", step=step, path=str(stored), metric=metric)

    def checkpoints(self) -> list[CheckpointRow]:
        """Returns them oldest first."""
        rows = self._index.rows("SELECT step, path, metric, at FROM checkpoints ORDER BY step")
        return [CheckpointRow(step, self.folder / path, metric, at) for step, path, metric, at in rows]

    def newest_checkpoint(self) -> CheckpointRow | None:
        return next(reversed(self.checkpoints()), None)

    def forget_checkpoint(self, step: int) -> None:
        """Removes a checkpoint from the index. The caller deletes its folder afterwards."""
        with self._index.transaction() as transaction:
            transaction.execute("DELETE FROM checkpoints WHERE step = ?", step)

    def retain(self) -> list[int]:
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
            for table in ("steps", "prompts", "commits", "checkpoints", "evaluations", "metrics"):
                transaction.execute(f"DELETE FROM {table} WHERE step > ?", step)
            version = min(int(transaction.execute("SELECT value FROM meta WHERE key = 'published'")[0][0]), step + 1)
            transaction.set_meta("published", str(version))
            transaction.put("events", kind="rewound", fields=json_values.dumps({"step": step}))
            self._end_partial()
            for path in (self.folder / "steps").iterdir():
                if path.stem.isdigit() and int(path.stem) > step:
                    path.unlink()
            fsync_folder(self.folder / "steps")

    # Reports

    def evaluation(self, step: int, metrics: Mapping[str, float], samples: Sequence[EvaluationSample] = ()) -> None:
        """Records an evaluation of the weights after `step` (-1: before the first), and replaces an earlier one."""
        shown = json_values.dumps([dataclasses.asdict(sample) for sample in samples], "samples")
        with self._index.transaction() as transaction:
            transaction.put(
                "evaluations", step=step, metrics=json_values.dumps(dict(metrics), "metrics"), samples=shown
            )

    def evaluations(self) -> list[EvaluationRow]:
        rows = self._index.rows("SELECT step, at, metrics, samples FROM evaluations ORDER BY step")
        return [
            EvaluationRow(
                step,
                at,
                json_values.loads(metrics),
                [EvaluationSample(**sample) for sample in json_values.loads(samples)],
            )
            for step, at, metrics, samples in rows
        ]

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
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

    def event(self, kind: str, **fields: Any) -> None:
        """Records an event with the current time."""
        with self._index.transaction() as transaction:
            transaction.put("events", kind=kind, fields=json_values.dumps(fields, kind))

    def events(self) -> list[EventRow]:
        """Returns them oldest first."""
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
        if self._partial is not None:
            self._partial[1].close()
            self._partial = None

    def _change_config(self, config: Mapping[str, Any], changes: tuple[ConfigChange, ...]) -> None:
        with self._index.transaction() as transaction:
            transaction.set_meta("config", json_values.dumps(dict(config), "config"))
            fields = {"changes": [str(change) for change in changes]}
            transaction.put("events", kind="config_changed", fields=json_values.dumps(fields))
        replace_file(self.folder / CONFIG_FILE, config_yaml(config))
        self.changes = changes


def _check_changes(folder: Path, config: Mapping[str, Any] | None, accept: Collection[str]) -> tuple[ConfigChange, ...]:
    """Returns the changes from the run's config to `config`. Raises ConfigChanged if one of them is not allowed."""
    if config is None:
        return ()
    with Ledger.reader(folder) as current:
        changes = tuple(compare_config(current.config(), json_values.loads(json_values.dumps(dict(config), "config"))))
    refused = tuple(change for change in changes if change.changes_result and change.path not in accept)
    if refused:
        raise ConfigChanged(folder, refused)
    return changes
