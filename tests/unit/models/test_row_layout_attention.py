"""Layouts: windows along the path, and independent parts."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.row_layout import RowLayout


@st.composite
def layouts(draw: st.DrawFn) -> RowLayout:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    parents = [draw(st.integers(-1, segment - 1)) for segment in range(len(lengths))]
    whole = draw(st.sets(st.integers(0, len(lengths) - 1)))
    return RowLayout(lengths, parents, whole=whole)


def path_to(layout: RowLayout, token: int) -> list[int]:
    """Returns the tokens on the path to `token`, root first, and those of its segment after it if that is whole."""
    segment = next(i for i, (start, stop, _) in enumerate(layout.segments()) if start <= token < stop)
    path: list[int] = []
    for above in reversed(layout.ancestors(segment)):
        path += range(layout.starts[above], layout.starts[above] + layout.lengths[above])
    last = layout.starts[segment] + layout.lengths[segment] if segment in layout.whole else token + 1
    return [*path, *range(layout.starts[segment], last)]


@given(layouts(), st.none() | st.integers(1, 9))
def test_a_window_reaches_back_along_the_path(layout: RowLayout, window: int | None) -> None:
    expected = torch.zeros(layout.tokens, layout.tokens, dtype=torch.bool)
    for token in range(layout.tokens):
        path = path_to(layout, token)
        before = len(path) - path.index(token) - 1
        expected[token, path[-window - before :] if window else path] = True
    assert torch.equal(layout.mask(window=window), expected)


@given(layouts(), st.integers(1, 12))
def test_parts_cover_the_row_and_lose_no_pair(layout: RowLayout, tokens: int) -> None:
    rebuilt = torch.zeros(layout.tokens, layout.tokens, dtype=torch.bool)
    reached = 0
    for start, stop, part in layout.parts(tokens):
        assert start == reached and stop - start == part.tokens
        rebuilt[start:stop, start:stop] = part.mask()
        reached = stop
    assert reached == layout.tokens
    assert torch.equal(rebuilt, layout.mask())


def test_small_trees_share_a_part_and_a_large_one_does_not() -> None:
    layout = RowLayout([3, 2, 4, 20, 5, 1], [-1, 0, -1, -1, 3, -1])
    assert [(start, stop) for start, stop, _ in layout.parts(10)] == [(0, 9), (9, 34), (34, 35)]
    assert len(layout.parts(1000)) == 1 and layout.parts(1000)[0][2] is layout
