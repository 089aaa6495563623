"""Prepares the images of samples, in threads and ahead of time, and puts them into the run's store."""

import logging
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from lockstep.base import waits
from lockstep.base.text import count_noun
from lockstep.config.data import DatasetConfig
from lockstep.data.dataset_rows import BadRow, DatasetRows
from lockstep.data.images.image_content import RowVideo, UnusableImage, UnusableVideo
from lockstep.data.images.image_errors import ImageRefused
from lockstep.data.images.image_processor import ImageExpansion, ImageProcessor
from lockstep.data.images.image_record import list_changes
from lockstep.data.images.image_source import ImageFinder, RowImage
from lockstep.data.images.image_store import ImageStore
from lockstep.data.images.video_source import FoundVideo, VideoFinder
from lockstep.data.row_lengths import MEASURED_ROWS
from lockstep.data.samples import PlacedImage

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IN_THE_DATA = re.compile(r"(image|video) \d+(, frame \d+)?$")
"""The name of an image that has no path."""
_STALL_S = 120.0
"""Reading and preparing one image takes a fraction of a second; a file on a network may take longer."""
ImageReader = Callable[[int], Sequence[Any]]
"""Returns what a row of the data has for its images."""
MOST_AHEAD = 4096
"""Images that are prepared ahead of time, at most."""


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """An image that is in the store."""

    digest: str
    expansion: ImageExpansion
    source: str
    size: tuple[int, int]
    origin: str
    """Of a frame of a video: the video and the frame's number."""


class ImageLoader:
    """Finds, checks and prepares the images of one dataset, and the frames of its videos.

    Args:
        processor: the model's.
        store: where prepared images are kept; with None, or one that does not write, only digests are computed.
        data_path: the dataset's file or folder.
        salt: part of the digests, for images that must not share files with those of the data.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        store: ImageStore | None,
        cfg: DatasetConfig,
        data_path: str,
        salt: bytes = b"",
    ) -> None:
        self.processor, self._store, self._salt = processor, store, salt
        self.skips = cfg.images.on_error == "skip"
        """Whether rows with unusable images are left out."""
        self._record = None if store is None else store.record
        self._recorded = None if self._record is None else self._record.dataset(data_path)
        self._finder = ImageFinder(cfg.images, data_path)
        self._videos = VideoFinder(self._finder, cfg.images, cfg.videos)
        self._workers = cfg.images.workers
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: dict[object, Future[list[LoadedImage]]] = {}
        self._lock = threading.Lock()

    def find(self, values: Sequence[Any]) -> tuple[list[RowImage], list[FoundVideo]]:
        """Returns the images of a row, among them the frames of its videos, and the videos. Reads sizes only.

        Raises:
            UnusableImage: an image or a video cannot be used.
            DataError: a video is a file, and what decodes it is not installed.
        """
        found, videos = self._locate(values)
        if videos and not self.processor.reads_several:
            problem = "cannot be shown to this model, whose processor reads one image per prompt"
            raise UnusableVideo(videos[0].frames[0].source, problem, "Choose a model that reads several images.")
        for image in found:
            with_size = image.size
            try:
                self.processor.expansion(with_size, len(found))
            except ImageRefused as error:
                raise UnusableImage(image.source, f"of {with_size[0]} x {with_size[1]} pixels: {error}") from error
        return found, videos

    def _locate(self, values: Sequence[Any]) -> tuple[list[RowImage], list[FoundVideo]]:
        """As `find`, but nothing is read of an image."""
        found: list[RowImage] = []
        videos = []
        for number, value in enumerate(values):
            if isinstance(value, RowVideo):
                videos.append(self._videos.find(value, number))
                found += videos[-1].frames
            else:
                found.append(self._finder.find(value, f"image {number}"))
        return found, videos

    def problems(self, rows: Sequence[Sequence[Any]]) -> list[UnusableImage | None]:
        """Finds and decodes the images of rows, in threads: what is wrong with the first bad one of each row."""
        started = [self._threads.submit(self._problem, values) for values in rows]
        return [_result(each, started, "checking images") for each in started]

    def changed_rows(self, rows: DatasetRows) -> frozenset[int]:
        """Compares the image files with what they were when the run began, and returns the rows of those that changed.

        Raises:
            DataError: some have changed, and rows with unusable images are not left out.
        """
        found = [] if self._recorded is None else list(self._recorded.changed())
        if not found:
            return frozenset()
        changes = [change for change, _ in found]
        text = f"{count_noun(len(changes), 'image')} changed since the run began: {list_changes(changes)}"
        if not self.skips:
            remedy = "Restore them, or resume with data.images.on_error=skip to leave their rows out from here on."
            raise rows.data_error(changes[0].row, BadRow(None, text, remedy))
        changed = frozenset(row for _, own in found for row in own)
        logger.warning("%s: %s. %s left out from here on", rows.path, text, count_noun(len(changed), "row"))
        return changed

    def dropped_rows(self, rows: DatasetRows, read: ImageReader) -> frozenset[int]:
        """Returns the rows to leave out: those of the run's beginning; for a new run, decodes all images if rows with
        unusable ones are left out."""
        if self._record is not None and self._record.exists and self._recorded is not None:
            return frozenset(self._recorded.dropped)
        found: dict[int, UnusableImage] = {}
        for begin in range(0, len(rows) if self.skips else 0, MEASURED_ROWS):
            chosen = range(begin, min(begin + MEASURED_ROWS, len(rows)))
            problems = self.problems([read(row) for row in chosen])
            found |= {row: problem for row, problem in zip(chosen, problems, strict=True) if problem is not None}
        if found:
            row, problem = next(iter(found.items()))
            if len(found) == len(rows):
                raise rows.data_error(row, problem)
            count = f"{count_noun(len(found), 'row')} with unusable images, of {len(rows):,}"
            logger.warning("%s: left out %s; the first, %s: %s", rows.path, count, rows.place(row)[1], problem)
        return frozenset(found)

    def record(self, rows: DatasetRows, kept: np.ndarray, read: ImageReader) -> None:
        """Records the content of the image files of the rows that are kept, in threads. Raises DataError."""
        assert self._recorded is not None
        self._recorded.dropped = np.setdiff1d(np.arange(len(rows)), kept).tolist()
        by_path: dict[str, list[int]] = {}
        for row in kept.tolist():
            try:
                found = self._locate(read(row))[0]
            except UnusableImage as bad:
                raise rows.data_error(row, bad) from bad
            for path in {str(image.file): None for image in found if image.file is not None}:
                by_path.setdefault(path, []).append(row)
        files = list(by_path.items())
        for begin in range(0, len(files), MEASURED_ROWS):  # a future takes more memory than what is recorded
            chosen = files[begin : begin + MEASURED_ROWS]
            started = [self._threads.submit(self._recorded.add, path, own) for path, own in chosen]
            for (_, own), each in zip(chosen, started, strict=True):
                try:
                    _result(each, started, "recording images")
                except UnusableImage as bad:
                    raise rows.data_error(own[0], bad) from bad
            if begin and begin % (100 * MEASURED_ROWS) == 0:
                logger.info("%s: %d of %d image files recorded", rows.path, begin, len(files))

    def _problem(self, values: Sequence[Any]) -> UnusableImage | None:
        try:
            for image in self.find(values)[0]:
                image.check()
        except UnusableImage as problem:
            return problem
        return None

    @property
    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="images")
            return self._pool

    def load(self, images: Sequence[RowImage], key: object = None) -> list[LoadedImage]:
        """Returns the images of a row after putting them into the store.

        Args:
            key: of `prefetch`, if it was called for the row.

        Raises:
            UnusableImage: an image cannot be decoded.
        """
        with self._lock:
            ahead = self._ahead.pop(key, None) if key is not None else None
        if ahead is None:
            return self._load(images)
        loaded = waits.future(
            ahead, waits_for="the threads that prepare images", why="preparing a sample's images", stall_s=_STALL_S,
            progress=self._finished,
        )  # fmt: skip
        # The store may have been emptied since.
        is_whole = (
            self._store is None
            or not self._store.writes
            or all(self._store.is_kept(image.digest, image.source) for image in loaded)
        )
        return loaded if is_whole else self._load(images)

    def place(self, images: Sequence[RowImage], row: int, places: Sequence[np.ndarray]) -> list[PlacedImage]:
        """Loads the images of a row, whose features have these places in its tokens.

        Raises:
            UnusableImage: an image cannot be decoded.
            BadRow: an image has more or fewer places than features.
        """
        found = []
        for number, (image, own) in enumerate(zip(self.load(images, row), places, strict=True)):
            if own.size != image.expansion.features:
                problem = f"image {number} has {image.expansion.features} features, but {own.size} tokens for them"
                raise BadRow(None, problem, "Check the model's tokenizer.")
            source = f"{image.source} of row {row}" if _IN_THE_DATA.match(image.source) else image.source
            resized = image.expansion.resized
            found.append(PlacedImage(image.digest, own, source, image.size, resized, image.origin))
        return found

    def is_ahead(self, key: object) -> bool:
        """Whether `prefetch` was called for a row that is not loaded yet."""
        with self._lock:
            return key in self._ahead

    def prefetch(self, key: object, images: Sequence[RowImage]) -> None:
        """Begins to prepare the images of a row that `load` will be called for, unless there are too many already."""
        threads = self._threads
        with self._lock:
            if key not in self._ahead and len(self._ahead) < MOST_AHEAD:
                self._ahead[key] = threads.submit(self._load, images)

    def _finished(self) -> int:
        with self._lock:
            return sum(each.done() for each in self._ahead.values())

    def _load(self, images: Sequence[RowImage]) -> list[LoadedImage]:
        found = []
        for image in images:
            content = image.content()
            self._check_unchanged(image, content)
            digest = self.processor.digest(self._salt + content, len(images))
            if self._store is not None and self._store.writes:
                self._store.expect(digest)
            if self._store is not None and self._store.writes and digest not in self._store:
                try:
                    self._store.write(self.processor.prepare(image.pixels(content), digest, len(images)))
                except ImageRefused as error:
                    raise UnusableImage(image.source, f"is refused: {error}") from error
            expansion = self.processor.expansion(image.size, len(images))
            found.append(LoadedImage(digest, expansion, self._kept(image, digest), image.size, image.origin))
        return found

    def _check_unchanged(self, image: RowImage, content: bytes) -> None:
        change = None
        if self._recorded is not None and image.file is not None:
            change = self._recorded.difference(str(image.file), content if image.is_file else None)
        if change is not None:
            problem = f"has changed since the run began: its digest was {change.old} and is {change.new}"
            raise UnusableImage(image.source, problem, "Restore it, or set data.images.on_error to skip.")

    def _kept(self, image: RowImage, digest: str) -> str:
        """The path of an image's file. An image in the data, or a frame of a video file, is written beside the prepared
        one, once the store writes: reward functions and the report read it."""
        if image.is_file or self._store is None:
            return image.source
        path = self._store.original_path(digest)
        if self._store.writes and not path.is_file():
            self._store.write_original(digest, image.as_file())
        return str(path)


def _result(future: Future[T], started: Sequence[Future[T]], why: str) -> T:
    """The result of one of several futures, which make progress as long as any of them ends."""
    return waits.future(
        future, waits_for="the threads that read images", why=why, stall_s=_STALL_S,
        progress=lambda: sum(each.done() for each in started),
    )  # fmt: skip
