import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.row_layout import RowLayout


@st.composite
def layouts(draw: st.DrawFn) -> RowLayout:
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=7))
    return RowLayout(lengths, [draw(st.integers(-1, i - 1)) for i in range(len(lengths))])


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
    assert np.array_equal(layout.mask().numpy(), brute)
    assert layout.positions().tolist() == [len(seen) - 1 for seen in paths]
    assert layout.pairs() == brute.sum()


@pytest.mark.parametrize(("lengths", "parents"), [([], []), ([1], []), ([0], [-1]), ([1, 1], [-1, 1]), ([1], [-2])])
def test_invalid_layouts_are_refused(lengths, parents) -> None:
    with pytest.raises(ValueError, match=r"layout needs|has length|has parent"):
        RowLayout(lengths, parents)
