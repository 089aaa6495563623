import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.row_layout import RowLayout


@st.composite
def layouts(draw: st.DrawFn) -> RowLayout:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=7))
    parents = [draw(st.integers(-1, i - 1)) for i in range(len(lengths))]
    return RowLayout(lengths, parents, whole=draw(st.sets(st.integers(0, len(lengths) - 1))))


def path(layout: RowLayout, token: int) -> list[int]:
    """Returns the tokens from the root to the given one."""
    segment = next(s for s, (start, stop, _) in enumerate(layout.segments()) if start <= token < stop)
    found = list(range(layout.starts[segment], token + 1))
    while (segment := layout.parents[segment]) >= 0:
        start = layout.starts[segment]
        found = [*range(start, start + layout.lengths[segment]), *found]
    return found


@given(layouts())
def test_mask_positions_and_pairs_are_those_of_the_paths(layout) -> None:
    paths = [path(layout, token) for token in range(layout.tokens)]
    brute = np.zeros((layout.tokens, layout.tokens), bool)
    for token, seen in enumerate(paths):
        brute[token, seen] = True
    for segment in layout.whole:
        own = slice(layout.starts[segment], layout.starts[segment] + layout.lengths[segment])
        brute[own, own] = True
    assert np.array_equal(layout.mask().numpy(), brute)
    assert layout.positions().tolist() == [len(seen) - 1 for seen in paths]
    assert layout.pairs() == brute.sum()


def test_given_positions_are_those_of_the_model_and_leave_the_window_to_the_path() -> None:
    path = RowLayout([3, 2, 2], [-1, 0, 0])
    for positions in (torch.arange(7), torch.arange(21).view(3, 7)):
        layout = RowLayout([3, 2, 2], [-1, 0, 0], positions)
        assert torch.equal(layout.positions(), positions)
        assert torch.equal(layout.path_positions(), path.positions())
        assert torch.equal(layout.mask(window=2), path.mask(window=2))
    with pytest.raises(ValueError, match=r"shape \[2, 7\], expected \[7\] or \[3, 7\]"):
        RowLayout([3, 2, 2], [-1, 0, 0], torch.zeros(2, 7, dtype=torch.int64))


@pytest.mark.parametrize(("lengths", "parents"), [([], []), ([1], []), ([0], [-1]), ([1, 1], [-1, 1]), ([1], [-2])])
def test_invalid_layouts_are_refused(lengths, parents) -> None:
    with pytest.raises(ValueError, match=r"layout needs|has length|has parent"):
        RowLayout(lengths, parents)
