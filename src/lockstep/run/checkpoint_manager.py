"""Decides when to write a checkpoint, when it counts, and which ones to keep."""

import logging
import re
from pathlib import Path
from typing import Protocol

from lockstep.base import waits
from lockstep.cluster.protocol import RemoteError
from lockstep.config.trainer import CheckpointConfig as CheckpointConfig
from lockstep.ledger.ledger import Ledger
from lockstep.train.checkpoint import checkpoint_bytes, checkpoints_to_keep, remove_checkpoint, remove_leftovers
from lockstep.train.errors import CheckpointError

log = logging.getLogger(__name__)

_CHECKPOINT_NAME = re.compile(r"\d{8,}")


class CheckpointSaver(Protocol):
    """What writes: the policy."""

    def save(self, folder: Path) -> None: ...

    def saved(self) -> bool: ...


class CheckpointLoader(Protocol):
    """What reads: the policy."""

    def load(self, folder: Path) -> None: ...


def restore_checkpoint(loader: CheckpointLoader, ledger: Ledger) -> int:
    """Loads the newest checkpoint, or the one before where that is damaged (the step files since then are kept for
    this); the number of steps behind it, 0 where there is none yet.

    Raises:
        RemoteError: neither can be loaded; about the newest.
    """
    newest = ledger.checkpoints()[-2:][::-1]
    damage: list[RemoteError] = []
    for row in newest:
        try:
            loader.load(row.path)
        except RemoteError as error:
            if error.code != CheckpointError.error_code:
                raise
            log.warning("%s", error.message)
            damage.append(error)
            continue
        for damaged in newest[: len(damage)]:
            log.warning("going on from %s instead; what came after it is done again", row.path)
            ledger.forget_checkpoint(damaged.step)
        return row.step + 1
    if damage:
        raise damage[0]
    return 0


class CheckpointManager:
    """Writes checkpoints beside training. One counts only when the ledger names it, and the ledger names it only
    when it is complete on disk."""

    def __init__(self, config: CheckpointConfig, folder: Path, ledger: Ledger, saver: CheckpointSaver) -> None:
        self.config, self.folder, self.ledger, self.saver = config, folder, ledger, saver
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
        """Copies the weights and lets them be written in the background; an earlier one is finished first."""
        self.finish()
        path = self.folder / f"{version:08d}"  # as _NAME has it
        self.saver.save(path)
        self._pending = (version, path, metric)

    def poll(self) -> None:
        """Enters a checkpoint that has become complete into the ledger and removes what is no longer kept."""
        if self._pending is None or not self.saver.saved():
            return
        (version, path, metric), self._pending = self._pending, None
        self.ledger.checkpoint(version - 1, path, metric)
        self._prune()

    def finish(self) -> None:
        """Waits for the checkpoint under way, as long as it makes progress."""

        def complete() -> bool | None:
            self.poll()
            return True if self._pending is None else None

        waits.poll(
            complete,
            kind="file",
            waits_for="checkpoint",
            why="the checkpoint under way",
            stall_s=600.0,
            progress=lambda: checkpoint_bytes(self.folder),
            every_s=0.02,
        )

    def writer_lost(self) -> None:
        """The ranks that write are gone: what they had completed counts, the rest is cleared away."""
        pending, self._pending = self._pending, None
        if pending is not None and pending[1].is_dir():  # only what is complete has this name
            version, path, metric = pending
            self.ledger.checkpoint(version - 1, path, metric)
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
        self.ledger.retain()

    def _clear(self) -> None:
        """Deletes what a killed run left: saves that were cut, and complete ones that the ledger was not told of.
        What has another name was put there by somebody else, and stays."""
        if not self.folder.is_dir():
            return
        self.ledger.fence()
        remove_leftovers(self.folder)
        known = {row.path.name for row in self.ledger.checkpoints()}
        for path in self.folder.iterdir():
            if path.name not in known and _CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir():
                remove_checkpoint(path)
