"""The videos of a dataset's rows: where they are, and which of their frames the model gets.

A video is a list or a folder of images, an animation that Pillow decodes, or a file that PyAV decodes. Its frames are
images of the prompt. Their number and size are known from the beginning of the file, before it is decoded.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.vision import ImageDataConfig, VideoDataConfig
from lockstep.data.images.image_content import VIDEO_KEYS, RowVideo, UnusableImage, UnusableVideo
from lockstep.data.images.image_source import ImageFinder, RowImage, from_data_url
from lockstep.data.images.video_decoder import EncodedVideo
from lockstep.data.images.video_file import Animation, VideoFile, VideoFrame, VideoHeader

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".jp2", ".avif"})
"""Files of a folder that are frames; others are left out."""
_OPTIONS = ("fps", "sample_fps", "nframes", "num_frames", "min_frames", "max_frames", "video_start", "video_end")
"""What a row may say of its video, by the names of qwen-vl-utils and transformers."""
_KEPT_HEADERS = 65536
_DIGITS = re.compile(r"(\d+)")
_AVIF = (b"ftypavif", b"ftypavis")
_KINDS = "a path, a data: URL, bytes, a list of frames, or a mapping with one of these under `video`"


@dataclass(frozen=True, slots=True)
class FoundVideo:
    """The chosen frames of a video, in order."""

    frames: list[RowImage]
    seconds: list[float]
    """When each is shown, from the video's beginning."""
    duration: float
    """Of the whole video, in seconds."""


class VideoFinder:
    """Finds the videos that the rows of one dataset name, and chooses their frames.

    Args:
        images: finds images of the same dataset: frames in files of their own, and files in the same folders.
    """

    def __init__(self, images: ImageFinder, cfg: ImageDataConfig, videos: VideoDataConfig) -> None:
        self._images, self._cfg = images, videos
        self._max_pixels = cfg.max_pixels_in_file
        self._headers: dict[tuple[str, int, int], VideoHeader] = {}

    def find(self, video: RowVideo, number: int) -> FoundVideo:
        """Returns the chosen frames of a video, and reads the beginning of its file.

        Args:
            number: of the video among the images and videos of the row.

        Raises:
            UnusableVideo: the value is no video, or names a file that must not be read.
            UnusableImage: a frame in a list or folder is none.
            VideoDecoderMissing: the video is a file for which PyAV is needed.
        """
        name = f"video {number}"
        value, options = _unwrapped(video.value, name)
        try:
            found = self._opened(value, name)
        except UnusableVideo:
            raise
        except UnusableImage as error:
            raise UnusableVideo(error.source, error.problem, error.remedy) from error
        if isinstance(found, VideoFile):
            header = self._header(found)
            self._check_number(found.source, header.frames)
            chosen = chosen_frames(header.frames, header.rate, self._cfg, options, found.source)
            found.check_work(chosen[-1])
            frames: list[RowImage] = [VideoFrame(found, index) for index in chosen]
            return FoundVideo(frames, [index / header.rate for index in chosen], header.frames / header.rate)
        self._check_number(name, len(found))
        rate = _positive(options, "sample_fps", name) or _positive(options, "fps", name) or self._cfg.fps
        taken = {key: each for key, each in options.items() if key not in ("fps", "sample_fps")}
        chosen = chosen_frames(len(found), rate, self._cfg, {"fps": rate, **taken}, name)
        frames = [self._images.find(found[index], f"{name}, frame {index}") for index in chosen]
        return FoundVideo(frames, [index / rate for index in chosen], len(found) / rate)

    def _opened(self, value: Any, name: str) -> VideoFile | Sequence[Any]:
        """A video file, or the frames."""
        if isinstance(value, bytes | bytearray | memoryview):
            return self._file(name, bytes(value))
        if isinstance(value, Sequence) and not isinstance(value, str):
            return value
        if not isinstance(value, str):
            raise UnusableVideo(name, f"is {type(value).__name__}, expected {_KINDS}", "Write one of these.")
        if value.startswith("data:"):
            return self._file(name, from_data_url(value, name))
        if value.startswith(("http://", "https://")):
            raise UnusableVideo(value, "is on the web", "Lockstep downloads no videos: save the file, write its path.")
        path = self._images.path(value.removeprefix("file://"))
        if path.is_dir():
            return _frames_in(path)
        if not path.is_file():
            raise UnusableVideo(str(path), "does not exist" if not path.exists() else "is not a file")
        return self._file(str(path), path)

    def _file(self, source: str, data: Path | bytes) -> VideoFile:
        kind = Animation if _is_picture(source, data) else EncodedVideo
        return kind(source, data, self._max_pixels)

    def _header(self, video: VideoFile) -> VideoHeader:
        """What the file says of itself, which is read once for a file that does not change."""
        key = video.state()
        if key is not None:
            video.known_header = self._headers.get(key)
            if len(self._headers) >= _KEPT_HEADERS:
                self._headers.clear()
            self._headers[key] = video.header
        return video.header

    def _check_number(self, source: str, frames: int) -> None:
        if frames > self._cfg.max_frames_in_file:
            limit = f"data.videos.max_frames_in_file {self._cfg.max_frames_in_file}"
            raise UnusableVideo(source, f"has {frames} frames, more than {limit}")
        if frames < 1:
            raise UnusableVideo(source, "has no frame")


def chosen_frames(
    frames: int, rate: float, cfg: VideoDataConfig, options: Mapping[str, Any], source: str = "video"
) -> list[int]:
    """Returns the indices of the frames to take: ascending, at equal distances, the first and the last included, as
    qwen-vl-utils chooses them (which rounds their number to an even one).

    Args:
        frames: of the video.
        rate: frames per second of the video.
        options: what the row says; the limits of the config hold all the same.

    Raises:
        UnusableVideo: an option is no number, or no frame is between `video_start` and `video_end`.
    """
    begin, end = (_seconds(options, name, source) for name in ("video_start", "video_end"))
    first = 0 if begin is None else math.ceil(begin * rate)
    last = frames - 1 if end is None else min(frames - 1, math.floor(end * rate))
    if first > last:
        raise UnusableVideo(source, f"has no frame between video_start {begin} and video_end {end}")
    there = last - first + 1
    most = min(_or(_positive(options, "max_frames", source), cfg.max_frames), cfg.max_frames)
    least = min(_or(_positive(options, "min_frames", source), cfg.min_frames), most)
    wanted = _positive(options, "nframes", source) or _positive(options, "num_frames", source)
    if wanted is None:
        wanted = max(there / rate * _or(_positive(options, "fps", source), cfg.fps), least)
    count = max(1, int(min(wanted, most, there)))
    return [int(index) for index in np.linspace(first, last, count).round()]


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _positive(options: Mapping[str, Any], name: str, source: str) -> float | None:
    """A number of the row; None if it says none."""
    found = _seconds(options, name, source)
    if found is not None and found <= 0:
        raise UnusableVideo(source, f"has {name} {options[name]!r}, expected more than 0")
    return found


def _seconds(options: Mapping[str, Any], name: str, source: str) -> float | None:
    value = options.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise UnusableVideo(source, f"has {name} {value!r}, expected a number", "Write a number, or leave it out.")
    return float(value)


def _unwrapped(value: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """The video in a mapping, and what else the mapping says."""
    options: dict[str, Any] = {}
    while isinstance(value, Mapping):
        options |= {key: value[key] for key in _OPTIONS if value.get(key) is not None}
        inner = next((value[key] for key in VIDEO_KEYS if value.get(key) is not None), None)
        if inner is None:
            raise UnusableVideo(name, f"has neither bytes nor path, but {', '.join(map(str, value)) or 'nothing'}")
        value = inner
    return value, options


def _frames_in(folder: Path) -> list[str]:
    """The images in a folder, in the order of their names, in which numbers count as such."""
    names = [path.name for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES]
    if not names:
        raise UnusableVideo(str(folder), f"is a folder without images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    names.sort(key=lambda name: [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)])
    return [str(folder / name) for name in names]


def _is_picture(source: str, data: Path | bytes) -> bool:
    """Whether Pillow decodes the file, by its first bytes."""
    try:
        with data.open("rb") if isinstance(data, Path) else io.BytesIO(data) as file:
            start = file.read(16)
    except OSError as error:
        raise UnusableVideo(source, f"cannot be read ({error.strerror})") from error
    is_webp = start[:4] == b"RIFF" and start[8:12] == b"WEBP"
    return is_webp or start.startswith((b"GIF8", b"\x89PNG", b"\xff\xd8\xff")) or start[4:12] in _AVIF
