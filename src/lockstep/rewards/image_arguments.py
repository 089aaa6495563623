"""What reward functions get of the images of a prompt: paths, grids, PIL images."""

from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.vision import ImageDataConfig
from lockstep.data.images.image_content import row_values
from lockstep.data.images.image_source import ImageFinder, RowImage, StillImage
from lockstep.data.images.image_store import ImageStore, ImageUnavailable
from lockstep.data.samples import Prompt
from lockstep.rewards.reward_signatures import RewardFunction
from lockstep.rewards.reward_values import BadReward
from lockstep.rewards.scoring_messages import ScoringBatch


def image_columns(function: RewardFunction, batch: ScoringBatch) -> dict[str, list[Any]]:
    """What a function gets of the prompts' images, one value per completion, None for a prompt without images:
    `image_path` (a list of paths); `image_grid_thw` as VLM-R1 gives it (int64 `[3]` for one image, `[images, 3]` for
    several), for processors that make it; and `images` (a list of PIL images), if the term asks for them. Empty if no
    prompt has an image.

    Raises:
        BadReward: an image cannot be read any more.
    """
    if function.images == "none" or not any(prompt.images for prompt in batch.prompts):
        return {}
    columns: dict[str, list[Any]] = {}
    if function.takes("image_path"):
        columns["image_path"] = [_sources(prompt) for prompt, _ in batch.pairs()]
    if function.takes("image_grid_thw") and function.store is not None:
        grids = [_first_failing(batch, index, _grid, function.store) for index in range(len(batch.prompts))]
        if any(grid is not None for grid in grids):
            columns["image_grid_thw"] = [grids[sample.prompt] for sample in batch.samples]
    if function.images == "pil" and (function.takes("images") or function.takes("image")):
        columns |= _pil_columns(function, batch)
    return columns


def _sources(prompt: Prompt) -> list[str] | None:
    return [image.source for image in prompt.images] or None


def _grid(prompt: Prompt, store: ImageStore) -> np.ndarray | None:
    inputs = [store.read(image.digest, only=("image_grid_thw",)).inputs for image in prompt.images]
    found = [each["image_grid_thw"].reshape(-1, 3) for each in inputs if each]
    if not found:
        return None
    rows = np.concatenate(found).astype(np.int64)
    grid: np.ndarray = rows[0] if len(rows) == 1 else rows
    return grid


def _pil_columns(function: RewardFunction, batch: ScoringBatch) -> dict[str, list[Any]]:
    opened = [_first_failing(batch, index, _open_all, None) for index in range(len(batch.prompts))]
    # Copies, because a function may draw on its images.
    images = [[each.copy() for each in opened[sample.prompt]] or None for sample in batch.samples]
    columns: dict[str, list[Any]] = {"images": images} if function.takes("images") else {}
    if function.takes("image") and any("image" in prompt.columns for prompt in batch.prompts):
        columns["image"] = [each[0] if each else None for each in images]
    return columns


def _first_failing(batch: ScoringBatch, index: int, read: Any, store: ImageStore | None) -> Any:
    """Reads something of a prompt's images. Raises BadReward for the prompt's first completion if that fails."""
    prompt = batch.prompts[index]
    try:
        return read(prompt, store)
    except (OSError, ValueError, ImageUnavailable) as error:
        position = next(place for place, sample in enumerate(batch.samples) if sample.prompt == index)
        raise BadReward(f"an image of its prompt cannot be read: {error}", position) from error


def _open_all(prompt: Prompt, _: None) -> list[Any]:
    return [_row_image(prompt, number).pixels() for number in range(len(prompt.images))]


def _row_image(prompt: Prompt, number: int) -> RowImage:
    """An image of a prompt: its file, or what the row has under `images` or `image`. Raises UnusableImage."""
    image = prompt.images[number]
    path = Path(image.source)
    if path.is_file():
        # It may have been replaced since the data was read, which had its own limit.
        return StillImage(image.source, path, max(1, 2 * image.size[0] * image.size[1]))
    for name in ("images", "image"):
        values = row_values(prompt.columns.get(name))
        if number < len(values) and not isinstance(values[number], str):
            return ImageFinder(ImageDataConfig(), "").find(values[number], f"image {number}")
    return StillImage(image.source, path, 1)
