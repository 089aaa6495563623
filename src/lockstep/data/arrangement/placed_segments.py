"""Where the segments of a forest stand when its pieces are laid out row by row."""

from dataclasses import dataclass

import numpy as np

from lockstep.data.forest import Forest, concatenated_ranges, cumulative_bounds
from lockstep.data.packing import PackingPlan


@dataclass(frozen=True, slots=True)
class PlacedSegments:
    """The segments of all rows, row by row. Arrays are integers `[segments]`."""

    segment: np.ndarray
    """Its number in the forest."""
    key: np.ndarray
    """Piece and segment as one number, in ascending order: a piece has its segments in ascending order."""
    length: np.ndarray
    start: np.ndarray
    """The first token of each among those of all rows, and the number of all: `[segments + 1]`."""
    parent: np.ndarray
    """The place of the parent among these segments; -1 for a root."""
    row: np.ndarray
    token_bounds: np.ndarray
    """The first token of each row among those of all rows: `[rows + 1]`."""


def place_segments(plan: PackingPlan, forest: Forest, order: np.ndarray) -> PlacedSegments:
    """Places the segments of pieces.

    Args:
        order: the pieces, row by row.
    """
    counts = np.diff(plan.first_segment)[order]
    segment = plan.segment[concatenated_ranges(plan.first_segment[:-1][order], counts)]
    piece = np.repeat(np.arange(len(order)), counts)  # the piece of each segment, numbered in this order
    length = forest.length[segment]
    row = plan.row[order][piece]
    token_bounds = cumulative_bounds(np.bincount(row, length, plan.ranks * plan.microbatches).astype(np.int64))
    key = piece * (len(forest.tree) + 1) + segment
    of_parent = forest.parent[segment]
    parent = np.where(of_parent < 0, -1, np.searchsorted(key, piece * (len(forest.tree) + 1) + of_parent))
    return PlacedSegments(segment, key, length, cumulative_bounds(length), parent, row, token_bounds)
