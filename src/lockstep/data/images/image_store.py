"""Prepared images by their digests, in a folder that all processes of a run read.

The controller prepares each image once. Trainers and engines read the same arrays, so that they compute with the same
pixels. Samples, the ledger and messages carry only digests.

The folder is bounded. The process that prepares the images deletes those that were used longest ago, except images of
samples in flight; a deleted image is prepared again from its source when a sample with it is taken again.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lockstep.base.errors import PicklableError
from lockstep.base.folders import make_folder, write_atomically

if TYPE_CHECKING:
    from lockstep.data.images.image_record import ImageRecord

IMAGE_FOLDER = "images"
"""Folder of a run with its prepared images."""
OBSERVED = ".observed"
"""Ending of the file of an image with which an environment answered, as it was before it was prepared."""
_HEX_DIGITS = frozenset("0123456789abcdef")


class ImageUnavailable(PicklableError):
    """A prepared image is not in the store, or its file is damaged."""

    def __init__(self, digest: str, path: Path, problem: str) -> None:
        super().__init__(
            f"image {digest}: {path} {problem}. All hosts of the run must see this folder; a resumed run prepares the "
            "images again"
        )
        self.digest = digest


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as the model's processor prepared it."""

    digest: str
    """Hash of the image's bytes and of the settings of its preparation, hexadecimal."""
    inputs: dict[str, np.ndarray]
    """The arguments of the model's `get_image_features`, such as `pixel_values` and `image_grid_thw`, for this image
    alone; with the dimensions that the processor gives them for one prompt with one image."""
    features: int
    """How many embeddings the image has: the number of its places in a prompt."""
    size: tuple[int, int]
    """Width and height in the file, in pixels."""
    resized: tuple[int, int]
    """Width and height after resizing."""


class ImageStore:
    """Reads and writes prepared images.

    Args:
        folder: where they are kept, one file per image. It is created when the first image is written.
        writes: whether images may be written; set it later for a folder that must not exist yet.
        room: the most bytes of the folder, unless samples in flight need more; unlimited if None. Only one process may
            have a store with a limit.

    Attributes:
        record: the content of the image files when the run began; None if it is not known.
    """

    def __init__(self, folder: Path, writes: bool = True, room: int | None = None) -> None:
        self.folder, self.writes, self.room = folder, writes, room
        self.record: ImageRecord | None = None
        self._files: OrderedDict[Path, int] | None = None
        """The sizes of the files, those used longest ago first; None before the folder was listed."""
        self._held: dict[Hashable, set[str]] = {}
        self._expected: set[str] = set()
        self._lock = threading.RLock()

    def path(self, digest: str) -> Path:
        """Returns the file of an image. Raises ValueError if the digest is none."""
        if len(digest) < 8 or not _HEX_DIGITS.issuperset(digest):
            raise ValueError(f"{digest!r} is not a digest of an image")
        return self.folder / digest[:2] / f"{digest}.safetensors"

    def original_path(self, digest: str) -> Path:
        """Returns the file of an image that the data holds itself, as it was before it was prepared."""
        return self.path(digest).with_suffix(".original")

    def __contains__(self, digest: str) -> bool:
        """Whether a prepared image is there, and is as long as its beginning says: a damaged one is prepared again."""
        path = self.path(digest)
        if not path.is_file():  # a pipe would block
            return False
        try:
            with safe_open(path, framework="numpy"):
                return True
        except (OSError, SafetensorError):
            return False

    def is_kept(self, digest: str, source: str) -> bool:
        """Whether the prepared image is there, and its original, if that is its source."""
        original = self.original_path(digest)
        return digest in self and (source != str(original) or original.is_file())

    def write(self, image: PreparedImage) -> None:
        """Writes an image, unless it is there. Other processes and threads see the whole file or none."""
        if image.digest in self:
            return
        about = {"features": image.features, "size": image.size, "resized": image.resized}
        arrays = {name: np.ascontiguousarray(values) for name, values in image.inputs.items()}
        self._write_whole(self.path(image.digest), save(arrays, {"image": json.dumps(about)}))

    def write_original(self, digest: str, content: bytes) -> None:
        """Writes the content of an image's file to `original_path`, as `write` does it."""
        self._write_whole(self.original_path(digest), content)

    def read(self, digest: str, only: Collection[str] | None = None) -> PreparedImage:
        """Reads an image.

        Args:
            only: the inputs to read, of those that it has; all when absent.

        Raises:
            ImageUnavailable: it is not there, or its file is damaged.
        """
        path = self.path(digest)
        try:
            with safe_open(path, framework="numpy") as file:
                about = json.loads(file.metadata()["image"])
                names = [name for name in file.keys() if only is None or name in only]  # noqa: SIM118 - it is no dict
                inputs = {name: file.get_tensor(name) for name in names}
        except FileNotFoundError:
            raise ImageUnavailable(digest, path, "does not exist") from None
        except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
            raise ImageUnavailable(digest, path, f"is damaged ({error})") from error
        return PreparedImage(digest, inputs, about["features"], tuple(about["size"]), tuple(about["resized"]))

    def expect(self, digest: str) -> None:
        """Keeps an image that is being prepared, until `hold` is called for its sample."""
        if self.room is not None:
            with self._lock:
                self._expected.add(digest)

    def hold(self, owner: Hashable, digests: Iterable[str]) -> None:
        """Keeps images until `release` is called for the owner, and deletes others until they fit `room`."""
        with self._lock:
            added = set(digests)
            self._held.setdefault(owner, set()).update(added)
            self._expected -= added
            self._note_use(added)
            self._trim()

    def release(self, owners: Iterable[Hashable]) -> None:
        """Allows to delete what is held for these owners alone."""
        with self._lock:
            for owner in owners:
                self._held.pop(owner, None)
            self._trim()

    @property
    def owners(self) -> list[Hashable]:
        """For which owners images are held."""
        with self._lock:
            return list(self._held)

    def _note_use(self, digests: Collection[str]) -> None:
        if self.room is not None and self.writes:
            files = self._listed()
            for path in (each for digest in digests for each in (self.path(digest), self.original_path(digest))):
                if path in files:
                    files.move_to_end(path)

    def _trim(self) -> None:
        """Deletes prepared images until they fit, and then files of images that the data holds itself, which the report
        shows."""
        if self.room is None or not self.writes:
            return
        files, needed = self._listed(), self._expected.union(*self._held.values())
        free = [path for path in files if path.stem not in needed]
        excess = sum(files.values()) - self.room
        for path in sorted(free, key=lambda each: each.suffix == ".original"):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= files.pop(path)

    def _listed(self) -> OrderedDict[Path, int]:
        """The files that this store has written, or a store before it, without those of an environment's answers, which
        have no other source; drafts of a killed process are removed."""
        if self._files is None:
            found = []
            observed = {path.stem for path in self.folder.glob(f"??/*{OBSERVED}")}
            for path in self.folder.glob("??/*"):
                if path.name.startswith("."):
                    path.unlink(missing_ok=True)
                elif path.suffix in (".safetensors", ".original") and path.stem not in observed:
                    about = path.stat()
                    found.append((about.st_mtime_ns, path, about.st_size))
            self._files = OrderedDict((path, size) for _, path, size in sorted(found))
        return self._files

    def _write_whole(self, path: Path, content: bytes) -> None:
        """Writes a file with the access of the run's folder."""
        if self.room is not None:
            with self._lock:
                self._listed()  # before there are drafts of this process
        make_folder(path.parent)
        write_atomically(path, content)
        if self.room is not None:
            with self._lock:
                self._listed()[path] = len(content)
