"""Coordinates of boxes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.images.boxes import rescale_boxes

KINDS = ("original", "resized", "0-1000", "0-1")
SIDES = st.integers(1, 5000)
SIZES = st.tuples(SIDES, SIDES)


def test_a_box_in_each_kind_of_coordinates() -> None:
    """A box from the centre to the lower right corner of an image of 400 x 200 pixels that is resized to 28 x 56."""
    boxes = {
        "original": [200, 100, 400, 200],
        "resized": [14, 28, 28, 56],
        "0-1000": [500, 500, 1000, 1000],
        "0-1": [0.5, 0.5, 1, 1],
    }
    for source, box in boxes.items():
        for target, expected in boxes.items():
            found = rescale_boxes([box, box], source, target, (400, 200), (28, 56))  # type: ignore[arg-type]
            np.testing.assert_allclose(found, [expected, expected])


def test_vlm_r1s_formula_for_qwen() -> None:
    """VLM-R1 multiplies x by image_width / input_width and y by image_height / input_height, where the input's size is
    the grid of patches times 14."""
    grid_height, grid_width = 26, 40
    box, (width, height) = [31.0, 44.0, 300.0, 211.0], (640, 427)
    expected = [
        box[0] / (grid_width * 14) * width, box[1] / (grid_height * 14) * height,
        box[2] / (grid_width * 14) * width, box[3] / (grid_height * 14) * height,
    ]  # fmt: skip
    found = rescale_boxes(box, "resized", "original", (width, height), (grid_width * 14, grid_height * 14))
    np.testing.assert_allclose(found, expected)


@given(
    st.lists(st.tuples(*[st.floats(-1e4, 1e4)] * 4), max_size=4), st.sampled_from(KINDS), st.sampled_from(KINDS),
    SIZES, SIZES,
)  # fmt: skip
def test_there_and_back_is_the_same_box(boxes: list, source: str, target: str, size: tuple, resized: tuple) -> None:
    array = np.asarray(boxes, np.float64).reshape(-1, 4)
    there = rescale_boxes(array, source, target, size, resized)  # type: ignore[arg-type]
    back = rescale_boxes(there, target, source, size, resized)  # type: ignore[arg-type]
    assert there.shape == array.shape
    np.testing.assert_allclose(back, array, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (([1, 2, 3], "original", "0-1", (4, 4)), "expected x and y in turn"),
        ((5, "original", "0-1", (4, 4)), "expected x and y in turn"),
        (([1, 2], "resized", "0-1", (4, 4)), "the resized size is None"),
        (([1, 2], "original", "0-1", (0, 4)), r"the original size is \(0, 4\)"),
        (([1, 2], "percent", "0-1", (4, 4)), "'percent', expected one of original, resized, 0-1000, 0-1"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rescale_boxes(*arguments)
