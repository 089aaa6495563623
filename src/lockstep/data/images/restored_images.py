"""The prepared images of samples that a resumed run reads from its ledger."""

from collections.abc import Sequence

from lockstep.base.errors import PicklableError
from lockstep.data.images.image_store import ImageStore
from lockstep.data.sample_sources import SampleSource
from lockstep.data.samples import Prompt


class ImageChanged(PicklableError, ValueError):
    """An image that a recorded sample had is another one now."""

    def __init__(self, uid: str, source: str) -> None:
        super().__init__(
            f"image {source!r} of sample {uid} is not the one that the run prepared: its file, or a setting of its "
            "preparation (model.vision, the model's processor), has changed. Restore it, or start a new run"
        )
        self.uid, self.source = uid, source


def restore_images(prompts: Sequence[Prompt], source: SampleSource[Prompt], store: ImageStore) -> int:
    """Prepares the images of recorded prompts again that are not in the store. Returns of how many prompts.

    Args:
        source: where the prompts came from, with the same store.

    Raises:
        ImageChanged: an image is another one now.
        DataError: an image cannot be read any more.
    """
    lacking = [each for each in prompts if any(image.digest not in store for image in each.images)]
    for prompt in lacking:
        again = source.by_uid(prompt.uid)
        for number, image in enumerate(prompt.images):
            if number >= len(again.images) or again.images[number].digest != image.digest:
                raise ImageChanged(prompt.uid, image.source)
    return len(lacking)
