"""A video in one file, of which frames are decoded one after the other, and the animations that Pillow decodes.

Nothing is decoded before a frame is asked for, except one to find out the size or the time that frames are shown.
"""

import hashlib
import io
import math
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from PIL import Image

from lockstep.data.images.image_content import UnusableVideo
from lockstep.data.images.image_source import RowImage, in_rgb

_STILL_S = 0.1
"""How long a frame of an animation is shown that gives no time, as browsers do it."""
_MOST_DECODED = 100
"""An animation is decoded up to the last chosen frame: at most so many times `max_pixels_in_file`."""


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """What a video says of itself before it is decoded."""

    frames: int
    rate: float
    """Frames per second."""
    size: tuple[int, int]
    """Width and height of an upright frame, in pixels."""


class VideoFile(ABC):
    """A video that is decoded from one file, or from its content in the data.

    Args:
        source: the file's path, or a name such as `video 0`.
        data: the file, or its content.
        max_pixels: the most pixels of a frame.
    """

    decoder = ""
    """Names what the pixels depend on besides the file."""

    def __init__(self, source: str, data: Path | bytes, max_pixels: int) -> None:
        self.source, self._data, self._max_pixels = source, data, max_pixels
        self.file = data if isinstance(data, Path) else None
        self.known_header: VideoHeader | None = None
        """May be set to what was read of the same file before."""
        self._last: tuple[int, Image.Image] | None = None
        self._lock = threading.Lock()

    @property
    def header(self) -> VideoHeader:
        """What the file says of itself. Raises UnusableVideo."""
        if self.known_header is None:
            self.known_header = self._checked_header()
        return self.known_header

    def _checked_header(self) -> VideoHeader:
        found = self._read_header()
        width, height = found.size
        if found.frames < 1:
            raise UnusableVideo(self.source, "has no frame")
        if width < 1 or height < 1 or width * height > self._max_pixels:
            limit = f"data.images.max_pixels_in_file {self._max_pixels}"
            raise UnusableVideo(self.source, f"has frames of {width} x {height} pixels, and the limit is {limit}")
        if not (math.isfinite(found.rate) and found.rate > 0):
            raise UnusableVideo(self.source, "does not say how many frames it has per second")
        return found

    @cached_property
    def identity(self) -> bytes:
        """A hash of the file's content, and of what decodes it. Raises UnusableVideo."""
        found = hashlib.sha256(self.decoder.encode())
        try:
            with self._data.open("rb") if isinstance(self._data, Path) else io.BytesIO(self._data) as file:
                hashlib.file_digest(file, lambda: found)
        except OSError as error:
            raise UnusableVideo(self.source, f"cannot be read ({error.strerror})") from error
        return found.digest()

    def frame(self, index: int) -> Image.Image:
        """Decodes a frame: upright, in mode RGB. Frames in ascending order are decoded in one pass.

        Raises:
            UnusableVideo: the video is truncated or damaged.
        """
        with self._lock:
            if self._last is None or self._last[0] != index:
                size = self.header.size
                self._last = None  # or two frames would be in memory
                found = self._decode(index)
                if found.size != size:
                    problem = f"has a frame {index} of {found.size} pixels, but its beginning says {size}"
                    raise UnusableVideo(self.source, problem)
                self._last = (index, found)
            return self._last[1]

    def state(self) -> tuple[str, int, int] | None:
        """What changes with the file: its path, time and size; None for a video in the data."""
        if isinstance(self._data, bytes):
            return None
        try:
            found = self._data.stat()
        except OSError as error:
            raise UnusableVideo(self.source, f"cannot be read ({error.strerror})") from error
        return self.source, found.st_mtime_ns, found.st_size

    def check_work(self, last: int) -> None:  # noqa: B027  # what can seek has nothing to check
        """Refuses a video of which too much must be decoded for frame `last`. Raises UnusableVideo."""

    @abstractmethod
    def _read_header(self) -> VideoHeader: ...

    @abstractmethod
    def _decode(self, index: int) -> Image.Image:
        """Decodes a frame. Raises UnusableVideo."""


class VideoFrame(RowImage):
    """A frame of a video that is one file."""

    def __init__(self, video: VideoFile, index: int) -> None:
        self._video, self._index = video, index
        self.source, self.origin = f"{video.source}, frame {index}", f"{video.source}#{index}"
        self.file = video.file

    @property
    def size(self) -> tuple[int, int]:
        return self._video.header.size

    def content(self) -> bytes:
        return b"frame %d of %s" % (self._index, self._video.identity)

    def pixels(self, content: bytes | None = None) -> Image.Image:
        return self._video.frame(self._index)

    def as_file(self) -> bytes:
        file = io.BytesIO()
        self.pixels().save(file, "PNG", compress_level=1)
        return file.getvalue()

    def check(self) -> None:
        self.pixels()


class Animation(VideoFile):
    """A GIF, WebP, APNG or AVIF, which Pillow decodes; one picture is a video of one frame."""

    decoder = "Pillow"

    def __init__(self, source: str, data: Path | bytes, max_pixels: int) -> None:
        super().__init__(source, data, max_pixels)
        self._image: Image.Image | None = None

    def check_work(self, last: int) -> None:
        """Refuses an animation whose frame `last` takes too long to reach: frames change those before."""
        width, height = self.header.size
        if (last + 1) * width * height > _MOST_DECODED * self._max_pixels:
            remedy = "Convert it to a video file (ffmpeg), or set data.images.on_error to skip."
            raise UnusableVideo(self.source, f"has {last + 1} frames of {width} x {height} pixels to decode", remedy)

    def _read_header(self) -> VideoHeader:
        with self._translated(), self._open() as image:
            width, height = image.size
            if width * height > self._max_pixels:
                return VideoHeader(1, 1.0, image.size)  # refused before a frame is decoded
            frames = int(getattr(image, "n_frames", 1))
            image.load()  # WebP gives no time before
            shown = float(image.info.get("duration") or 0) / 1000 or _STILL_S
            return VideoHeader(frames, 1 / shown, image.size)

    def _decode(self, index: int) -> Image.Image:
        with self._translated():
            self._image = self._image or self._open()
            self._image.seek(index)
            return in_rgb(self._image)

    def _open(self) -> Image.Image:
        data = io.BytesIO(self._data) if isinstance(self._data, bytes) else self._data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sizes are checked here
            return Image.open(data, formats=("GIF", "WEBP", "PNG", "AVIF", "JPEG"))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Pillow's decoders raise what they meet: OSError, SyntaxError, EOFError, ...
            self._image = None
            raise UnusableVideo(self.source, f"is truncated or damaged ({error or type(error).__name__})") from error
