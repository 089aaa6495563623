"""Reads and writes checkpoints with torch.distributed.checkpoint, so that a folder is either complete or not usable.

`save` copies the state to host memory and returns. A thread then writes the copy into `<name>.tmp-...`. The thread has
a gloo communicator of its own, so that its collectives never mix with those of training. When every rank's files are
on disk (fsync), rank 0 writes the manifest, syncs the folder, renames it, and notifies the other ranks. A folder is
complete if it has the final name and its manifest matches its files; loading any other folder raises CheckpointError.
"""

import errno
import json
import logging
import os
import shutil
import threading
import traceback
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future as TorchFuture

from lockstep.base import waits
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import CheckpointError
from lockstep.watch.beacon.writer import current_beacon

log = logging.getLogger(__name__)

# A single rank saves, and every rank loads, without collectives. That is intended, but torch warns each time.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

MANIFEST_FILE = "checkpoint.json"
CHECKPOINT_FORMAT = 1
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class LocalRows:
    """This rank's rows of a tensor that is sharded by rows over all ranks; all rows if there is only one rank."""

    local: Tensor
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


class _FileWriter(FileSystemWriter):
    """torch's file writer; if a write fails, it raises the operating system's error."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save's archive reports "unexpected pos" and leaves the reason in the exception's context.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror, str(self.path)) from error


class CheckpointWriter:
    """Writes one rank's part of checkpoints in the background, one at a time."""

    def __init__(self, ranks: ParallelContext, generation: int = 1) -> None:
        self.ranks, self.generation = ranks, generation
        self._count = 0
        self._future: Future[None] | None = None
        self._mesh = _storage_mesh(ranks)

    def save(
        self, folder: Path, sharded: Mapping[str, LocalRows], whole: Mapping[str, Tensor], manifest: dict[str, Any]
    ) -> None:
        """Waits for an earlier save, copies the state, and begins to write it in the background.

        Args:
            sharded: tensors sharded by rows over the ranks.
            whole: tensors that only this rank has, under names that no other rank uses.
            manifest: additional JSON values for the manifest; the same on all ranks.

        Raises:
            CheckpointError: the earlier save failed, and `saved` has not reported it yet.
        """
        self.finish()
        self._count += 1
        state: dict[str, Tensor] = {
            name: _as_dtensor(rows.local.detach().to("cpu", copy=True), rows.shape, self._mesh)
            for name, rows in sharded.items()
            if self.ranks.replica == 0  # the other replicas hold the same rows
        }
        state.update({name: tensor.detach().to("cpu", copy=True) for name, tensor in whole.items()})
        temporary = folder.with_name(f"{folder.name}.tmp-{self.generation}-{self._count}")
        future: Future[None] = Future()
        self._future = future
        threading.Thread(
            target=self._write, args=(future, temporary, folder, state, manifest), name="checkpoint", daemon=True
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
        self, future: Future[None], temporary: Path, folder: Path, state: dict[str, Tensor], manifest: dict[str, Any]
    ) -> None:
        error: CheckpointError | None = CheckpointError(folder, "the writer ended without a result; see the log")
        try:
            self._write_files(temporary, folder, state, manifest)
            error = None
            current_beacon().add("checkpoints", 1)
        except (CheckpointException, OSError, RuntimeError, ValueError) as problem:
            error = CheckpointError(folder, _first_failure(problem) + _free_space_hint(problem, folder))
        finally:
            if error is None:
                future.set_result(None)
            else:
                if self.ranks.rank == 0:
                    shutil.rmtree(temporary, ignore_errors=True)
                future.set_exception(error)

    def _write_files(self, temporary: Path, folder: Path, state: dict[str, Tensor], manifest: dict[str, Any]) -> None:
        metadata = dcp_save(
            state,
            storage_writer=_FileWriter(temporary, sync_files=True),
            process_group=self.ranks.storage,
            no_dist=self.ranks.world == 1,
        )
        error: OSError | None = None
        if self.ranks.rank == 0:
            try:
                self._complete(temporary, folder, metadata, manifest)
            except OSError as problem:
                error = problem
        if not self.ranks.broadcast_flag(error is None, why=f"{folder.name} is complete"):
            raise error or OSError(f"rank 0 could not complete {temporary}; see its log")

    def _complete(self, temporary: Path, folder: Path, metadata: Metadata, manifest: dict[str, Any]) -> None:
        """Writes the manifest and gives the folder its final name. Rank 0 calls it when all ranks' files are on
        disk."""
        names = {stored.relative_path for stored in (metadata.storage_data or {}).values()} | {".metadata"}
        files = {name: (temporary / name).stat().st_size for name in sorted(names)}
        _write_json_durably(
            temporary / MANIFEST_FILE,
            {"format": CHECKPOINT_FORMAT, "world": self.ranks.world, "files": files, **manifest},
        )
        commit_folder(temporary, folder)


def commit_folder(temporary: Path, folder: Path) -> None:
    """Renames a finished folder to its final name, durably. Replaces a folder of that name, which exists if a step was
    repeated."""
    sync_folder(temporary)
    stale = folder.with_name(f"{folder.name}.tmp-replaced")
    if folder.exists():
        shutil.rmtree(stale, ignore_errors=True)
        folder.rename(stale)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(stale, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a complete checkpoint: format, world, files and the metadata given to `save`.

    Raises:
        CheckpointError: the folder or its manifest does not exist, a file is missing or has another size, or the
            format is unknown.
    """
    if ".tmp-" in folder.name:
        raise CheckpointError(
            folder, "is the temporary folder of a save that did not finish; use a complete checkpoint"
        )
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text())
        files: dict[str, int] = manifest["files"]
        file_format = manifest["format"]
    except FileNotFoundError:
        raise CheckpointError(folder, f"has no {MANIFEST_FILE}, so it is not a complete checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(folder, f"{MANIFEST_FILE} cannot be read ({error})") from error
    if file_format != CHECKPOINT_FORMAT:
        raise CheckpointError(
            folder, f"has format {file_format}; this version of lockstep reads format {CHECKPOINT_FORMAT}"
        )
    for name, size in files.items():
        path = folder / name
        actual = path.stat().st_size if path.exists() else None
        if actual != size:
            what = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise CheckpointError(folder, f"is incomplete: {name} {what}")
    return manifest  # type: ignore[no-any-return]


def load_checkpoint(
    folder: Path,
    sharded: Mapping[str, LocalRows],
    whole: Mapping[str, Tensor],
    ranks: ParallelContext,
    expected: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Fills this rank's tensors from a checkpoint that any number of ranks wrote. Uses no collectives.

    Changes no tensor unless everything could be read. Tensors in `whole` that the checkpoint lacks, because fewer
    ranks wrote it, keep their values.

    Args:
        expected: values that the manifest must contain, such as the digest of an adapter's base model.

    Returns:
        The manifest.

    Raises:
        CheckpointError: the checkpoint is incomplete, has other parameters, or has other values than `expected`.
    """
    manifest = read_manifest(folder)
    for name, value in (expected or {}).items():
        if manifest.get(name) != value:
            what = f"{name} {manifest.get(name)!r}, expected {value!r}"
            raise CheckpointError(
                folder, f"belongs to an earlier content of {manifest.get('model')}: {what}; restore that model"
            )
    reader = FileSystemReader(folder)
    stored_tensors = reader.read_metadata().state_dict_metadata
    for name, rows in sharded.items():
        stored = stored_tensors.get(name)
        shape = tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else None
        if shape != rows.shape:
            what = "does not have" if shape is None else f"has with shape {shape}"
            raise CheckpointError(folder, f"belongs to another model: it {what} {name!r}, expected shape {rows.shape}")
    mesh = _storage_mesh(ranks)
    state: dict[str, Tensor] = {
        name: _as_dtensor(torch.empty_like(rows.local, device="cpu"), rows.shape, mesh)
        for name, rows in sharded.items()
    }
    state.update(
        {name: torch.empty_like(tensor, device="cpu") for name, tensor in whole.items() if name in stored_tensors}
    )
    try:
        dcp_load(state, storage_reader=reader, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(folder, f"cannot be read: {_first_failure(error)}") from error
    with torch.no_grad():
        for name, rows in sharded.items():
            rows.local.copy_(_to_local(state[name]))
        for name, tensor in whole.items():
            if name in state:
                tensor.copy_(state[name])
    return manifest


def sync_folder(folder: Path) -> None:
    """Makes renames and new files in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Makes the content of a file durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _write_json_durably(path: Path, content: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _storage_mesh(ranks: ParallelContext) -> DeviceMesh | None:
    """Returns the mesh of the ranks over which one replica of the parameters is sharded."""
    if ranks.storage is None or ranks.world == 1:
        return None
    return DeviceMesh.from_group(ranks.copy_storage or ranks.storage, "cpu")


def _as_dtensor(local: Tensor, shape: tuple[int, ...], mesh: DeviceMesh | None) -> Tensor:
    """Wraps the rows in a DTensor, so that torch's planner knows their position in the whole tensor."""
    if mesh is None:
        return local
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _free_space_hint(problem: BaseException, folder: Path) -> str:
    """Returns the free space and a fix if a full disk was the cause, else "". torch may have wrapped that error
    twice."""
    inner: list[BaseException] = [error for error, _ in getattr(problem, "failures", {}).values()] or [problem]
    if not any(isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS for error in inner):
        return ""
    return f"; {shutil.disk_usage(folder.parent).free:,} bytes are free there: make room, then resume the run"


def _first_failure(problem: BaseException) -> str:
    """Describes the first failure, with its rank if torch reports one."""
    if isinstance(problem, CheckpointException) and problem.failures:
        rank, (inner, frames) = min(problem.failures.items())
        log.error("checkpoint failed on rank %d: %s\n%s", rank, inner, "".join(traceback.format_list(frames)))
        return f"rank {rank}: {type(inner).__name__}: {inner}"
    return f"{type(problem).__name__}: {problem}"
