"""Keeps a run's folder from growing with the number of its steps: deletes step files, and compacts the index.

Nothing that recovery may need is deleted: step files after the second newest checkpoint stay whatever their size.
"""

from pathlib import Path

from lockstep.ledger import json_values, load_blocks, metric_blocks
from lockstep.ledger.rank_loads import REMARK_STEPS
from lockstep.ledger.sqlite_index import CheckpointRow, LedgerIndex

DELETED_EVENT = "steps_deleted"
"""The event of a deletion of step files: the numbers of the first and the last, how many, and their bytes."""
MAX_BLOCKS = 8
"""Most blocks of metrics that are made at once, so that a run of an earlier version does not wait for all of them."""


class Retention:
    """The part of the ledger that deletes and compacts."""

    folder: Path
    _index: LedgerIndex

    def checkpoints(self) -> list[CheckpointRow]:
        raise NotImplementedError

    def step_path(self, step: int) -> Path:
        raise NotImplementedError

    def delete_unneeded_steps(self, keep_bytes: float = 0) -> list[int]:
        """Deletes the step files that neither of the two newest checkpoints needs, and returns their steps. Of these,
        the newest ones with together at most `keep_bytes` stay, to be read.

        The deletion is one transaction of the index with an event. A process that is killed before the files are
        deleted leaves that to `Ledger.resume`."""
        checkpoints = self.checkpoints()
        if len(checkpoints) < 2:
            return []
        with self._index.transaction() as transaction:
            sql = "SELECT step, bytes FROM steps WHERE step <= ? AND NOT removed ORDER BY step DESC"
            unneeded, total, kept = transaction.execute(sql, checkpoints[-2].step), 0, 0
            while kept < len(unneeded) and total + unneeded[kept][1] <= keep_bytes:
                total += unneeded[kept][1]
                kept += 1
            gone = sorted(unneeded[kept:])
            steps = [int(step) for step, _ in gone]
            if steps:
                transaction.execute("UPDATE steps SET removed = 1 WHERE step <= ? AND NOT removed", steps[-1])
                first, last = (step + self._index.first_step for step in (steps[0], steps[-1]))
                fields = {"first": first, "last": last, "count": len(steps), "bytes": sum(size for _, size in gone)}
                transaction.put("events", kind=DELETED_EVENT, fields=json_values.dumps(fields, DELETED_EVENT))
        for step in steps:
            self.step_path(step).unlink(missing_ok=True)
        return steps

    def step_digests(self) -> dict[int, str]:
        """Returns the sha256 of every step file that is kept, by step."""
        return dict(self._index.rows("SELECT step, sha256 FROM steps WHERE NOT removed ORDER BY step"))

    def draws(self) -> int:
        """Returns how many requests for prompts got positions in the data."""
        return int(self._index.rows("SELECT count(*) FROM draws")[0][0])

    def copy_index(self, target: Path, first: int) -> None:
        """Writes a copy of the index for a folder without the step files of steps below `first`."""
        self._index.copy(target, ("UPDATE steps SET removed = 1 WHERE step < ?", first))

    def can_repeat_after(self, step: int) -> bool:
        """Returns whether the steps after this one can run again: no step file of theirs is deleted. A run that
        generates nothing has none."""
        return not self._index.rows("SELECT 1 FROM steps WHERE step > ? AND removed", step)

    def compact(self, most: int = MAX_BLOCKS) -> int:
        """Compacts the metrics of steps up to the second newest checkpoint, in at most so many blocks, and thins the
        loads of ranks of as many steps. Returns how many blocks of metrics were made. Readers get the same metrics as
        before; of the loads, those of some steps and the sums. The loads from which speeds are measured, if training
        resumes from that checkpoint, stay as they are."""
        checkpoints = self.checkpoints()
        if len(checkpoints) < 2:
            return 0
        with self._index.transaction() as transaction:
            before = checkpoints[-2].step + 1
            many = -(-most * metric_blocks.BLOCK_STEPS // load_blocks.BLOCK_STEPS)
            load_blocks.compact(transaction, before - REMARK_STEPS, many)
            return metric_blocks.compact(transaction, before, most)
