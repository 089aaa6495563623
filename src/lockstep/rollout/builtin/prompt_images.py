"""The images of prompts in a prefill: features in place of embeddings, positions, attention in both directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from lockstep.data.images.image_store import ImageStore, PreparedImage
from lockstep.data.samples import PlacedImage
from lockstep.models.vision.image_positions import attends_to_whole_images, has_three_axes, prompt_positions
from lockstep.models.vision.row_images import deepstack_arguments, image_features, row_images


@dataclass(slots=True)
class MergedImages:
    """The features of the images of a forward."""

    places: Tensor
    """int64 `[features]`: the tokens whose embeddings the features are, ascending."""
    rows: Tensor
    """`[features, hidden]`."""
    deepstack: Sequence[Tensor] = ()
    """`[features, hidden]` each: what is added at the places to the output of each of the first layers (DeepStack, Meng
    et al. 2024, arXiv:2406.04334)."""

    def merge(self, embeddings: Tensor) -> None:
        """Writes the features into embeddings `[tokens, hidden]`."""
        embeddings[self.places] = self.rows.to(embeddings.dtype)

    def add_deepstack(self, layer: int, hidden: Tensor) -> None:
        """Adds to the output `[tokens, hidden]` of a layer."""
        if layer < len(self.deepstack):
            hidden.index_add_(0, self.places, self.deepstack[layer].to(hidden.dtype))

    def decoder_arguments(self, tokens: int) -> dict[str, Any]:
        """The arguments for DeepStack of a decoder of transformers."""
        return deepstack_arguments(self.deepstack, self.places, tokens)


class ImageSource(Protocol):
    """Where the engine gets from what images contribute to a prompt. All results belong to the current weights."""

    bidirectional: bool
    """Whether the tokens of an image see each other in both directions."""
    three_axes: bool
    """Whether positions have three axes (M-RoPE)."""

    def read(self, images: Sequence[PlacedImage]) -> list[PreparedImage]:
        """Reads prepared images. Raises ImageUnavailable."""

    def positions(
        self, prompt: np.ndarray, images: Sequence[PlacedImage], prepared: Sequence[PreparedImage]
    ) -> np.ndarray | None:
        """The positions of a prompt, int64 `[3, tokens]`; None without `three_axes`."""

    def features(self, images: Sequence[PlacedImage], prepared: Sequence[PreparedImage]) -> MergedImages:
        """Computes the features of images, for the places that `images` have."""


class ModelImages:
    """Computes features with the model's own tower and projector. Implements `ImageSource`.

    Args:
        lm: a vision-language model of transformers.
        store: has the prepared images.
    """

    def __init__(self, lm: Any, store: ImageStore) -> None:
        self.lm, self.store = lm, store
        self.bidirectional, self.three_axes = attends_to_whole_images(lm), has_three_axes(lm)

    def read(self, images: Sequence[PlacedImage]) -> list[PreparedImage]:
        return [self.store.read(image.digest) for image in images]

    def positions(
        self, prompt: np.ndarray, images: Sequence[PlacedImage], prepared: Sequence[PreparedImage]
    ) -> np.ndarray | None:
        found = prompt_positions(self.lm, prompt, images, prepared)
        return None if found is None else found.numpy()

    def features(self, images: Sequence[PlacedImage], prepared: Sequence[PreparedImage]) -> MergedImages:
        joined = row_images(prepared, images, self.lm.device)
        found = image_features(self.lm, joined.inputs)
        return MergedImages(joined.places, found.rows, found.deepstack or ())


def image_spans(images: Sequence[PlacedImage], tokens: int) -> np.ndarray:
    """Numbers the runs of adjacent places of images: int64 `[tokens]`, -1 for other tokens."""
    spans = np.full(tokens, -1, np.int64)
    if images:
        places = np.concatenate([image.places for image in images])
        spans[places] = np.cumsum(np.diff(places, prepend=-2) != 1) - 1
    return spans


def decode_offset(positions: np.ndarray | None) -> int:
    """By how much the positions of tokens that follow a prompt differ from their number in the sequence, given the
    prompt's positions `[3, tokens]`."""
    return 0 if positions is None else int(positions[:, -1].max()) + 1 - positions.shape[1]
