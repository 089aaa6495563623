"""The rows of a mini-batch for another number of ranks: the same rows, the same number for each, in order."""

from collections import Counter

import numpy as np
import pytest
from test_mini_batches import rollouts

from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.micro_batch import MicroBatch, decode_micro_batches
from lockstep.data.mini_batches import TrainingBatch, pack


def batch(ranks: int, budget: int) -> TrainingBatch:
    lengths = [[3, 9, 1], [7, 7, 7], [2, 4, 30], [5, 5, 5], [1, 1, 1]]
    return pack(forest_from_rollouts(rollouts(lengths, [4, 8, 3, 6, 2])), ranks, budget, "block")


def content(row: MicroBatch[np.ndarray]) -> tuple[bytes, ...]:
    columns = (row.tokens, row.lengths, row.parents, row.sources, row.targets, row.index, row.sequences)
    return tuple(np.asarray(each).tobytes() for each in (*columns, *row.fields.values()))


@pytest.mark.parametrize("budget", [33, 60, 500])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("others", [1, 2, 3, 5, 8])
def test_every_row_is_computed_once(ranks: int, others: int, budget: int) -> None:
    made = batch(ranks, budget)
    before = made.everything()
    after = before.spread(others)
    assert (after.ranks, after.targets, after.sequences) == (others, before.targets, before.sequences)
    assert after.microbatches == -(-before.ranks * before.microbatches // others), "as few as possible, equal for all"
    rows = [content(row) for rank in before.by_rank for row in rank]
    found = [content(row) for rank in after.by_rank for row in rank]
    empty = [row for rank in after.by_rank for row in rank if (row.index < 0).all()]
    assert all(row.tokens.size == row.targets.size == 1 and row.fields["weight"] == 0 for row in empty)
    assert Counter(rows) <= Counter(found)
    for one, encoded in zip(after.by_rank, after.encode(), strict=True):
        for row, decoded in zip(one, decode_micro_batches(encoded), strict=True):
            assert row.tokens.tobytes() == decoded.tokens.tobytes()


def test_values_return_to_their_targets() -> None:
    made = batch(2, 60)
    after = made.everything().spread(3)
    values = [[row.index.astype(np.float32) for row in rank] for rank in after.by_rank]
    made.set_field("reference_logprob", after, values)
    assert (made.fields["reference_logprob"] == np.arange(made.targets)).all()


def test_ranks_compute_rows_of_similar_cost_at_the_same_time() -> None:
    """The planner puts the costly rows of every rank first; that order is kept."""
    before = batch(4, 33).everything()
    sizes = [[row.tokens.size for row in rank] for rank in before.spread(2).by_rank]
    by_turn = [row.tokens.size for turn in zip(*before.by_rank, strict=True) for row in turn]
    assert [size for turn in zip(*sizes, strict=True) for size in turn] == by_turn
    assert before.spread(4) is before


def test_another_packing_has_the_same_targets() -> None:
    made = batch(2, 60)
    single = made.everything("single")
    assert single.microbatches > made.everything().microbatches
    assert sorted(single.columns.index[single.columns.index >= 0].tolist()) == list(range(made.targets))
