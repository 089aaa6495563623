"""What the image files of a run's data contained when the run began.

As in git's index, a file is read again only if its size or its time has changed: so a resumed run finds out within
moments which of its images are other ones now.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.base.folders import make_folder, write_atomically
from lockstep.data.dataset_rows import DataError
from lockstep.data.images.image_content import UnusableImage

RECORD_FILE = "files.json"
"""In the folder of a run's prepared images."""
GONE = "missing"
"""In place of the digest of a file that cannot be read."""
_FORMAT = 1
_DIGEST_CHARS = 32


@dataclass(slots=True)
class RecordedFile:
    """An image file as it was."""

    digest: str
    """sha256 of its content, hexadecimal, the first 32 characters."""
    size: int
    time: int
    """Of its last modification, in nanoseconds."""
    rows: list[int] = field(default_factory=list)
    """The rows of its dataset that have it."""


@dataclass(frozen=True, slots=True)
class ChangedFile:
    """An image file that is not what it was."""

    path: str
    row: int
    """The first row of the dataset that has it."""
    old: str
    new: str
    """The digest now, or `GONE`."""

    def __str__(self) -> str:
        return f"row {self.row}: image {self.path!r} (was {self.old}, is {self.new})"


class DatasetImages:
    """The image files of one dataset, by path.

    Attributes:
        dropped: the rows that are left out of the run.
    """

    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.files: dict[str, RecordedFile] = {}

    def add(self, path: str, rows: list[int]) -> None:
        """Records the content of a file that these rows have. Raises UnusableImage if it cannot be read."""
        try:
            about = Path(path).stat()
            digest = _file_digest(path)
        except OSError as error:
            raise UnusableImage(path, f"cannot be read ({error.strerror})") from error
        self.files[path] = RecordedFile(digest, about.st_size, about.st_mtime_ns, rows)

    def difference(self, path: str, content: bytes | None = None) -> ChangedFile | None:
        """Compares a file with what it was; None if it is the same, or was not recorded.

        Args:
            content: of the file, if it has just been read; else it is read if its size or its time has changed.
        """
        known = self.files.get(path)
        if known is None:
            return None
        new = _digest_now(path, known) if content is None else content_digest(content)
        return None if new == known.digest else ChangedFile(path, known.rows[0], known.digest, new)

    def changed(self) -> Iterator[tuple[ChangedFile, list[int]]]:
        """Yields the files that are not what they were, each with the rows that have it."""
        for path, known in self.files.items():
            if (change := self.difference(path)) is not None:
                yield change, known.rows


class ImageRecord:
    """The image files of all datasets of a run.

    Args:
        file: where they are recorded.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._opened: Counter[str] = Counter()
        self._datasets: dict[str, DatasetImages] = {}
        self.exists = file.is_file()
        """Whether the record was read: the run began before."""
        if self.exists:
            try:
                self._read(json.loads(file.read_text("utf-8")))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                remedy = "Delete it: the run continues, and compares with its images as they are now."
                raise DataError(
                    str(file), f"the record of the run's image files is damaged ({error})", remedy
                ) from error

    def dataset(self, path: str) -> DatasetImages:
        """The images of a dataset, which a run opens in the same order each time: some more than once."""
        key = f"{self._opened[path]}:{path}"
        self._opened[path] += 1
        return self._datasets.setdefault(key, DatasetImages())

    def write(self) -> None:
        """Writes the record, whole or not at all."""
        datasets = {
            key: {
                "dropped": each.dropped,
                "files": {path: [f.digest, f.size, f.time, f.rows] for path, f in each.files.items()},
            }
            for key, each in self._datasets.items()
        }
        make_folder(self.file.parent)
        write_atomically(self.file, json.dumps({"format": _FORMAT, "datasets": datasets}).encode())
        self.exists = True

    def _read(self, value: dict[str, Any]) -> None:
        for key, each in value["datasets"].items():
            found = self._datasets[key] = DatasetImages()
            found.dropped = each["dropped"]
            found.files = {path: RecordedFile(*about) for path, about in each["files"].items()}


def content_digest(content: bytes) -> str:
    """The digest of a file's content."""
    return hashlib.sha256(content).hexdigest()[:_DIGEST_CHARS]


def _digest_now(path: str, known: RecordedFile) -> str:
    try:
        about = Path(path).stat()
        return known.digest if (about.st_size, about.st_mtime_ns) == (known.size, known.time) else _file_digest(path)
    except OSError:
        return GONE


def _file_digest(path: str) -> str:
    """The digest of a file, of which little is in memory at a time: it may be a video. Raises OSError."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGEST_CHARS]


def list_changes(changes: Sequence[ChangedFile], most: int = 5) -> str:
    """Describes the first changes."""
    more = f", and {len(changes) - most} more" if len(changes) > most else ""
    return "; ".join(map(str, changes[:most])) + more
