"""Positions of the tokens of prompts with images, and which tokens of an image attend to each other.

Models with multimodal rotary positions (M-RoPE, Wang et al. 2024, arXiv:2409.12191) give a token three positions: time,
height and width. Those of a text token are equal; an image takes as many positions as its longer side has tokens.
"""

import inspect
from collections.abc import Sequence, Sized
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.images.image_store import PreparedImage
from lockstep.data.row_layout import RowLayout
from lockstep.data.samples import PlacedImage
from lockstep.models.vision.row_images import joined_inputs

_TOKEN_TYPES = "mm_token_type_ids"
_IMAGE_TYPE = 1


def prompt_positions(
    lm: Any, tokens: Sized, placed: Sequence[PlacedImage], prepared: Sequence[PreparedImage]
) -> Tensor | None:
    """Computes the positions of a prompt's tokens by the model's own rule.

    Args:
        lm: a vision-language model of transformers.
        tokens: the prompt. Only the number of tokens matters: a placeholder token elsewhere than at the places of the
            images is text.
        placed: its images, in the order of their places; prepared has the same.

    Returns:
        int64 `[3, tokens]`; None if the model has one position per token.

    Raises:
        ValueError: two images have no text between them, which the model's rule takes for one.
    """
    if not has_three_axes(lm):
        return None
    if not placed:
        return torch.arange(len(tokens)).expand(3, -1)
    rule = lm.base_model.get_rope_index
    accepted = inspect.signature(rule).parameters
    types = torch.zeros(1, len(tokens), dtype=torch.int32)
    for image in placed:
        types[0, torch.from_numpy(image.places.astype(np.int64))] = _IMAGE_TYPE
    _check_separated(placed)
    grids = [
        replace(image, inputs={name: array for name, array in image.inputs.items() if name in accepted})
        for image in prepared
    ]  # without pixels
    found, _ = rule(
        input_ids=torch.zeros(1, len(tokens), dtype=torch.int64),
        **{_TOKEN_TYPES: types},
        **{name: torch.from_numpy(array) for name, array in joined_inputs(grids).items()},
    )
    positions: Tensor = found[:, 0]
    return positions


def has_three_axes(lm: Any) -> bool:
    """Returns whether the model's positions have three axes."""
    return hasattr(lm.base_model, "get_rope_index")


def _check_separated(placed: Sequence[PlacedImage]) -> None:
    ends = {int(image.places[-1]) + 1 for image in placed}
    for image in placed:
        if int(image.places[0]) in ends:
            raise ValueError(
                f"image {image.digest} ({image.source or 'of unknown source'}) begins where another ends; "
                "put text between the images of a prompt"
            )


def row_positions(
    lm: Any,
    lengths: Sequence[int],
    parents: Sequence[int],
    placed: Sequence[PlacedImage],
    prepared: Sequence[PreparedImage],
) -> Tensor | None:
    """Computes the positions of a packed row's tokens. A segment begins after the largest position of its parent's
    path.

    Args:
        lm: a vision-language model of transformers.
        lengths: number of tokens of each segment; parents as in `RowLayout`.
        placed: the images, with places in the row; prepared has the same.

    Returns:
        int64 `[3, tokens]`; None if the model has one position per token, or the row has no image.

    Raises:
        ValueError: as `prompt_positions`, or an image is not in one segment.
    """
    if not placed or not has_three_axes(lm):
        return None
    ends: list[int] = []
    parts: list[Tensor] = []
    start = 0
    for length, parent, inside in zip(lengths, parents, images_of_segments(lengths, placed), strict=True):
        first = 0 if parent < 0 else ends[parent]
        own = [placed[index].moved(-start) for index in inside]
        positions = prompt_positions(lm, range(length), own, [prepared[index] for index in inside])
        assert positions is not None
        parts.append(positions + first)
        ends.append(int(parts[-1].max()) + 1)
        start += length
    return torch.cat(parts, dim=1)


def images_of_segments(lengths: Sequence[int], placed: Sequence[PlacedImage]) -> list[list[int]]:
    """Returns the indices of the images of each segment of a row. Raises ValueError if an image is not in one."""
    stops = np.cumsum(lengths)
    found: list[list[int]] = [[] for _ in lengths]
    for index, image in enumerate(placed):
        first, last = (int(np.searchsorted(stops, place, side="right")) for place in image.places[[0, -1]])
        if first != last or first >= len(found):
            raise ValueError(
                f"image {image.digest} has places {image.places[0]} to {image.places[-1]}, which are not in one "
                f"segment of a row of {int(stops[-1])} tokens"
            )
        found[first].append(index)
    return found


def split_whole_images(
    lengths: Sequence[int], parents: Sequence[int], placed: Sequence[PlacedImage]
) -> tuple[list[int], list[int], list[int]]:
    """Makes each image a segment of its own, whose parent is the text before it. Consecutive tokens of images in one
    segment are one image, as in transformers' masks.

    Returns:
        (lengths, parents, segments of images); the order of the row's tokens does not change.
    """
    is_image = np.zeros(int(sum(lengths)), dtype=bool)
    for image in placed:
        is_image[image.places] = True
    new_lengths: list[int] = []
    new_parents: list[int] = []
    whole: list[int] = []
    last_piece: list[int] = []
    start = 0
    for length, parent in zip(lengths, parents, strict=True):
        above = -1 if parent < 0 else last_piece[parent]
        edges = np.flatnonzero(np.diff(is_image[start : start + length])) + 1
        for first, last in zip([0, *edges.tolist()], [*edges.tolist(), length], strict=True):
            if is_image[start + first]:
                whole.append(len(new_lengths))
            new_lengths.append(last - first)
            new_parents.append(above)
            above = len(new_lengths) - 1
        last_piece.append(above)
        start += length
    return new_lengths, new_parents, whole


def vision_layout(
    lm: Any,
    lengths: Sequence[int],
    parents: Sequence[int],
    placed: Sequence[PlacedImage],
    prepared: Sequence[PreparedImage],
) -> RowLayout:
    """Returns the layout of a packed row with images: its positions, and images whose tokens attend to each other.

    Arguments and errors as in `row_positions`.
    """
    positions = row_positions(lm, lengths, parents, placed, prepared)
    if placed and attends_to_whole_images(lm):
        new_lengths, new_parents, whole = split_whole_images(lengths, parents, placed)
        return RowLayout(new_lengths, new_parents, positions, whole)
    return RowLayout(list(lengths), list(parents), positions)


def attends_to_whole_images(lm: Any) -> bool:
    """Returns whether the tokens of an image attend to each other in both directions.

    Such models (Gemma 3, PaliGemma) have an argument that says which tokens are an image's. `probe_packing` finds out
    whether that is all they do with it.
    """
    return "token_type_ids" in inspect.signature(inspect.unwrap(lm.base_model.forward)).parameters
