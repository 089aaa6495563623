"""The images of a dataset's rows: where they are, their sizes, and their pixels.

An image may be anything. Only formats that Pillow decodes itself are opened, sizes are read before pixels, and a
problem names the image.
"""

import base64
import binascii
import io
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError
from PIL.Image import DecompressionBombError, Transpose

from lockstep.config.vision import ImageDataConfig
from lockstep.data.images.image_content import UnusableImage

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Formats that are opened. Others, such as EPS, start programs, or are rare and little tested."""
MAX_FILE_BYTES = 256 << 20
_ORIENTATION = 0x0112
"""The tag of EXIF that says how a camera was held."""
_UPRIGHT = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
_KINDS = 'a path, a data: URL, bytes, {"bytes": ..., "path": ...} or an image of Pillow'


class RowImage(ABC):
    """An image of a row, or a frame of a video. Nothing is read before it is asked for. All methods raise UnusableImage
    for an image that is missing, damaged, or has too many pixels."""

    source: str
    """The file's path, or a name such as `image 0`."""
    origin = ""
    """Of a frame of a video: the video's path or name, and the frame's number, such as `clip.mp4#12`."""
    file: Path | None = None
    """The file that the image is read from: its own, or that of its video."""
    is_file = False
    """Whether the image is a file, and not in the data or a video."""

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """Width and height of the upright image, read from the beginning of the file."""

    @abstractmethod
    def as_file(self) -> bytes:
        """An image that is no file, as the content of one."""

    @abstractmethod
    def content(self) -> bytes:
        """The bytes that identify the image."""

    @abstractmethod
    def pixels(self, content: bytes | None = None) -> "Image.Image":
        """Decodes the image: upright, in mode RGB.

        Args:
            content: what `content` returned, if it has been called.
        """

    @abstractmethod
    def check(self) -> None:
        """Decodes the whole image, as coarsely as its format allows."""


class StillImage(RowImage):
    """An image in a file or in the data.

    Args:
        source: the file's path, or a name such as `image 0`.
        data: the file, its content, or an image of Pillow.
        max_pixels: the most pixels that are decoded.
    """

    def __init__(self, source: str, data: "Path | bytes | Image.Image", max_pixels: int) -> None:
        self.source, self._data, self._max_pixels = source, data, max_pixels
        self.file = data if isinstance(data, Path) else None
        self.is_file = self.file is not None
        self._size: tuple[int, int] | None = None

    @property
    def size(self) -> tuple[int, int]:
        if self._size is None:
            with self._opened() as image:
                self._size = _upright_size(image)
        return self._size

    def as_file(self) -> bytes:
        if isinstance(self._data, Image.Image):
            file = io.BytesIO()
            self.pixels().save(file, "PNG")
            return file.getvalue()
        return self.content()

    def content(self) -> bytes:
        """The bytes that identify the image: those of its file, or its pixels."""
        if isinstance(self._data, bytes):
            return self._data
        if isinstance(self._data, Path):
            try:
                with self._data.open("rb") as file:
                    found = file.read(MAX_FILE_BYTES + 1)
            except OSError as error:
                raise UnusableImage(self.source, f"cannot be read ({error.strerror})") from error
            if len(found) > MAX_FILE_BYTES:
                raise UnusableImage(self.source, f"is a file of more than {MAX_FILE_BYTES >> 20} MiB")
            return found
        with self._decoding():
            image = self._data
            return f"{image.mode} {image.size} {image.getpalette()}".encode() + image.tobytes()

    def pixels(self, content: bytes | None = None) -> "Image.Image":
        """Decodes the image: upright, in mode RGB. Transparent parts are white, as in qwen_vl_utils and vLLM."""
        with self._opened(content) as image, self._decoding():
            upright = _UPRIGHT.get(_orientation(image))
            image.load()
            colours = in_rgb(image)
            found = colours.transpose(upright) if upright is not None else colours
        if found.size != self.size:
            raise UnusableImage(self.source, f"has {found.size} pixels, but its beginning says {self.size}")
        return found

    def check(self) -> None:
        with self._opened() as image, self._decoding():
            if not isinstance(self._data, Image.Image):
                image.draft("RGB", (1, 1))
            image.load()

    @contextmanager
    def _opened(self, content: bytes | None = None) -> Iterator["Image.Image"]:
        """Opens the image, and checks what its beginning says."""
        if isinstance(self._data, Image.Image):
            self._check_header(self._data)
            yield self._data
            return
        data = content if content is not None else self._data
        if isinstance(data, Path) and not data.is_file():
            raise UnusableImage(self.source, "does not exist" if not data.exists() else "is not a file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of much that is checked here, or harmless
            try:
                image = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data, formats=FORMATS)
            except UnidentifiedImageError as error:
                known = ", ".join(FORMATS)
                raise UnusableImage(self.source, f"is no image in a known format ({known}), or is damaged") from error
            except DecompressionBombError as error:
                raise UnusableImage(self.source, self._too_large("very many")) from error
            except OSError as error:
                raise UnusableImage(self.source, f"cannot be read ({error})") from error
            with image:
                self._check_header(image)
                yield image

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            yield
        except UnusableImage:
            raise
        except Exception as error:  # Pillow's decoders raise what they meet: OSError, SyntaxError, struct.error, ...
            raise UnusableImage(self.source, f"is truncated or damaged ({error or type(error).__name__})") from error

    def _check_header(self, image: "Image.Image") -> None:
        width, height = image.size
        if width < 1 or height < 1:
            raise UnusableImage(self.source, f"has {width} x {height} pixels")
        if width * height > self._max_pixels:
            raise UnusableImage(self.source, self._too_large(f"{width} x {height}"))
        with self._decoding():
            # A camera's file (MPO) may hold further views of the same picture.
            frames = getattr(image, "n_frames", 1) if image.format != "MPO" else 1
        if frames > 1:
            remedy = "Give it as a video, whose frames are taken, or set data.images.on_error to skip."
            raise UnusableImage(self.source, f"has {frames} frames", remedy)

    def _too_large(self, pixels: str) -> str:
        return f"has {pixels} pixels, more than data.images.max_pixels_in_file {self._max_pixels}"


class ImageFinder:
    """Finds the images that the rows of one dataset name.

    Args:
        data_path: the file or folder of the dataset: relative paths start from there if the config names no folder.
    """

    def __init__(self, cfg: ImageDataConfig, data_path: str) -> None:
        self._max_pixels = cfg.max_pixels_in_file
        self._is_limited = bool(cfg.folders)
        data = Path(data_path).expanduser()
        own = data if data.is_dir() else data.parent
        here = Path.cwd()
        self._folders = [Path(os.path.normpath(here / Path(each).expanduser())) for each in cfg.folders or (own,)]

    def find(self, value: Any, name: str) -> RowImage:
        """Returns an image of a row.

        Args:
            value: a path, a `data:` URL, bytes, a dict of `bytes` and `path`, or an image of Pillow.
            name: of an image that has no path, such as `image 0`.

        Raises:
            UnusableImage: the value is no image, or names a file that must not be read.
        """
        if isinstance(value, Mapping):
            if value.get("bytes") is not None:
                return self.find(value["bytes"], name)
            inner = next((value[key] for key in ("path", "url", "image") if value.get(key) is not None), None)
            if inner is None:
                raise UnusableImage(name, f"has neither bytes nor path, but {', '.join(value) or 'nothing'}")
            return self.find(inner, name)
        if isinstance(value, bytes | bytearray | memoryview):
            return StillImage(name, bytes(value), self._max_pixels)
        if isinstance(value, Image.Image):
            return StillImage(name, value, self._max_pixels)
        if not isinstance(value, str):
            raise UnusableImage(name, f"is {type(value).__name__}, expected {_KINDS}", "Write one of these.")
        if value.startswith("data:"):
            return StillImage(name, from_data_url(value, name), self._max_pixels)
        if value.startswith(("http://", "https://")):
            remedy = "Lockstep downloads no images: save the file, and write its path."
            raise UnusableImage(value, "is on the web", remedy)
        path = self.path(value.removeprefix("file://"))
        return StillImage(str(path), path, self._max_pixels)

    def path(self, text: str) -> Path:
        """Returns the file or folder that a row names. Raises UnusableImage if it must not be read."""
        if "\0" in text or not text:
            raise UnusableImage(text, "is no path")
        try:
            return self._path(text)
        except (OSError, RuntimeError) as error:  # a name too long, a folder that must not be read, an unknown user
            raise UnusableImage(f"{text:.80}", f"cannot be read ({error})") from error

    def _path(self, text: str) -> Path:
        named = Path(text).expanduser() if not self._is_limited else Path(text)
        candidates = [Path(os.path.normpath(folder / named)) for folder in self._folders]
        if self._is_limited:
            # Compared as text: a folder of images may contain links to other disks.
            pairs = zip(candidates, self._folders, strict=True)
            candidates = [path for path, folder in pairs if path.is_relative_to(folder)]
            if not candidates:
                folders = ":".join(map(str, self._folders))
                remedy = f"Only files in data.images.folder ({folders}) are read."
                raise UnusableImage(text, "is outside of the folders of images", remedy)
        return next((path for path in candidates if path.exists()), candidates[0])


def from_data_url(url: str, name: str) -> bytes:
    """Decodes a `data:` URL in base64. Raises UnusableImage."""
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise UnusableImage(name, f"is a URL that begins with {head[:40]!r}, expected data:...;base64,...")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UnusableImage(name, f"is a data: URL, but not in base64 ({error})") from error


def _orientation(image: "Image.Image") -> int:
    """The orientation in the beginning of the file; 1 if it has none there."""
    if "exif" not in image.info or image.format == "TIFF":  # Pillow turns TIFF itself
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - damaged metadata of an image that may be good
        return 1


def _upright_size(image: "Image.Image") -> tuple[int, int]:
    width, height = image.size
    return (height, width) if _orientation(image) in (5, 6, 7, 8) else (width, height)


def in_rgb(image: "Image.Image") -> "Image.Image":
    """The image in mode RGB, white where it is transparent."""
    if image.mode.startswith("I") or image.mode == "F":
        # Pillow cuts off larger values; 16 bits become 8.
        image = image.convert("I").point(lambda value: value * (1 / 257)).convert("L")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "La", "RGBa"):
        seen = image.convert("RGBA")
        white = Image.new("RGBA", seen.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, seen).convert("RGB")
    return image.convert("RGB")
