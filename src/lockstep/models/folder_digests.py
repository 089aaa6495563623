"""Digests of the files of an exported model or adapter, which are compared when Lockstep loads the folder.

They are in a file beside the weights: xxh3-128 of each tensor, of the header of each safetensors file (names, shapes
and precisions), and of each other file. Folders without this file load unchecked.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.base import waits
from lockstep.models.errors import ModelError

DIGESTS_FILE = "lockstep_digests.json"
_FORMAT = 1
_DIGEST_BYTES = 16 << 20
_THREADS = 8
_STALL_S = 600.0
"""Hashing has failed if no tensor is finished for this long: a file system that hangs."""
_REMEDY = "copy the folder again, or export it again"

_LONGEST_HEADER = 100 << 20
"""As in safetensors."""


def digest_of(tensor: Tensor) -> str:
    """Returns the xxh3-128 (hexadecimal) of a CPU tensor's bytes."""
    found = xxhash.xxh3_128()
    data: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    for start in range(0, len(data), _DIGEST_BYTES):
        found.update(data[start : start + _DIGEST_BYTES])
    return found.hexdigest()


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Computes the digests of CPU tensors, in several threads."""
    found = dict.fromkeys(tensors, "")

    def compute(name: str) -> None:
        found[name] = digest_of(tensors[name])

    _in_threads(compute, sorted(tensors, key=lambda name: -tensors[name].nbytes), "the tensors' digests")
    return found


def write_digests(folder: Path, tensors: Mapping[str, Mapping[str, str]]) -> None:
    """Writes the digests of a folder whose other files are written.

    Args:
        tensors: the digests of the tensors in each safetensors file, by file.
    """
    others = sorted(path for path in folder.iterdir() if path.name not in tensors and path.is_file())
    content = {
        "format": _FORMAT,
        "weights": {
            file: {"header": _header_digest(folder / file), "tensors": digests} for file, digests in tensors.items()
        },
        "files": {path.name: xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in others},
    }
    text = json.dumps({**content, "digest": _content_digest(content)}, indent=1)
    (folder / DIGESTS_FILE).write_text(text + "\n", encoding="utf-8")


def check_digests(folder: Path, field: str = "model.path", share: tuple[int, int] = (0, 1)) -> None:
    """Compares a folder with its digests, if it has any.

    Args:
        field: the field of the config that names the folder, for errors.
        share: which part of the tensors to read, and of how many: ranks that load the same folder read one part each.

    Raises:
        ModelError: a file is missing or was changed; names the file.
    """

    def damaged(file: str, what: str, remedy: str = _REMEDY) -> ModelError:
        return ModelError(field, str(folder), f"{file} {what}", remedy)

    content = _read_digests(folder, damaged)
    if content is None:
        return
    for file, digest in content["files"].items():
        if not (folder / file).is_file():
            raise damaged(file, "is missing")
        if xxhash.xxh3_128_hexdigest((folder / file).read_bytes()) != digest:
            changed = f"{_REMEDY}; if you changed {file} on purpose, delete {DIGESTS_FILE}, so that nothing is compared"
            raise damaged(file, "was changed or damaged since it was exported", changed)
    for file, expected in content["weights"].items():
        _check_weights(folder / file, expected, share, damaged)


def _read_digests(folder: Path, damaged: Callable[..., ModelError]) -> dict[str, Any] | None:
    """The content of the digests' file; None if there is none, or one of a later version."""
    try:
        text = (folder / DIGESTS_FILE).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise damaged(DIGESTS_FILE, f"cannot be read ({error})") from error
    try:
        content: dict[str, Any] = json.loads(text)
        digest, file_format = content.pop("digest"), content["format"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(DIGESTS_FILE, f"is damaged ({error})") from error
    if file_format != _FORMAT:
        return None
    if digest != _content_digest(content):
        raise damaged(DIGESTS_FILE, "is damaged: its content has another digest")
    return content


def _check_weights(
    path: Path, expected: Mapping[str, Any], share: tuple[int, int], damaged: Callable[..., ModelError]
) -> None:
    digests: Mapping[str, str] = expected["tensors"]
    (part, parts), bad = share, list[str]()
    try:
        if _header_digest(path) != expected["header"]:
            raise damaged(path.name, "was changed or damaged since it was exported: it has another header")
        with safe_open(path, framework="pt", device="cpu") as stored:

            def compare(name: str) -> None:
                if digest_of(stored.get_tensor(name)) != digests[name]:
                    bad.append(name)

            _in_threads(compare, sorted(digests)[part::parts], f"the digests of {path.name}")
    except FileNotFoundError:
        raise damaged(path.name, "is missing") from None
    except (SafetensorError, OSError) as error:
        raise damaged(path.name, f"is damaged and cannot be read ({error})") from error
    if bad:
        raise damaged(path.name, f"was changed or damaged since it was exported: {min(bad)} has another digest")


def _header_digest(path: Path) -> str:
    with path.open("rb") as file:
        size = file.read(8)
        return xxhash.xxh3_128_hexdigest(size + file.read(min(int.from_bytes(size, "little"), _LONGEST_HEADER)))


def _content_digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _in_threads(work: Callable[[str], None], names: Sequence[str], what: str) -> None:
    """Does the work for each name, in as many threads as there are cores, at most eight. Hashing releases the lock of
    the interpreter. Raises the first error."""
    waiting, errors = deque(names), list[Exception]()

    def run() -> None:
        while not errors:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            try:
                work(name)
            except (OSError, RuntimeError, ValueError, SafetensorError) as error:
                errors.append(error)

    count = min(_THREADS, len(names), len(os.sched_getaffinity(0)))
    threads = [threading.Thread(target=run, name=f"digests-{n}", daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        waits.join(thread, waits_for=what, why="to compare them", stall_s=_STALL_S, progress=lambda: len(waiting))
    if errors:
        raise errors[0]
