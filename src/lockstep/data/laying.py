"""Laying out rows: from which piece is in which row to what the ranks compute."""

import numpy as np

from lockstep.data.balance import Schedule
from lockstep.data.batch import Rows
from lockstep.data.forest import Forest, bounds_of, spans


def lay_out(plan: Schedule, forest: Forest, fields: dict[str, np.ndarray]) -> Rows:
    """The rows of all ranks.

    Args:
        fields: float32 `[targets]` each, by name.
    """
    pieces, order = plan.pieces, plan.order()
    count = plan.ranks * plan.microbatches
    row = plan.row[order]
    held = np.diff(pieces.first)[order]
    segment = pieces.segment[spans(pieces.first[:-1][order], held)]
    piece = np.repeat(np.arange(len(order)), held)
    """Of each segment: which piece, counted in this order."""
    length = forest.length[segment]
    start = bounds_of(length)
    row_of_segment = row[piece]
    in_row = bounds_of(np.bincount(row_of_segment, length, count).astype(np.int64))
    # A segment's place among those of its piece, to find parents: pieces have their segments in ascending order.
    key = piece * (len(forest.tree) + 1) + segment
    up = forest.parent[segment]
    parent = np.where(up < 0, -1, np.searchsorted(key, piece * (len(forest.tree) + 1) + up))

    owned = np.diff(pieces.first_term)[order]
    term = pieces.term[spans(pieces.first_term[:-1][order], owned)]
    piece_of_term = np.repeat(np.arange(len(order)), owned)
    source = forest.term_segment[term]
    entry = np.searchsorted(key, piece_of_term * (len(forest.tree) + 1) + source)
    targets = forest.wanted_count[source]
    offset = forest.wanted[spans(forest.first_wanted[source], targets)]
    begin = start[entry] - in_row[row[piece_of_term]]
    above = parent[entry]
    before = start[above] + length[above] - 1 - in_row[row[piece_of_term]]  # of a root it is never taken
    sources = np.where(offset == 0, np.repeat(before, targets), np.repeat(begin - 1, targets) + offset)
    index = spans(forest.target_bounds[term], targets)

    if pieces.path:
        lengths, parents, row_of_part = pieces.tokens[order], np.full(len(order), -1), row
    else:
        parts = bounds_of(np.bincount(row_of_segment, minlength=count))
        lengths, row_of_part = length, row_of_segment
        parents = np.where(parent < 0, -1, parent - parts[row_of_segment])
    rows = Rows(
        ranks=plan.ranks,
        microbatches=plan.microbatches,
        tokens=forest.tokens[spans(forest.first_token[segment], length)],
        token_bounds=in_row,
        lengths=lengths.astype(np.int32),
        parents=parents.astype(np.int32),
        segment_bounds=bounds_of(np.bincount(row_of_part, minlength=count)),
        sources=sources.astype(np.int32),
        targets=forest.tokens[np.repeat(forest.first_token[source], targets) + offset],
        index=index,
        sequences=forest.sequences[index],
        target_bounds=bounds_of(np.bincount(row[piece_of_term], targets, count).astype(np.int64)),
        fields={name: values[index] for name, values in fields.items()},
    )
    return _with_empty_rows(rows, np.flatnonzero(np.diff(in_row) == 0))


def _with_empty_rows(rows: Rows, empty: np.ndarray) -> Rows:
    """One token of weight zero in rows without work: a rank without any enters the same collectives as the others."""
    if not empty.size:
        return rows

    def filled(values: np.ndarray, bounds: np.ndarray, one: int) -> np.ndarray:
        return np.insert(values, bounds[empty], one)

    def wider(bounds: np.ndarray) -> np.ndarray:
        size = np.diff(bounds)
        size[empty] = 1
        return bounds_of(size)

    tokens, segments, targets = rows.token_bounds, rows.segment_bounds, rows.target_bounds
    return Rows(
        ranks=rows.ranks,
        microbatches=rows.microbatches,
        tokens=filled(rows.tokens, tokens, 0),
        token_bounds=wider(tokens),
        lengths=filled(rows.lengths, segments, 1),
        parents=filled(rows.parents, segments, -1),
        segment_bounds=wider(segments),
        sources=filled(rows.sources, targets, 0),
        targets=filled(rows.targets, targets, 0),
        index=filled(rows.index, targets, -1),
        sequences=filled(rows.sequences, targets, -1),
        target_bounds=wider(targets),
        fields={name: filled(values, targets, 0) for name, values in rows.fields.items()},
    )
