"""Saves and loads checkpoints of all ranks, so that a folder is either complete or not usable.

`save` copies the state to host memory and returns. A thread then writes the copy into `<name>.tmp-...`. The thread has
a gloo communicator of its own, so that its collectives never mix with those of training. When every rank's files are
on disk (fsync), rank 0 writes the index, syncs the folder, renames it, and notifies the other ranks. A folder is
complete if it has the final name and its index matches its files; loading any other folder raises CheckpointError.
"""

import logging
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.base import waits
from lockstep.base.disk_errors import REFUSED_ERRNOS, refusal_reason
from lockstep.ledger.durable_files import fsync_folder
from lockstep.train.checkpoints.checkpoint_files import (
    LocalPart,
    open_files,
    read_elements,
    read_manifest,
    write_index,
    write_rank_file,
)
from lockstep.train.checkpoints.earlier_checkpoint import open_earlier_files
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import CheckpointError
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)

PARAMETER = "parameter."
"""Prefix of the names of trained weights in checkpoints."""


@dataclass(slots=True)
class LocalRows:
    """This rank's rows of a tensor that is sharded by rows over all ranks; all rows if there is only one rank. Or this
    rank's elements of a tensor that is sharded in another way (ZeRO), as a flat piece."""

    local: Tensor
    """`[rows, ...]`, or `[elements]` of a piece."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: int | None = None
    """Index of the first element of a flat piece; None for rows."""

    def first_element(self, ranks: ParallelContext) -> int:
        """Index in the flattened tensor of the first element that this rank has."""
        if self.start is not None or not self.shape:
            return self.start or 0
        return ranks.rows(self.shape[0])[0] * torch.Size(self.shape[1:]).numel()

    def part(self, ranks: ParallelContext) -> LocalPart:
        """A copy of it in host memory, to be written. A flat piece is one of the flattened tensor."""
        if self.start is not None:
            return LocalPart(_copy_of(self.local), self.start, (torch.Size(self.shape).numel(),))
        first = ranks.rows(self.shape[0])[0] if self.shape else 0
        return LocalPart(_copy_of(self.local), first, self.shape)


class CheckpointWriter:
    """Writes one rank's part of checkpoints in the background, one at a time."""

    def __init__(self, ranks: ParallelContext, generation: int = 1) -> None:
        self.ranks, self.generation = ranks, generation
        self._count = 0
        self._future: Future[None] | None = None

    def save(
        self, folder: Path, sharded: Mapping[str, LocalRows], whole: Mapping[str, Tensor], manifest: dict[str, Any]
    ) -> None:
        """Waits for an earlier save, copies the state, and begins to write it in the background.

        Args:
            sharded: tensors sharded over the ranks.
            whole: tensors that only this rank has, under names that no other rank uses.
            manifest: additional JSON values for the manifest; the same on all ranks.

        Raises:
            CheckpointError: the earlier save failed, and `saved` has not reported it yet.
        """
        self.finish()
        self._count += 1
        parts: dict[str, LocalPart] = {}
        for name, rows in sharded.items() if self.ranks.replica == 0 else ():  # other replicas hold the same rows
            parts[name] = rows.part(self.ranks)
        for name, tensor in whole.items():
            parts[name] = LocalPart(_copy_of(tensor), 0, tuple(tensor.shape))
        temporary = folder.with_name(f"{folder.name}.tmp-{self.generation}-{self._count}")
        future: Future[None] = Future()
        self._future = future
        threading.Thread(
            target=self._write,
            args=(future, temporary, folder, parts, manifest),
            name="checkpoint",
            daemon=True,
        ).start()

    def saved(self) -> bool:
        """Whether the last save is complete and visible; True before the first. Raises CheckpointError once."""
        if self._future is not None and self._future.done():
            self.finish()
        return self._future is None

    def finish(self) -> None:
        """Waits until no save is in progress. Raises CheckpointError if the save failed."""
        future, self._future = self._future, None
        if future is not None:
            # A save consists of two collectives, each with the communicator's time limit, and the writing.
            waits.future(
                future, waits_for="checkpoint writer", why="the last save ends", timeout_s=3 * self.ranks.timeout_s
            )

    def _write(
        self, future: Future[None], temporary: Path, folder: Path, parts: dict[str, LocalPart], manifest: dict[str, Any]
    ) -> None:
        error: CheckpointError | None = CheckpointError(folder, "the writer ended without a result; see the log")
        try:
            self._write_files(temporary, folder, parts, manifest)
            error = None
            current_beacon().add("checkpoints", 1)
        except CheckpointError as problem:
            error = problem
        except (OSError, RuntimeError, ValueError) as problem:
            error = CheckpointError(folder, f"{type(problem).__name__}: {problem}")
        finally:
            if error is None:
                future.set_result(None)
            else:
                if self.ranks.rank == 0:
                    shutil.rmtree(temporary, ignore_errors=True)
                future.set_exception(error)

    def _write_files(
        self, temporary: Path, folder: Path, parts: dict[str, LocalPart], manifest: dict[str, Any]
    ) -> None:
        problem = ""
        try:
            write_rank_file(temporary, self.ranks.rank, parts)
        except (OSError, ValueError) as error:
            problem = _problem_text(error, folder)
        self._raise_any(problem, folder, why=f"the files of {folder.name} are written")
        try:
            if self.ranks.rank == 0:
                write_index(temporary, range(self.ranks.world), {"world": self.ranks.world, **manifest})
                commit_folder(temporary, folder)
        except (OSError, ValueError) as error:
            problem = _problem_text(error, folder)
        self._raise_any(problem, folder, why=f"{folder.name} is complete")

    def _raise_any(self, problem: str, folder: Path, why: str) -> None:
        """Raises CheckpointError on all ranks if there is a problem on one. All ranks call it."""
        problems = self.ranks.gather_texts(problem, why)
        found = next(((rank, text) for rank, text in enumerate(problems) if text), None)
        if found is not None:
            raise CheckpointError(folder, f"rank {found[0]}: {found[1]}")


def commit_folder(temporary: Path, folder: Path) -> None:
    """Renames a finished folder to its final name, durably. Replaces a folder of that name, which exists if a step was
    repeated."""
    fsync_folder(temporary)
    stale = folder.with_name(f"{folder.name}.tmp-replaced")
    if folder.exists():
        shutil.rmtree(stale, ignore_errors=True)
        folder.rename(stale)
    temporary.rename(folder)
    fsync_folder(folder.parent)
    shutil.rmtree(stale, ignore_errors=True)


def load_checkpoint(
    folder: Path,
    sharded: Mapping[str, LocalRows],
    whole: Mapping[str, Tensor],
    ranks: ParallelContext,
    expected: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Fills this rank's tensors from a checkpoint; see `read_checkpoint`. Changes no tensor unless everything could be
    read. Returns the manifest."""
    found = read_checkpoint(folder, sharded, whole, ranks, expected)
    found.fill()
    return found.manifest


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """What a rank has read of a checkpoint."""

    manifest: dict[str, Any]
    values: dict[str, Tensor]
    """In host memory, by name."""
    targets: dict[str, Tensor]
    """The tensors that are to get the values."""

    @torch.no_grad()
    def fill(self) -> None:
        """Copies the values to this rank's tensors."""
        for name, target in self.targets.items():
            target.copy_(self.values[name])


def read_checkpoint(
    folder: Path,
    sharded: Mapping[str, LocalRows],
    whole: Mapping[str, Tensor],
    ranks: ParallelContext,
    expected: Mapping[str, Any] | None = None,
) -> ReadCheckpoint:
    """Reads the values of this rank's tensors from a checkpoint that any number of ranks wrote. Uses no collectives.

    Tensors in `whole` that the checkpoint lacks, because fewer ranks wrote it, are left out.

    Args:
        expected: values that the manifest must contain, such as the digest of an adapter's base model.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, has other parameters (fewer or more), or other values
            than `expected`.
    """
    manifest = read_manifest(folder)
    for name, value in (expected or {}).items():
        if manifest.get(name) != value:
            what = f"{name} {manifest.get(name)!r}, expected {value!r}"
            raise CheckpointError(
                folder, f"belongs to an earlier content of {manifest.get('model')}: {what}; restore that model"
            )
    index = (open_earlier_files if manifest["format"] == 1 else open_files)(folder, manifest)
    for name, rows in sharded.items():
        stored = index.tensors.get(name)
        if stored is None or stored.shape not in (tuple(rows.shape), (torch.Size(rows.shape).numel(),)):
            what = "does not have" if stored is None else f"has with shape {stored.shape}"
            raise CheckpointError(folder, f"belongs to another model: it {what} {name!r}, expected shape {rows.shape}")
    unread = next((name for name in index.tensors if name.startswith(PARAMETER) and name not in sharded), None)
    if unread is not None:
        why = f"it has {unread!r}, which is not trained here: export its model, and set model.path to that"
        raise CheckpointError(folder, f"belongs to a run that trained other weights: {why}")
    targets = {name: rows.local for name, rows in sharded.items()}
    targets |= {name: tensor for name, tensor in whole.items() if name in index.tensors}
    # Contiguous ones, whatever the strides of the tensors to fill.
    values = {name: torch.empty(target.shape, dtype=target.dtype) for name, target in targets.items()}
    for name, value in values.items():
        read_elements(folder, index, name, sharded[name].first_element(ranks) if name in sharded else 0, value)
    return ReadCheckpoint(index.manifest, values, targets)


def _copy_of(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _problem_text(problem: BaseException, folder: Path) -> str:
    """Describes why this rank could not write, with a remedy if the file system refused it."""
    text = f"{type(problem).__name__}: {problem}"
    if isinstance(problem, OSError) and problem.errno in REFUSED_ERRNOS:
        text += f"; {refusal_reason(problem.errno, folder)}, then resume the run"
    return text
