"""Decodes video files with PyAV, one frame after the other, from the key frame before each."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.Image import Transpose

from lockstep.data.dataset_rows import DataError
from lockstep.data.images.image_content import UnusableVideo
from lockstep.data.images.video_file import VideoFile, VideoHeader

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,mpeg,mpegts,ogg,asf"
"""Formats that are opened. Others, such as playlists, name further files and addresses."""
_SEEK_S = 2.0
"""A frame that is later than this after the last decoded one is looked for from the key frame before it."""
_LATE_S = 0.5
"""A container without an index estimates its number of frames: the last one may be so much earlier."""
_UPRIGHT = {90: Transpose.ROTATE_90, 180: Transpose.ROTATE_180, -180: Transpose.ROTATE_180, -90: Transpose.ROTATE_270}


class VideoDecoderMissing(DataError):
    """A video is a file, and PyAV is not installed."""


class EncodedVideo(VideoFile):
    """A video file: mp4, mov, webm, mkv, avi and others. Frames are counted at the video's average rate, so that frame
    n of a video with a varying rate is the one shown at n / rate seconds."""

    def __init__(self, source: str, data: Path | bytes, max_pixels: int) -> None:
        super().__init__(source, data, max_pixels)
        self._av = _av(source)
        versions = self._av.library_versions
        self.decoder = f"FFmpeg {versions.get('libavcodec')} {versions.get('libswscale')}"
        self._container: Any = None
        self._stream: Any = None
        self._frames: Iterator[Any] = iter(())
        self._shown: tuple[float, Any] | None = None
        """The last decoded frame, and when it is shown, in seconds."""
        self._next: tuple[float, Any] | None = None
        """The frame after it, if it has been decoded."""
        self._seeks = True

    def _read_header(self) -> VideoHeader:
        with self._translated(), self._open() as container:
            stream = self._picture_stream(container)
            width, height = stream.codec_context.width, stream.codec_context.height
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            if width * height > self._max_pixels or not rate > 0:
                return VideoHeader(1, rate or math.nan, (width, height))  # refused before a frame is decoded
            frames = stream.frames or math.floor(_duration(container, stream, self._av.time_base) * rate)
            first = next(container.decode(stream), None)
            if first is None:
                return VideoHeader(0, rate, (width, height))
            turned = first.rotation in (90, -90)
            size = (first.height, first.width) if turned else (first.width, first.height)
            return VideoHeader(max(1, frames), rate, size)

    def _decode(self, index: int) -> Image.Image:
        with self._translated():
            frame = self._frame_at(index / self.header.rate)
            if frame.width * frame.height > self._max_pixels:
                raise UnusableVideo(self.source, f"has a frame of {frame.width} x {frame.height} pixels")
            picture: Image.Image = frame.to_image()
            turn = _UPRIGHT.get(frame.rotation)
            return picture if turn is None else picture.transpose(turn)

    def _frame_at(self, seconds: float) -> Any:
        """The frame that is shown at a time."""
        if self._container is None or (self._shown is not None and seconds < self._shown[0]):
            self._restart()
        wanted = seconds + 0.5 / self.header.rate
        if self._seeks and seconds - (self._shown[0] if self._shown is not None else 0.0) > _SEEK_S:
            self._seek(seconds)
            if self._advance() and self._next is not None and self._next[0] > wanted:
                self._seeks = False  # the file's index is wrong
                self._restart()
        while self._next is None or self._next[0] <= wanted:
            if self._next is not None:
                self._shown, self._next = self._next, None
            if not self._advance():
                break
        if self._next is None:
            self._check_end(seconds)
        if self._shown is None:
            self._shown = self._next
        assert self._shown is not None
        return self._shown[1]

    def _advance(self) -> bool:
        """Decodes the next frame. Returns whether there was one."""
        frame = next(self._frames, None)
        if frame is None:
            return False
        start = float((self._stream.start_time or 0) * self._stream.time_base)
        before = self._shown[0] + 1 / self.header.rate if self._shown is not None else 0.0
        self._next = (frame.time - start if frame.time is not None else before, frame)
        return True

    def _check_end(self, seconds: float) -> None:
        """Raises UnusableVideo if the file has ended long before a time that it should have."""
        end = self._shown[0] if self._shown is not None else -math.inf
        if end < seconds - max(_LATE_S, 2 / self.header.rate):
            promised = self.header.frames / self.header.rate
            raise UnusableVideo(
                self.source, f"is truncated: it ends before second {seconds:.1f}, and says that it has {promised:.1f}"
            )

    def _restart(self) -> None:
        self._close()
        self._container = self._open()
        self._stream = self._picture_stream(self._container)
        self._frames = self._container.decode(self._stream)

    def _seek(self, seconds: float) -> None:
        at = round(seconds / float(self._stream.time_base)) + (self._stream.start_time or 0)
        self._container.seek(at, stream=self._stream, backward=True)
        self._frames, self._shown, self._next = self._container.decode(self._stream), None, None

    def _close(self) -> None:
        if self._container is not None:
            self._container.close()
        self._container, self._stream, self._frames, self._shown, self._next = None, None, iter(()), None, None

    def _open(self) -> Any:
        data = BytesIO(self._data) if isinstance(self._data, bytes) else f"file:{self._data}"
        allowed = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
        return self._av.open(data, options=allowed)

    def _picture_stream(self, container: Any) -> Any:
        if not container.streams.video:
            raise UnusableVideo(self.source, "has no pictures")
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1  # each of the threads that prepare images decodes one video
        # A frame may be larger than the file's beginning says.
        stream.codec_context.options = {"max_pixels": str(2 * self._max_pixels)}
        return stream

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except UnusableVideo:
            self._close()
            raise
        except Exception as error:  # PyAV raises FFmpeg's errors as classes of its own and of Python
            self._close()
            what = str(error).partition("\n")[0] or type(error).__name__
            raise UnusableVideo(
                self.source, f"is no video in a known format, or is truncated or damaged ({what})"
            ) from error


def _duration(container: Any, stream: Any, time_base: int) -> float:
    """In seconds; 0 if the file says none."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    return float(container.duration / time_base) if container.duration else 0.0


def _av(source: str) -> Any:
    try:
        import av
    except ImportError as error:
        remedy = "Install it (pip install 'lockstep-rl[video]'), or give lists or folders of frames, or GIF and WebP."
        raise VideoDecoderMissing(
            source, "video files are decoded by PyAV (package av), which is missing", remedy
        ) from error
    return av
