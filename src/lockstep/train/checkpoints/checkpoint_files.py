"""The files of a checkpoint: a safetensors file for each rank, and an index with place and digest of every part.

A part is the rows of one tensor that one rank held. Nothing in a checkpoint is pickled. Every part is compared with its
digest when it is read, and the index with its own.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lockstep.base.folders import make_folder, open_file, set_access
from lockstep.base.json_text import read_json
from lockstep.ledger.durable_files import fsync_folder
from lockstep.models.folder_digests import digest_of
from lockstep.train.errors import CheckpointError

INDEX_FILE = "checkpoint.json"
MAX_INDEX_BYTES = 1 << 30
CHECKPOINT_FORMAT = 2
INHERITED = "inherited"
"""Key of the manifest: what a new run takes over from the run that wrote the checkpoint, `all` or `weights`."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True, slots=True)
class LocalPart:
    """The rows of a tensor that this rank writes."""

    tensor: Tensor
    """Contiguous, on the CPU."""
    first: int
    """Index of the first row in the whole tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Consecutive rows of a tensor in a file."""

    file: str
    first: int
    """Index of the first row in the whole tensor."""
    rows: int
    digest: str
    """xxh3-128 (hexadecimal) of the rows' bytes; empty in checkpoints of format 1, which have none."""


@dataclass(slots=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    parts: list[StoredPart] = field(default_factory=list)


@dataclass(slots=True)
class CheckpointIndex:
    """What a checkpoint contains."""

    manifest: dict[str, Any]
    """The values that were given to `save`, with `format` and `world`."""
    tensors: dict[str, StoredTensor]
    read_part: Callable[[str, StoredPart], Tensor]
    """Reads the rows of a part of this tensor. Raises CheckpointError if they are damaged."""


def write_rank_file(folder: Path, rank: int, parts: Mapping[str, LocalPart]) -> None:
    """Writes the rows that a rank holds, by tensor, durably, with the rank's part of the index. Raises OSError."""
    make_folder(folder)
    name = f"rank-{rank:05d}.safetensors"
    try:
        save_file({key: part.tensor for key, part in parts.items()}, folder / name)
    except SafetensorError as problem:
        raise as_os_error(problem, folder / name) from problem
    set_access(folder / name)
    sync_file(folder / name)
    tensors = {
        key: {
            "shape": list(part.shape),
            "parts": [[name, part.first, _row_count(part.tensor), digest_of(part.tensor)]],
        }
        for key, part in parts.items()
    }
    files = {name: (folder / name).stat().st_size}
    write_json_durably(_rank_index(folder, rank), {"files": files, "tensors": tensors})


def write_index(folder: Path, ranks: Iterable[int], manifest: Mapping[str, Any]) -> None:
    """Joins the ranks' parts of the index, durably. All ranks must have written theirs. Raises OSError."""
    files: dict[str, int] = {}
    tensors: dict[str, Any] = {}
    for rank in ranks:
        part = json.loads(_rank_index(folder, rank).read_bytes())
        files |= part["files"]
        for name, tensor in part["tensors"].items():
            tensors.setdefault(name, {"shape": tensor["shape"], "parts": []})["parts"] += tensor["parts"]
        _rank_index(folder, rank).unlink()
    content = {**manifest, "format": CHECKPOINT_FORMAT, "files": files, "tensors": tensors}
    write_json_durably(folder / INDEX_FILE, {**content, "digest": _json_digest(content)})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the content of a complete checkpoint's index.

    Raises:
        CheckpointError: the folder or its index does not exist or is damaged, a file is missing or has another size, or
            the format is unknown.
    """
    if ".tmp-" in folder.name:
        raise CheckpointError(
            folder, "is the temporary folder of a save that did not finish; use a complete checkpoint"
        )
    try:
        manifest = read_json(folder / INDEX_FILE, max_bytes=MAX_INDEX_BYTES)
        files: dict[str, int] = manifest["files"]
        file_format = manifest["format"]
    except FileNotFoundError:
        raise CheckpointError(folder, f"has no {INDEX_FILE}, so it is not a complete checkpoint") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(folder, f"{INDEX_FILE} cannot be read ({error})") from error
    if file_format not in (1, CHECKPOINT_FORMAT):
        raise CheckpointError(
            folder, f"has format {file_format}; this version of lockstep reads formats 1 and {CHECKPOINT_FORMAT}"
        )
    digest = manifest.pop("digest", "")
    if file_format == CHECKPOINT_FORMAT and digest != _json_digest(manifest):
        raise CheckpointError(folder, f"{INDEX_FILE} is damaged: its content has another digest")
    for name, size in files.items():
        if Path(name).name != name:
            raise CheckpointError(folder, f"{INDEX_FILE} is damaged: it names {name!r}, which is not in the folder")
        path = folder / name
        actual = path.stat().st_size if path.exists() else None
        if actual != size:
            what = "is missing" if actual is None else f"has {actual} bytes instead of {size}"
            raise CheckpointError(folder, f"is incomplete: {name} {what}")
    return manifest  # type: ignore[no-any-return]


def inherit_checkpoint(source: Path, target: Path, *, optimizer: bool) -> None:
    """Makes a checkpoint for a new run from that of another one. Its files are shared where the file system allows it.

    Args:
        optimizer: whether the new run takes over the optimizer's state as well, or only the weights.

    Raises:
        CheckpointError: the checkpoint is damaged, or of format 1.
        OSError: a file cannot be written.
    """
    content = read_manifest(source)
    if content["format"] != CHECKPOINT_FORMAT:
        raise CheckpointError(source, "was written by an earlier version: resume its run, so that it writes a new one")
    temporary = target.with_name(f"{target.name}.tmp-inherited")
    make_folder(temporary)
    for name in content["files"]:
        try:
            os.link(source / name, temporary / name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source / name, temporary / name)
            sync_file(temporary / name)
    content[INHERITED] = "all" if optimizer else "weights"
    write_json_durably(temporary / INDEX_FILE, {**content, "digest": _json_digest(content)})
    fsync_folder(temporary)
    temporary.rename(target)
    fsync_folder(target.parent)


def open_files(folder: Path, manifest: dict[str, Any]) -> CheckpointIndex:
    """Opens the files of a checkpoint of the present format, whose manifest was read."""
    tensors = {
        name: StoredTensor(tuple(each["shape"]), [StoredPart(*part) for part in each["parts"]])
        for name, each in manifest["tensors"].items()
    }
    opened: dict[str, Any] = {}

    def read_part(name: str, part: StoredPart) -> Tensor:
        try:
            if part.file not in opened:
                opened[part.file] = safe_open(folder / part.file, "pt")
            found: Tensor = opened[part.file].get_tensor(name)
        except (SafetensorError, OSError) as problem:
            raise CheckpointError(folder, f"is damaged: {name!r} in {part.file} cannot be read: {problem}") from problem
        if digest_of(found) != part.digest:
            raise CheckpointError(folder, f"is damaged: {name!r} in {part.file} has another digest than when written")
        return found

    values = {key: value for key, value in manifest.items() if key not in ("files", "tensors")}
    return CheckpointIndex(values, tensors, read_part)


def read_elements(folder: Path, index: CheckpointIndex, name: str, first: int, into: Tensor) -> None:
    """Fills the contiguous `into`, in the order of its elements, with those of a tensor from index `first` on.

    Raises:
        CheckpointError: an element is missing or damaged, or has another precision.
    """
    flat, stored = into.view(-1), index.tensors[name]
    width = math.prod(stored.shape[1:])  # elements of a row
    last, filled = first + flat.numel(), 0
    for part in stored.parts:
        begin = part.first * width
        start, end = max(first, begin), min(last, begin + part.rows * width)
        if start >= end:
            continue
        rows = index.read_part(name, part)
        if rows.dtype != into.dtype or rows.shape[1:] != stored.shape[1:]:
            raise CheckpointError(
                folder, f"has {name!r} as {rows.dtype} {tuple(rows.shape)}, expected {into.dtype} {stored.shape}"
            )
        flat[start - first : end - first] = rows.reshape(-1)[start - begin : end - begin]
        filled += end - start
    if filled != last - first:
        raise CheckpointError(folder, f"is damaged: {last - first - filled} elements of {name!r} are missing")


def sync_file(path: Path) -> None:
    """Makes the content of a file durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_json_durably(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file and syncs it."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_TRUNC), "w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())


def _row_count(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def _rank_index(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _json_digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def as_os_error(problem: SafetensorError, path: Path) -> OSError:
    """The operating system's error that safetensors reports as text."""
    found = _OS_ERROR.search(str(problem))
    if found is None:
        return OSError(f"{path}: {problem}")
    return OSError(int(found[1]), os.strerror(int(found[1])), str(path))
