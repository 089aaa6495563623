"""Decides which checkpoint folders to keep, deletes the others, and measures their size.

Separate from `checkpoint`, so that the controller does not import torch.
"""

import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from lockstep.base.folders import make_folder
from lockstep.ledger.durable_files import fsync_folder

_LEFTOVER_NAME = re.compile(r".*\.tmp-.*|\d{8,}\.parts")


def checkpoints_to_keep(steps: Mapping[int, float | None], keep_last: int, keep_best: bool) -> set[int]:
    """Returns the steps to keep: the newest `keep_last`, and the one with the highest metric (of equals the newest)."""
    keep = set(sorted(steps)[-keep_last:])
    rated = [(metric, step) for step, metric in steps.items() if metric is not None]
    if keep_best and rated:
        keep.add(max(rated)[1])
    return keep


def remove_checkpoint(folder: Path) -> None:
    """Deletes a checkpoint. It is renamed first, so that an interrupted deletion leaves nothing that looks complete."""
    renamed = folder.with_name(f"{folder.name}.tmp-removed")
    shutil.rmtree(renamed, ignore_errors=True)
    folder.rename(renamed)
    shutil.rmtree(renamed)


def part_folder(folder: Path, role: str, roles: Collection[str]) -> Path:
    """Where a role's part of the checkpoint `folder` is, or of a copy in memory. With several trained roles each has a
    subfolder of its name; with one, the folder is that role's checkpoint."""
    return folder / role if len(roles) > 1 else folder


def create_parts_folder(folder: Path) -> Path:
    """Creates the folder in which the parts of the checkpoint `folder` are written, and returns it."""
    parts = _parts_folder(folder)
    make_folder(parts)
    return parts


def are_parts_complete(folder: Path, parts: Sequence[str]) -> bool:
    """Whether all these parts of the checkpoint `folder` are written. Only a complete part has its name."""
    return all((_parts_folder(folder) / part).is_dir() for part in parts)


def join_parts(folder: Path) -> None:
    """Gives a checkpoint whose parts are complete its final name, durably."""
    written = _parts_folder(folder)
    fsync_folder(written)
    if folder.exists():  # a step was repeated
        remove_checkpoint(folder)
    written.rename(folder)
    fsync_folder(folder.parent)


def _parts_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.parts")


def remove_leftovers(parent: Path) -> list[Path]:
    """Deletes leftovers of interrupted saves and deletions in `parent` and returns them. No trainer may be running."""
    leftovers = sorted(path for path in parent.glob("*") if _LEFTOVER_NAME.fullmatch(path.name) and path.is_dir())
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


def checkpoint_bytes(parent: Path) -> int:
    """Returns the bytes of all checkpoints in `parent`, also unfinished ones: the sum grows while a save progresses."""
    total = 0
    for folder, _, files in os.walk(parent):  # unlike rglob, it tolerates folders that are renamed meanwhile
        for name in files:
            try:
                total += Path(folder, name).stat().st_size
            except FileNotFoundError:
                continue
    return total
