"""The files of a store: two buffers, a plan, a control block."""

import errno
import mmap
import os
import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor

from lockstep.weights.control import Control
from lockstep.weights.errors import NoRoom
from lockstep.weights.plan import Entry, Plan


def remove(folder: Path) -> None:
    """Deletes a store's files; what is mapped stays readable to who has mapped it."""
    for path in [folder / "control", folder / "plan.json", *folder.glob("buffer-*")]:
        path.unlink(missing_ok=True)


def lay_out(folder: Path, plan: Plan, writers: int) -> None:
    """Creates the files of a new store, the control block last."""
    size = max(plan.nbytes, mmap.PAGESIZE)
    available = shutil.disk_usage(folder).free
    if available < 2 * size:
        raise NoRoom(folder, 2 * size, available)
    try:
        for buffer in (0, 1):
            with (folder / f"buffer-{buffer}").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        remove(folder)
        if error.errno != errno.ENOSPC:
            raise
        raise NoRoom(folder, 2 * size, available) from error
    (folder / "plan.json").write_text(plan.to_json())
    Control.create(folder / "control", plan.digest, writers)


def views(memory: mmap.mmap, plan: Plan) -> dict[str, Tensor]:
    """All tensors of a buffer by name. They share one storage, so that neighbours can be looked at as one."""
    with warnings.catch_warnings():
        # torch warns that the memory is read-only: that is the point of it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        whole = torch.frombuffer(memory, dtype=torch.uint8)
    return {entry.name: _view(whole, entry) for entry in plan.entries}


def _view(whole: Tensor, entry: Entry) -> Tensor:
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.torch_dtype)
    return whole[entry.offset : entry.offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape)
