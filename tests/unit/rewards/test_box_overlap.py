"""IoU against counting pixels, matching against all permutations and networkx, average precision against its
definition."""

import itertools
import math

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rewards.box_overlap import as_boxes, average_precision, iou_matrix, largest_matching

SIDE = 12
spans = st.tuples(st.integers(0, SIDE - 1), st.integers(1, SIDE)).map(lambda pair: (pair[0], min(SIDE, sum(pair))))
boxes = st.tuples(spans, spans).map(lambda both: (both[0][0], both[1][0], both[0][1], both[1][1]))
gains = st.integers(0, 5).flatmap(
    lambda rows: st.integers(0, 6).flatmap(
        lambda columns: st.lists(
            st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.61, 1.0]), min_size=columns, max_size=columns),
            min_size=rows,
            max_size=rows,
        ).map(lambda table: np.array(table, np.float64).reshape(rows, columns))
    )
)


def pixels(box: tuple[int, int, int, int]) -> set[tuple[int, int]]:
    x1, y1, x2, y2 = box
    return {(x, y) for x in range(SIDE) for y in range(SIDE) if x1 <= x < x2 and y1 <= y < y2}


@given(st.lists(boxes, min_size=1, max_size=4), st.lists(boxes, min_size=1, max_size=4))
def test_iou_is_the_share_of_common_pixels(first: list, second: list) -> None:
    expected = [[len(pixels(a) & pixels(b)) / len(pixels(a) | pixels(b)) for b in second] for a in first]
    np.testing.assert_allclose(iou_matrix(as_boxes(first), as_boxes(second)), expected, rtol=1e-12)


@given(boxes, boxes, st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_iou_does_not_change_with_the_unit_of_an_axis(one: tuple, other: tuple, wide: float, high: float) -> None:
    scale = np.array([wide, high, wide, high])
    plain = iou_matrix(as_boxes([one]), as_boxes([other]))
    np.testing.assert_allclose(iou_matrix(as_boxes([one]) * scale, as_boxes([other]) * scale), plain, rtol=1e-9)


@pytest.mark.parametrize(
    "bad",
    [(5, 0, 1, 4), (0, 4, 4, 4), (math.nan, 0, 4, 4), (0, 0, math.inf, 4), (-math.inf, 0, 4, 4), (2, 2, 2, 2)],
)
def test_what_is_no_box_overlaps_nothing(bad: tuple[float, ...]) -> None:
    assert iou_matrix(as_boxes([bad]), as_boxes([(0, 0, 4, 4), bad])).tolist() == [[0.0, 0.0]]


@given(st.lists(st.tuples(*[st.floats(allow_nan=True, allow_infinity=True)] * 4), max_size=5))
def test_iou_of_any_numbers_is_from_0_to_1(corners: list) -> None:
    found = iou_matrix(as_boxes(corners), as_boxes([*corners, (0, 0, 1e300, 1e300)]))
    assert ((found >= 0) & (found <= 1)).all()


@given(gains)
def test_the_matching_is_the_best_of_all(table: np.ndarray) -> None:
    wide = table if table.shape[0] <= table.shape[1] else table.T
    rows, columns = wide.shape
    every = itertools.permutations(range(columns), rows)
    best = max(sum(wide[row, column] for row, column in enumerate(chosen)) for chosen in every)
    assert largest_matching(table) == pytest.approx(best)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 20), st.integers(1, 20))
def test_the_matching_is_that_of_networkx(seed: int, rows: int, columns: int) -> None:
    table = np.random.default_rng(seed).random((rows, columns))
    graph = networkx.Graph()
    graph.add_weighted_edges_from(
        ((0, row), (1, column), table[row, column]) for row in range(rows) for column in range(columns)
    )
    pairs = networkx.max_weight_matching(graph)
    assert largest_matching(table) == pytest.approx(sum(graph.edges[pair]["weight"] for pair in pairs))


def defined_precision(overlaps: np.ndarray, threshold: float) -> float:
    """COCO's average precision, from its definition, point by point."""
    free, points, hits = set(range(overlaps.shape[1])), [], 0
    for number, row in enumerate(overlaps, 1):
        fitting = sorted((-row[each], each) for each in free if row[each] >= threshold)
        if fitting:
            free.remove(fitting[0][1])
            hits += 1
        points.append((hits / overlaps.shape[1], hits / number))
    levels = [each / 100 for each in range(101)]
    highest = [
        max((precision for recall, precision in points if recall >= level - 1e-9), default=0) for level in levels
    ]
    return sum(highest) / 101


@given(gains.filter(lambda table: table.shape[1] > 0), st.sampled_from([0.25, 0.5, 0.75]))
def test_average_precision_is_as_defined(table: np.ndarray, threshold: float) -> None:
    assert average_precision(table, threshold) == pytest.approx(defined_precision(table, threshold))


def test_average_precision_of_known_cases() -> None:
    both = np.eye(2)
    assert average_precision(both, 0.5) == 1.0
    assert average_precision(both[:1], 0.5) == pytest.approx(51 / 101)  # recalls 0 to 0.5
    assert average_precision(np.vstack([np.zeros((1, 2)), both]), 0.5) == pytest.approx(2 / 3)
    assert average_precision(np.zeros((0, 2)), 0.5) == 0.0
    late = np.vstack([np.zeros((100, 1)), np.ones((1, 1))])
    assert average_precision(late, 0.5) == 0.0  # COCO judges 100 boxes of an image
