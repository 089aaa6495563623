"""The images with which environments answer.

An environment's process replaces each image by the content of its file. The controller opens the contents itself, with
the limits of images in the data, prepares them, and keeps them in the run's folder: as there is no file to refer to,
they are what a resumed run prepares again.
"""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from lockstep.base.errors import PicklableError
from lockstep.base.folders import make_folder, write_atomically
from lockstep.base.text import count_noun
from lockstep.config.data import DatasetConfig
from lockstep.config.vision import ImageDataConfig
from lockstep.data.dataset_rows import BadRow
from lockstep.data.images.image_content import VIDEO_PARTS, MediaColumn, UnusableImage, message_parts, place_media
from lockstep.data.images.image_errors import ImageRefused
from lockstep.data.images.image_loader import ImageLoader, LoadedImage
from lockstep.data.images.image_processor import ImageProcessor
from lockstep.data.images.image_source import ImageFinder, RowImage, StillImage
from lockstep.data.images.image_store import OBSERVED, ImageStore
from lockstep.data.samples import Completion

MAX_OBSERVATION_BYTES = 64 << 20
"""The most bytes that the files of an observation's images may have together."""
_SALT = b"observation "
"""Keeps the files of these images apart from those of the data, which are deleted by another rule."""
_LIST = "images"

Message = dict[str, Any]


class UnusableObservation(ValueError):
    """The images of an observation cannot be used. Says which one, and why."""


class ObservationImageLost(PicklableError, ValueError):
    """An image of a stored conversation is not in the run's folder any more, or would be prepared differently."""

    def __init__(self, completion: str, path: str, problem: str) -> None:
        super().__init__(
            f"completion {completion} has an image of its environment that the run cannot prepare again: {path} "
            f"{problem}. Restore the file and the settings of model.vision, or start a new run"
        )
        self.completion, self.path = completion, path


def with_image_files(messages: Sequence[Message], images: Sequence[Any], base: Path, max_pixels: int) -> list[Message]:
    """Returns messages whose images are parts `{"type": "image", "bytes": ...}` with the content of a file.

    Images are parts of the messages, which have what `ImageFinder.find` reads, or `images`, which belong where the
    texts have the marker `<image>`, else before the text of the first message of a user.

    Args:
        base: the folder that relative paths start from.
        max_pixels: the most pixels of an image.

    Raises:
        UnusableObservation: an image is missing, no image, animated or too large, or there are more or fewer markers or
            parts than images.
    """
    try:
        for part in message_parts(messages):
            if part.get("type") in VIDEO_PARTS:
                raise UnusableObservation(
                    f"a message has a part of type {part['type']!r}: answer with frames, as images"
                )
        placed, values = place_media(list(messages), [MediaColumn("image", _LIST if images else None, list(images))])
        assert isinstance(placed, list)
        finder = ImageFinder(ImageDataConfig(max_pixels_in_file=max_pixels), str(base))
        files = []
        for number, value in enumerate(values):
            image = finder.find(value, f"image {number}")
            _ = image.size  # from the beginning of the file, before anything else is decoded
            files.append(image.as_file())
            if sum(map(len, files)) > MAX_OBSERVATION_BYTES:
                raise UnusableObservation(
                    f"the files of its images have more than {MAX_OBSERVATION_BYTES >> 20} MiB: make them smaller"
                )
    except BadRow as error:
        raise UnusableObservation(error.message) from error
    left = iter(files)
    return [
        {**message, "content": [{**part, "bytes": next(left)} if is_image_part(part) else part for part in content]}
        if isinstance(content := message["content"], list)
        else message
        for message in placed
    ]


def is_image_part(part: Any) -> bool:
    """Whether a part of a message stands for an image."""
    return isinstance(part, dict) and part.get("type") == "image"


def image_parts(messages: Sequence[Message]) -> list[Message]:
    """Returns the parts of messages that stand for images."""
    return [part for part in message_parts(messages) if is_image_part(part)]


class ObservationStore(ImageStore):
    """A store that keeps the files of images durably, in `DIGEST.observed`."""

    def original_path(self, digest: str) -> Path:
        return self.path(digest).with_suffix(OBSERVED)

    def write_original(self, digest: str, content: bytes) -> None:
        """Writes the content of an image's file, which is on the disk on return: the ledger refers to it."""
        path = self.original_path(digest)
        make_folder(path.parent)
        write_atomically(path, content)
        for each in (path, path.parent):
            descriptor = os.open(each, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class ObservationImages:
    """Loads the images of observations into the run's store, and deletes those that nothing needs any more.

    Args:
        processor: the model's.
        store: the store of the run's images, which may begin to write later.
        most: the most images of a conversation.
    """

    def __init__(self, processor: ImageProcessor, store: ImageStore, cfg: DatasetConfig, most: int) -> None:
        self.processor, self.most, self._run_store = processor, most, store
        self._max_pixels = cfg.images.max_pixels_in_file
        self._store = ObservationStore(store.folder, writes=False)
        self._loader = ImageLoader(processor, self._store, cfg, "", _SALT)
        self._used: dict[str, int] = {}
        """After which call of `delete_unused` an image was used last, as the steps that were done then."""
        self._deletions = [0]
        """The steps that were done at each call of `delete_unused`."""

    def prefetch(self, key: str, messages: Sequence[Message]) -> None:
        """Begins to prepare the images of an observation that `load` will be called for."""
        parts = image_parts(messages)
        if 0 < len(parts) <= self.most and all(isinstance(part.get("bytes"), bytes) for part in parts):
            self._store.writes = self._run_store.writes
            self._loader.prefetch(key, self._files(parts))

    def load(self, key: str, messages: Sequence[Message], earlier: int) -> tuple[list[Message], list[LoadedImage]]:
        """Puts the images of an observation into the store.

        Args:
            key: of `prefetch`.
            messages: of `with_image_files`.
            earlier: number of the conversation's images of earlier observations.

        Returns:
            The messages with empty parts `{"type": "image"}`, and the images.

        Raises:
            UnusableObservation: an image is truncated, damaged, too large or refused by the model's processor, or the
                conversation has too many.
        """
        parts = image_parts(messages)
        if not parts:
            return list(messages), []
        too_many = UnusableObservation(
            f"it has {count_noun(len(parts), 'image')} after {earlier} of the conversation, and "
            f"rollout.environment.max_images is {self.most}"
        )
        if len(parts) > self.most:  # before any is decoded
            raise too_many
        try:
            self._store.writes = self._run_store.writes
            loaded = self._loader.load(self._files(parts), key)
        except UnusableImage as error:
            raise UnusableObservation(error.message) from error
        except ImageRefused as error:
            raise UnusableObservation(str(error)) from error
        if earlier + len(loaded) > self.most:
            raise too_many
        self._used |= dict.fromkeys((image.digest for image in loaded), self._deletions[-1])
        return [_emptied(message) for message in messages], loaded

    def restore(self, completions: Sequence[Completion]) -> int:
        """Prepares the images of stored conversations that are not in the store. Returns how many.

        Raises:
            ObservationImageLost: the file of an image is lost, or its preparation has changed.
        """
        lacking = {image.digest: each.request for each in completions for image in each.images}
        lacking = {digest: request for digest, request in lacking.items() if digest not in self._store}
        for digest, request in lacking.items():
            path = self._store.original_path(digest)
            try:
                content = path.read_bytes()
            except OSError as error:
                raise ObservationImageLost(request, str(path), f"cannot be read ({error.strerror})") from error
            among = [count for count in (1, 2) if self.processor.digest(_SALT + content, count) == digest]
            if not among:
                raise ObservationImageLost(request, str(path), "is another image, or prepared with other settings")
            image = StillImage(str(path), content, self._max_pixels)
            self._store.write(self.processor.prepare(image.pixels(content), digest, among[0]))
        return len(lacking)

    def delete_unused(self, done: int, needed: Collection[str], ahead: int) -> list[str]:
        """Deletes the images of conversations that are trained on, and returns their digests.

        Args:
            done: the number of steps that are done.
            needed: the digests of images that stored steps and shown samples have.
            ahead: how many steps before its own the conversations of a step may begin. Images that were used since then
                may belong to conversations that are not stored yet, and stay.
        """
        deletable = max((each for each in self._deletions if each < done - ahead), default=0)
        self._deletions = [*(each for each in self._deletions if deletable <= each < done), done]
        deleted = []
        for path in self._store.folder.glob(f"*/*{OBSERVED}"):
            digest = path.stem
            if digest not in needed and self._used.setdefault(digest, done) < deletable:
                self._store.path(digest).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                deleted.append(digest)
                del self._used[digest]
        return deleted

    def _files(self, parts: Sequence[Message]) -> list[RowImage]:
        """The images of parts. Paths and addresses are not read here: only the environment's process does that."""
        found: list[RowImage] = []
        for number, part in enumerate(parts):
            content = part.get("bytes")
            if not isinstance(content, bytes):
                raise UnusableObservation(f"image {number} has no content, but {type(content).__name__}")
            found.append(StillImage(f"{number} of the observation", content, self._max_pixels))
        return found


def _emptied(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [{"type": "image"} if is_image_part(part) else part for part in content]}
