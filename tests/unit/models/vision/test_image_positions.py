"""Positions of rows with images, and the segments of images that attend to themselves in both directions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.images.image_store import PreparedImage
from lockstep.data.row_layout import RowLayout
from lockstep.data.samples import PlacedImage
from lockstep.models.vision.image_positions import row_positions, split_whole_images


def placed(first: int, count: int) -> PlacedImage:
    return PlacedImage("0123456789abcdef", np.arange(first, first + count, dtype=np.int32))


class _Model:
    """A model whose images take one position per axis and token, as M-RoPE's."""

    def __init__(self) -> None:
        self.base_model = self

    def get_rope_index(self, input_ids, mm_token_type_ids, image_grid_thw=None):
        rows, position, grids = [], 0, iter([] if image_grid_thw is None else image_grid_thw.tolist())
        types = mm_token_type_ids[0].tolist()
        while len(rows) < len(types):
            if types[len(rows)]:
                _, height, width = next(grids)
                rows += [[position, position + y, position + x] for y in range(height) for x in range(width)]
                position += max(height, width)
            else:
                rows.append([position] * 3)
                position += 1
        return torch.tensor(rows).T[:, None], torch.tensor([0])


def grid(height: int, width: int) -> PreparedImage:
    return PreparedImage(
        "0123456789abcdef", {"image_grid_thw": np.array([[1, height, width]])}, height * width, (1, 1), (1, 1)
    )


def test_children_begin_after_the_largest_position_of_their_parents_path() -> None:
    """Prompt `a[2x3]b` with two children, one of which has a child; then a root without an image."""
    lengths, parents = [8, 2, 3, 1, 2], [-1, 0, 0, 1, -1]
    found = row_positions(_Model(), lengths, parents, [placed(1, 6)], [grid(2, 3)])
    prompt = [[0, 1, 1, 1, 1, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2, 4], [0, 1, 2, 3, 1, 2, 3, 4]]
    rest = [5, 6, 5, 6, 7, 7, 0, 1]
    assert found is not None and found.tolist() == [[*axis, *rest] for axis in prompt]


def test_a_row_without_images_has_the_positions_of_its_path() -> None:
    assert row_positions(_Model(), [3, 2], [-1, 0], [], []) is None
    assert row_positions(object.__new__(type("Plain", (), {"base_model": None})), [3], [-1], [placed(0, 2)], []) is None


def test_misplaced_images_are_refused() -> None:
    with pytest.raises(ValueError, match="not in one segment of a row of 6 tokens"):
        row_positions(_Model(), [3, 3], [-1, 0], [placed(2, 4)], [grid(2, 2)])
    with pytest.raises(ValueError, match="begins where another ends"):
        row_positions(_Model(), [9], [-1], [placed(0, 4), placed(4, 4)], [grid(2, 2)] * 2)


@st.composite
def rows(draw) -> tuple[list[int], list[int], list[PlacedImage]]:
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    parents = [draw(st.integers(-1, index - 1)) for index in range(len(lengths))]
    images, start = [], 0
    for length in lengths:
        if draw(st.booleans()):
            first = draw(st.integers(0, length - 1))
            images.append(placed(start + first, draw(st.integers(1, length - first))))
        start += length
    return lengths, parents, images


@given(rows())
@settings(deadline=None)
def test_a_split_row_differs_from_the_whole_one_only_within_images(row) -> None:
    lengths, parents, images = row
    new_lengths, new_parents, whole = split_whole_images(lengths, parents, images)
    found = RowLayout(new_lengths, new_parents, whole=whole)
    expected = RowLayout(lengths, parents)
    mask = expected.mask().clone()
    for image in images:
        places = torch.from_numpy(image.places.astype(np.int64))
        mask[places[:, None], places] = True
    assert torch.equal(found.mask(), mask)
    assert torch.equal(found.path_positions(), expected.path_positions())
    assert found.longest == expected.longest and found.pairs() == int(mask.sum())
