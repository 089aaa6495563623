"""Prepared images by their digests, in a folder that all processes of a run read.

The controller prepares each image once. Trainers and engines read the same arrays, so that they compute with the same
pixels. Samples, the ledger and messages carry only digests.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from lockstep.base.errors import PicklableError
from lockstep.base.folders import make_folder, write_atomically

IMAGE_FOLDER = "images"
"""Folder of a run with its prepared images."""
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
    """

    def __init__(self, folder: Path, writes: bool = True) -> None:
        self.folder, self.writes = folder, writes

    def path(self, digest: str) -> Path:
        """Returns the file of an image. Raises ValueError if the digest is none."""
        if len(digest) < 8 or not _HEX_DIGITS.issuperset(digest):
            raise ValueError(f"{digest!r} is not a digest of an image")
        return self.folder / digest[:2] / f"{digest}.safetensors"

    def original_path(self, digest: str) -> Path:
        """Returns the file of an image that the data holds itself, as it was before it was prepared."""
        return self.path(digest).with_suffix(".original")

    def __contains__(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def is_kept(self, digest: str, source: str) -> bool:
        """Whether the prepared image is there, and its original, if that is its source."""
        original = self.original_path(digest)
        return digest in self and (source != str(original) or original.is_file())

    def write(self, image: PreparedImage) -> None:
        """Writes an image, unless it is there. Other processes and threads see the whole file or none."""
        path = self.path(image.digest)
        if path.is_file():
            return
        about = {"features": image.features, "size": image.size, "resized": image.resized}
        arrays = {name: np.ascontiguousarray(values) for name, values in image.inputs.items()}
        _write_whole(path, save(arrays, {"image": json.dumps(about)}))

    def write_original(self, digest: str, content: bytes) -> None:
        """Writes the content of an image's file to `original_path`, as `write` does it."""
        _write_whole(self.original_path(digest), content)

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


def _write_whole(path: Path, content: bytes) -> None:
    """Writes a file with the access of the run's folder."""
    make_folder(path.parent)
    write_atomically(path, content)
