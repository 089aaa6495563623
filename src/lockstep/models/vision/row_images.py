"""Images of a packed row: the arguments of the vision tower for all of them, and where their features go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.images.image_store import PreparedImage
from lockstep.data.samples import PlacedImage

_TILES_DIMENSION = 1
_IMAGES_OF_PROMPT = "batch_num_images"
"""LLaVA-OneVision's number of images in each prompt: only the image of a prompt with one is cut into tiles. Here and in
prepared images, it stands once for each image."""


@dataclass(slots=True)
class RowImages:
    """The images of one packed row, for one call of the vision tower.

    If a data set has images, every row has some, so that all ranks call the tower as often: a row without an image gets
    a small one, whose features have no influence.
    """

    inputs: dict[str, Tensor]
    """The arguments of the model's `get_image_features`, for all images together."""
    places: Tensor
    """int64 `[features]`: the tokens of the row whose embeddings the features replace, in the order of the features."""
    real: bool
    """False for a row without an image: its features are multiplied by 0."""
    features: "ImageFeatures | None" = None
    """What the tower and the projector compute of the inputs, if that is known already."""


@dataclass(slots=True)
class ImageFeatures:
    """What a model's vision tower and projector compute of images."""

    rows: Tensor
    """`[features, hidden]`: embeddings of the images' tokens."""
    deepstack: list[Tensor] | None
    """`[features, hidden]` each: what is added to the hidden states of the images' tokens after each of the first
    layers of the language model (DeepStack, Meng et al. 2024, arXiv:2406.04334); None if the model adds nothing."""


def row_images(
    prepared: Sequence[PreparedImage], placed: Sequence[PlacedImage], device: torch.device | str
) -> RowImages:
    """Joins the images of a row.

    Args:
        prepared: the pixels of each image; for a row without an image, those of a small one.
        placed: where each image is in the row; empty for a row without an image.

    Raises:
        ValueError: an image has another number of places than features, or images cannot be joined.
    """
    if not prepared or len(placed) not in (0, len(prepared)):
        raise ValueError(f"a row has {len(placed)} placed and {len(prepared)} prepared images")
    for image, place in zip(prepared, placed, strict=False):
        if len(place.places) != image.features:
            raise ValueError(
                f"image {image.digest} ({place.source or 'of unknown source'}) has {len(place.places)} places and "
                f"{image.features} features"
            )
    inputs = {name: torch.from_numpy(values).to(device) for name, values in joined_inputs(prepared).items()}
    places = [image.places for image in placed] or [np.empty(0, np.int64)]
    return RowImages(inputs, torch.from_numpy(np.concatenate(places).astype(np.int64)).to(device), bool(placed))


def joined_inputs(prepared: Sequence[PreparedImage]) -> dict[str, np.ndarray]:
    """Joins the arrays of images along their first dimension. Images of fewer tiles than others get tiles of zeros,
    which the models leave out.

    Raises:
        ValueError: the images have different arrays, or arrays of different sizes.
    """
    names = list(prepared[0].inputs)
    if any(image.inputs.keys() != prepared[0].inputs.keys() for image in prepared):
        raise ValueError(f"images have different arrays: {sorted({name for i in prepared for name in i.inputs})}")
    return {name: _joined(name, [image.inputs[name] for image in prepared]) for name in names}


def _joined(name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    if len({array.shape[1:] for array in arrays}) == 1:
        return np.ascontiguousarray(np.concatenate(arrays))
    tiles = max(array.shape[_TILES_DIMENSION] for array in arrays)
    rest = {(*array.shape[1:_TILES_DIMENSION], *array.shape[_TILES_DIMENSION + 1 :]) for array in arrays}
    if len(rest) > 1 or arrays[0].ndim < 4:
        shapes = ", ".join(str(list(array.shape)) for array in arrays)
        raise ValueError(f"{name} of the images of a row have shapes that cannot be joined: {shapes}")
    missing = [tiles - array.shape[_TILES_DIMENSION] for array in arrays]
    padded = [
        np.pad(array, [(0, 0), (0, count), *[(0, 0)] * (array.ndim - 2)])
        for array, count in zip(arrays, missing, strict=True)
    ]
    return np.concatenate(padded)


def image_features(lm: Any, inputs: Mapping[str, Tensor]) -> ImageFeatures:
    """Computes the features of images by the model's own tower and projector.

    Args:
        lm: a vision-language model of transformers.
        inputs: the arguments of its `get_image_features`, as in `RowImages`.
    """
    if _IMAGES_OF_PROMPT in inputs:
        return _features_by_prompt_size(lm, inputs)
    found = lm.get_image_features(**inputs)
    deepstack = getattr(found, "deepstack_features", None)
    return ImageFeatures(_rows(found.pooler_output), None if deepstack is None else [_rows(each) for each in deepstack])


def _features_by_prompt_size(lm: Any, inputs: Mapping[str, Tensor]) -> ImageFeatures:
    """Computes features by a model that cuts the images of prompts with one image only.

    The model gets sizes of prompts in the order of the images, and a row may have a part of a prompt's images. So those
    that are not cut come last, as if they were of one prompt: the model reads as many sizes as there are images.
    """
    among_others = inputs[_IMAGES_OF_PROMPT] > 1
    order = among_others.int().argsort(stable=True)
    count = int(among_others.sum())
    sizes = [1] * (len(order) - count) + ([max(2, count)] if count else [])
    sorted_inputs = {name: each[order] for name, each in inputs.items() if name != _IMAGES_OF_PROMPT}
    found = lm.get_image_features(**sorted_inputs, batch_num_images=torch.tensor(sizes, device=order.device))
    return ImageFeatures(_rows([found.pooler_output[index] for index in order.argsort()]), None)


def deepstack_arguments(deepstack: Sequence[Tensor] | None, places: Tensor, tokens: int) -> dict[str, Any]:
    """Returns the arguments of a language model of transformers that adds features to its hidden states.

    Args:
        deepstack: `[features, hidden]` for each of the first layers, in the order of `places`.
        places: int64 `[features]`: the tokens that they are added to.
        tokens: number of tokens of the row.
    """
    if not deepstack:
        return {}
    is_image = torch.zeros(1, tokens, dtype=torch.bool, device=places.device)
    is_image[0, places] = True
    order = places.argsort()
    return {"visual_pos_masks": is_image, "deepstack_visual_embeds": [rows[order] for rows in deepstack]}


def _rows(features: Any) -> Tensor:
    """Returns `[features, hidden]` of a tensor, or of one tensor per image."""
    tensors = [features] if isinstance(features, Tensor) else features
    return torch.cat([tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors])
