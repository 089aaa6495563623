"""The prepared images of samples that were taken before: by a run that is resumed, or before the run began."""

from collections.abc import Sequence
from typing import Any

from lockstep.base.errors import PicklableError
from lockstep.data.images.image_store import ImageStore
from lockstep.data.sample_sources import SampleSource


class ImageChanged(PicklableError, ValueError):
    """An image that a sample had is another one now."""

    def __init__(self, uid: str, source: str) -> None:
        super().__init__(
            f"image {source!r} of sample {uid} is not the one that the run prepared: its file, or a setting of its "
            "preparation (model.vision, the model's processor), has changed. Restore it, or start a new run"
        )
        self.uid, self.source = uid, source


def restore_images(samples: Sequence[Any], source: SampleSource[Any], store: ImageStore) -> int:
    """Prepares the images of samples that are not in the store. Returns of how many samples.

    Args:
        samples: prompts, documents or pairs, which were taken before.
        source: where they came from, with the same store.

    Raises:
        ImageChanged: an image is another one now.
        DataError: an image cannot be read any more.
    """
    lacking = [each for each in samples if not all(store.is_kept(image.digest, image.source) for image in each.images)]
    for sample in lacking:
        again = source.by_uid(sample.uid)
        for number, image in enumerate(sample.images):
            if number >= len(again.images) or again.images[number].digest != image.digest:
                raise ImageChanged(sample.uid, image.origin or image.source)
    return len(lacking)
