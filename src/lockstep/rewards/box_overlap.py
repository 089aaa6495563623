"""How well boxes cover each other: intersection over union, matching, and average precision.

Boxes are float64 arrays `[boxes, 4]` of corners x1, y1, x2, y2 in continuous coordinates: a box from 0 to 10 is ten
pixels wide. (VLM-R1 takes the last row and column of pixels away from the intersection and not from the union, and
counts an overlap of one pixel as none; its values are therefore a little lower for small boxes.)
"""

from collections.abc import Sequence

import numpy as np

LARGEST_COORDINATE = 1e9
"""Larger coordinates are cut to this, so that areas stay exact enough and finite."""
COCO_DETECTIONS = 100
"""COCO's limit of boxes per image: later ones of a completion count as found nowhere."""
_RECALLS = np.linspace(0.0, 1.0, 101)


def as_boxes(corners: Sequence[Sequence[float]]) -> np.ndarray:
    """Boxes as float64 `[boxes, 4]`. One that is no box (corners in the wrong order, or not finite) has area 0."""
    boxes = np.array(corners, np.float64).reshape(-1, 4)
    boxes = np.clip(np.where(np.isfinite(boxes), boxes, np.nan), -LARGEST_COORDINATE, LARGEST_COORDINATE)
    x1, y1, x2, y2 = boxes.T
    valid = (x1 < x2) & (y1 < y2)
    return np.where(valid[:, None], boxes, 0.0)


def iou_matrix(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """The area of the intersection of two boxes over that of their union, float64 `[first boxes, second boxes]`; 0
    where one of them has no area."""
    low = np.maximum(first[:, None, :2], second[None, :, :2])
    high = np.minimum(first[:, None, 2:], second[None, :, 2:])
    common = np.prod(np.maximum(high - low, 0.0), axis=-1)
    union = _areas(first)[:, None] + _areas(second)[None, :] - common
    ious: np.ndarray = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
    return ious


def _areas(boxes: np.ndarray) -> np.ndarray:
    areas: np.ndarray = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    return areas


def largest_matching(gains: np.ndarray) -> float:
    """The largest sum of gains `[rows, columns]` (at least 0) over pairs in which no row or column stands twice.

    Kuhn and Munkres' assignment by shortest augmenting paths (Jonker and Volgenant, Computing 38, 1987), in
    O(rows^2 columns) of which numpy does the innermost loop. SciPy has it as `linear_sum_assignment`; it is not among
    the packages that scoring needs.
    """
    costs = -(gains if gains.shape[0] <= gains.shape[1] else gains.T)
    rows, columns = costs.shape
    if rows == 0:
        return 0.0
    row_of = np.full(columns, -1)
    row_potential, column_potential = np.zeros(rows), np.zeros(columns)
    for start in range(rows):
        distance, previous = np.full(columns, np.inf), np.full(columns, -1)
        done = np.zeros(columns, bool)
        row, column, length = start, -1, 0.0
        while row >= 0:
            reached = length + costs[row] - row_potential[row] - column_potential
            better = ~done & (reached < distance)
            distance[better], previous[better] = reached[better], column
            column = int(np.argmin(np.where(done, np.inf, distance)))
            length = float(distance[column])
            done[column] = True
            row = int(row_of[column])
        shift = np.where(done, length - distance, 0.0)
        column_potential -= shift
        matched = done & (row_of >= 0)
        row_potential[row_of[matched]] += shift[matched]
        row_potential[start] += length
        while column >= 0:  # along the path, each row takes the column that follows it
            before = int(previous[column])
            row_of[column] = start if before < 0 else row_of[before]
            column = before
    used = row_of >= 0
    return float(-costs[row_of[used], np.flatnonzero(used)].sum())


def average_precision(overlaps: np.ndarray, threshold: float) -> float:
    """COCO's average precision at one threshold: the mean over 101 recalls of the highest precision at that recall or a
    higher one.

    Args:
        overlaps: IoU `[predicted boxes, expected boxes]`, predicted ones in the order of their confidence. Each takes
            the expected box with the highest IoU among those that are left, as COCO's evaluation does.
    """
    predicted, expected = overlaps.shape
    if expected == 0:
        raise ValueError("no box is expected: average precision is not defined")
    left, found = np.ones(expected, bool), np.zeros(predicted, bool)
    for number in range(min(predicted, COCO_DETECTIONS)):
        candidates = np.where(left, overlaps[number], -1.0)
        best = int(np.argmax(candidates))
        if candidates[best] >= threshold:
            left[best], found[number] = False, True
    hits = np.cumsum(found)
    precision = hits / np.arange(1, predicted + 1)
    highest = np.maximum.accumulate(precision[::-1])[::-1]
    places = np.searchsorted(hits / expected, _RECALLS - 1e-12)
    return float(np.append(highest, 0.0)[places].mean())
