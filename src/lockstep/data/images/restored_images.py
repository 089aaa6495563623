"""The prepared images of samples that were taken before: by a run that is resumed, or before the run began."""

from collections.abc import Sequence
from typing import Any

from lockstep.base.errors import PicklableError
from lockstep.data.images.image_store import ImageStore
from lockstep.data.sample_sources import SampleSource


class ImageChanged(PicklableError, ValueError):
    """An image that a sample had is another one now."""

    def __init__(self, uid: str, source: str, old: str = "", new: str = "") -> None:
        super().__init__(
            f"image {source!r} of sample {uid} is not the one that the run prepared: its file, or a setting of its "
            f"preparation (model.vision, the model's processor), has changed ({old} -> {new or 'none'}). Restore it, "
            "or start a new run"
        )
        self.uid, self.source, self.old, self.new = uid, source, old, new


def restore_images(samples: Sequence[Any], source: SampleSource[Any], store: ImageStore) -> tuple[int, set[str]]:
    """Prepares the images of samples that are not in the store.

    Args:
        samples: prompts, documents or pairs, which were taken before.
        source: where they came from, with the same store.

    Returns:
        Of how many samples images were prepared, and the uids of those with an image that has become unusable, if the
        config says to leave such rows out.

    Raises:
        ImageChanged: an image is another one now.
        DataError: an image cannot be read any more, or its file has changed since the run began.
    """
    lacking = [each for each in samples if not all(store.is_kept(image.digest, image.source) for image in each.images)]
    lost = set()
    for sample in lacking:
        again = source.usable_by_uid(sample.uid)
        if again is None:
            lost.add(sample.uid)
            continue
        for number, image in enumerate(sample.images):
            now = again.images[number].digest if number < len(again.images) else ""
            if now != image.digest:
                raise ImageChanged(sample.uid, image.origin or image.source, image.digest, now)
    return len(lacking) - len(lost), lost
