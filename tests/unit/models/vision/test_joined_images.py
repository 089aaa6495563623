"""The images of a row are joined for one call of the tower."""

import numpy as np
import pytest
import torch

from lockstep.data.images.image_store import PreparedImage
from lockstep.data.samples import PlacedImage
from lockstep.models.vision.row_images import joined_inputs, row_images


def image(features: int = 2, **inputs: np.ndarray) -> PreparedImage:
    return PreparedImage("0123456789abcdef", inputs, features, (8, 8), (8, 8))


def placed(*places: int) -> PlacedImage:
    return PlacedImage("0123456789abcdef", np.array(places, np.int32), source="cat.png")


def test_patches_are_concatenated_in_the_order_of_the_images() -> None:
    first = image(2, pixel_values=np.zeros((4, 3), np.float32), image_grid_thw=np.array([[1, 2, 2]]))
    second = image(1, pixel_values=np.ones((2, 3), np.float32), image_grid_thw=np.array([[1, 1, 2]]))
    found = row_images([first, second], [placed(1, 2), placed(7)], "cpu")
    assert found.inputs["pixel_values"].tolist() == [[0] * 3] * 4 + [[1] * 3] * 2
    assert found.inputs["image_grid_thw"].tolist() == [[1, 2, 2], [1, 1, 2]]
    assert found.places.tolist() == [1, 2, 7] and found.places.dtype == torch.int64
    assert found.real


def test_a_row_without_an_image_gets_one_that_is_nowhere() -> None:
    found = row_images([image(2, pixel_values=np.zeros((1, 3)))], [], "cpu")
    assert not found.real and found.places.tolist() == []


def test_missing_tiles_are_filled_with_zeros() -> None:
    few, many = np.ones((1, 1, 3, 4, 4), np.float32), np.ones((1, 3, 3, 4, 4), np.float32)
    mask = {count: np.ones((1, count, 4, 4), np.int64) for count in (1, 3)}
    found = joined_inputs([
        image(pixel_values=few, pixel_attention_mask=mask[1]),
        image(pixel_values=many, pixel_attention_mask=mask[3]),
    ])  # fmt: skip
    assert found["pixel_values"].shape == (2, 3, 3, 4, 4) and found["pixel_attention_mask"].shape == (2, 3, 4, 4)
    assert found["pixel_values"][0].sum() == 3 * 16 and found["pixel_values"][1].sum() == 9 * 16
    assert found["pixel_attention_mask"].sum() == 4 * 16


def test_what_cannot_be_joined_is_refused() -> None:
    square, wide = image(pixel_values=np.zeros((1, 3, 4, 4))), image(pixel_values=np.zeros((1, 3, 4, 8)))
    with pytest.raises(ValueError, match=r"pixel_values of the images .* \[1, 3, 4, 4\], \[1, 3, 4, 8\]"):
        joined_inputs([square, wide])
    with pytest.raises(ValueError, match=r"different arrays: .*'other'"):
        joined_inputs([square, image(other=np.zeros((1, 3, 4, 4)))])
    with pytest.raises(ValueError, match=r"image 0123456789abcdef \(cat.png\) has 3 places and 2 features"):
        row_images([square], [placed(1, 2, 3)], "cpu")
    with pytest.raises(ValueError, match="2 placed and 1 prepared"):
        row_images([square], [placed(1, 2), placed(3, 4)], "cpu")
