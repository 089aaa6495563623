"""Decides when to write a checkpoint and which ones to keep, and enters complete ones into the ledger."""

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from lockstep.base import waits
from lockstep.cluster.protocol import RemoteError
from lockstep.config.trainer import CheckpointConfig as CheckpointConfig
from lockstep.ledger.ledger import Ledger
from lockstep.train.checkpoints.checkpoint_retention import (
    are_parts_complete,
    checkpoint_bytes,
    checkpoints_to_keep,
    create_parts_folder,
    join_parts,
    remove_checkpoint,
    remove_leftovers,
)
from lockstep.train.errors import CheckpointError

log = logging.getLogger(__name__)

SAVE_STALL_S = 600.0
"""A save has failed if its files do not grow for this long."""
_CHECKPOINT_NAME = re.compile(r"\d{8,}")


class CheckpointSaver(Protocol):
    """What writes checkpoints: all trained roles."""

    def save(self, folder: Path) -> None: ...

    def saved(self) -> bool: ...


class CheckpointLoader(Protocol):
    """What reads checkpoints: all trained roles."""

    def load(self, folder: Path) -> None: ...


def restore_checkpoint(loader: CheckpointLoader, ledger: Ledger) -> int:
    """Loads the newest checkpoint that is not damaged, of those after which the run can repeat its steps. Returns the
    number of steps in it, 0 if there is no checkpoint.

    Raises:
        RemoteError: none can be loaded; this is the error for the newest.
    """
    newest = [row for row in reversed(ledger.checkpoints()) if ledger.can_repeat_after(row.step)]
    errors: list[RemoteError] = []
    for row in newest:
        try:
            loader.load(row.path)
        except RemoteError as error:
            if error.code != CheckpointError.error_code:
                raise
            log.warning("%s", error.message)
            errors.append(error)
            continue
        for damaged in newest[: len(errors)]:
            log.warning("resuming from %s instead; later steps are repeated", row.path)
            ledger.forget_checkpoint(damaged.step)
        return row.step + 1
    if errors:
        raise errors[0]
    return 0


class CheckpointManager:
    """Writes checkpoints in the background. A checkpoint is valid once it is in the ledger, which happens when it is
    complete on disk.

    Args:
        parts: the subfolders that a checkpoint consists of; empty if it is one folder.
        steps_deleted: called after step files that are not needed any more were deleted.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path,
        ledger: Ledger,
        saver: CheckpointSaver,
        parts: Sequence[str] = (),
        steps_deleted: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.folder, self.ledger, self.saver, self.parts = config, folder, ledger, saver, parts
        self._steps_deleted = steps_deleted
        self._pending: tuple[int, Path, float | None] | None = None
        self._clear()

    def due(self, version: int, *, last: bool, improved: bool) -> bool:
        if self.newest() == version or (self._pending and self._pending[0] == version):
            return False
        periodic = self.config.every > 0 and version > 0 and version % self.config.every == 0
        return last or periodic or (improved and self.config.keep_best and version > 0)

    def newest(self) -> int | None:
        """Version of the newest complete checkpoint."""
        newest = self.ledger.newest_checkpoint()
        return None if newest is None else newest.step + 1

    def begin(self, version: int, metric: float | None) -> None:
        """Starts writing a checkpoint in the background, once an earlier one is finished."""
        self.finish()
        path = self.folder / f"{version:08d}"  # matches _CHECKPOINT_NAME
        self.saver.save(create_parts_folder(path) if self.parts else path)
        self._pending = (version, path, metric)

    def poll(self) -> None:
        """Enters a completed checkpoint into the ledger and deletes those that are no longer kept."""
        if self._pending is None or not self.saver.saved():
            return
        (version, path, metric), self._pending = self._pending, None
        if self.parts:
            join_parts(path)
        self.ledger.record_checkpoint(version - 1, path, metric)
        self._prune()

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, as long as it makes progress."""

        def complete() -> bool:
            self.poll()
            return self._pending is None

        self.wait_for_files(complete, waits_for="checkpoint", why="the checkpoint under way")

    def wait_for_files(self, complete: Callable[[], bool], waits_for: str, why: str) -> None:
        """Waits until ranks have written files of a checkpoint, as long as these grow."""
        waits.poll(
            lambda: complete() or None,
            kind="file",
            waits_for=waits_for,
            why=why,
            stall_s=SAVE_STALL_S,
            progress=lambda: checkpoint_bytes(self.folder),
            every_s=0.02,
        )

    def writer_lost(self) -> None:
        """Handles the loss of the ranks that write a checkpoint: enters it into the ledger if it is complete, else
        deletes it."""
        pending, self._pending = self._pending, None
        if pending is not None and self.parts and are_parts_complete(pending[1], self.parts):
            join_parts(pending[1])
        if pending is not None and pending[1].is_dir():  # only a complete checkpoint has this name
            version, path, metric = pending
            self.ledger.record_checkpoint(version - 1, path, metric)
            self._prune()
        self._clear()

    def _prune(self) -> None:
        known = {row.step: row for row in self.ledger.checkpoints()}
        keep = checkpoints_to_keep(
            {row.step: row.metric for row in known.values()}, self.config.keep_last, self.config.keep_best
        )
        for step in sorted(set(known) - keep):
            self.ledger.forget_checkpoint(step)
            remove_checkpoint(known[step].path)
        self.ledger.delete_unneeded_steps(self.config.keep_rollouts_gb * 1e9)
        self.ledger.compact()
        self._steps_deleted()

    def _clear(self) -> None:
        """Deletes what a killed run left behind: incomplete checkpoints, and complete ones that are not in the ledger.
        Keeps folders whose names are not those of checkpoints."""
        if not self.folder.is_dir():
            return
        self.ledger.fence()
        remove_leftovers(self.folder)
        known = {row.path.name for row in self.ledger.checkpoints()}
        for path in self.folder.iterdir():
            if path.name not in known and _CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir():
                remove_checkpoint(path)
