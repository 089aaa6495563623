"""The files of a store: two buffers, a plan, a control block."""

import errno
import math
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


def view(memory: mmap.mmap, entry: Entry) -> Tensor:
    """A tensor that lies in the memory of a buffer."""
    count = math.prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=entry.torch_dtype)
    return torch.frombuffer(memory, dtype=entry.torch_dtype, count=count, offset=entry.offset).view(entry.shape)


def views(memory: mmap.mmap, plan: Plan) -> dict[str, Tensor]:
    """All tensors of a buffer by name."""
    with warnings.catch_warnings():
        # torch warns that the memory is read-only: that is the point of it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return {entry.name: view(memory, entry) for entry in plan.entries}
