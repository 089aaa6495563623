"""What a model's image processor would make of an image, from the image's size alone: its own code with images that
have a size and no pixels."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers.image_processing_backends import PilBackend
from transformers.image_transforms import get_resize_output_image_size
from transformers.image_utils import ChannelDimension, SizeDict

if TYPE_CHECKING:
    from lockstep.data.images.image_processor import ImageExpansion


def blank_image(width: int, height: int) -> np.ndarray:
    """An array `[3, height, width]` that takes no memory."""
    return np.broadcast_to(np.zeros((), np.uint8), (3, height, width))


class _BlankBackend(PilBackend):  # type: ignore[misc]  # transformers has no types
    """Operations on images that change their sizes only."""

    resized: tuple[int, int] | None = None
    """Width and height after the first resizing since it was set to None."""

    def resize(self, image: np.ndarray, size: SizeDict, *args: Any, **kwargs: Any) -> np.ndarray:
        if size.height and size.width:
            height, width = size.height, size.width
        elif size.shortest_edge and not size.longest_edge:
            height, width = get_resize_output_image_size(
                image, size.shortest_edge, default_to_square=False, input_data_format=ChannelDimension.FIRST
            )
        else:
            height, width = super().resize(image, size, *args, **kwargs).shape[-2:]
        if self.resized is None:
            self.resized = (int(width), int(height))
        return np.broadcast_to(np.zeros((), np.float32), (3, height, width))

    def rescale(self, image: np.ndarray, *args: Any, **kwargs: Any) -> np.ndarray:
        return image

    def normalize(self, image: np.ndarray, *args: Any, **kwargs: Any) -> np.ndarray:
        return image


def without_pixels(image_processor: PilBackend) -> Any:
    """A processor with the settings of another one that computes sizes only: its results have the right shapes, grids
    and numbers of tiles, and no pixels. Its attribute `resized` has the width and height after the first resizing since
    it was set to None."""
    kind = type(image_processor)
    made: Any = object.__new__(type(f"Blank{kind.__name__}", (_OwnProcessImage, kind, _BlankBackend), {}))
    made.__dict__.update(image_processor.__dict__)
    return made


class _OwnProcessImage:
    """Comes before the model's own class, which may have overridden it."""

    def process_image(self, image: np.ndarray, *args: Any, **kwargs: Any) -> np.ndarray:
        return image


def candidate_sizes(size: Any, least: int | None, most: int | None) -> list[dict[str, int]]:
    """The settings of a size with which a processor might resize to at least and at most so many pixels. Processors
    differ in how they are given these: as areas (Qwen), as the longest edge (Idefics3), or not at all."""
    now = {name: value for name, value in dict(size).items() if value is not None}
    if set(now) == {"shortest_edge", "longest_edge"}:
        low = least if least is not None else min(now["shortest_edge"], most or now["shortest_edge"])
        return [{"shortest_edge": low, "longest_edge": most if most is not None else max(now["longest_edge"], low)}]
    if set(now) == {"longest_edge"} and most is not None:
        return [{"longest_edge": max(1, int(most**0.5))}]
    return []


def keeps_limits(expansion: "Callable[[tuple[int, int]], ImageExpansion]", least: int | None, most: int | None) -> bool:
    """Whether images that are about square are resized within the limits; to the smallest grid at least.

    Args:
        expansion: what stands for an image in a prompt, by the image's width and height.
    """
    for size in ((64, 64), (400, 300), (2000, 2000)):
        (width, height), smallest = expansion(size).resized, expansion((1, 1)).resized
        if most is not None and width * height > max(most, smallest[0] * smallest[1]):
            return False
        if least is not None and width * height < least:
            return False
    return True
