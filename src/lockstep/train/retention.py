"""Checkpoints as folders: which to keep, how to delete, how far one is. Imports no torch, as the controller asks."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path


def kept(steps: Mapping[int, float | None], keep_last: int, keep_best: bool) -> set[int]:
    """Which checkpoints to keep: the newest `keep_last`, and the one with the highest metric (the newest of equals)."""
    keep = set(sorted(steps)[-keep_last:])
    rated = [(metric, step) for step, metric in steps.items() if metric is not None]
    if keep_best and rated:
        keep.add(max(rated)[1])
    return keep


def remove_checkpoint(folder: Path) -> None:
    """Deletes a checkpoint; a deletion that is cut short leaves nothing that looks complete."""
    doomed = folder.with_name(f"{folder.name}.tmp-removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def sweep(parent: Path) -> list[Path]:
    """Deletes what cut saves and deletions have left in `parent`; call it when no trainer runs. What it deleted."""
    leftovers = sorted(path for path in parent.glob("*.tmp-*") if path.is_dir())
    for path in leftovers:
        shutil.rmtree(path)
    return leftovers


def bytes_written(parent: Path) -> int:
    """Bytes of all checkpoints in `parent`, unfinished ones included: moves while a save makes progress."""
    total = 0
    for folder, _, files in os.walk(parent):  # unlike rglob, it passes over folders that are renamed meanwhile
        for name in files:
            try:
                total += Path(folder, name).stat().st_size
            except FileNotFoundError:
                continue
    return total
