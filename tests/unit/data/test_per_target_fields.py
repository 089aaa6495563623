"""Values that are assigned to targets after the batch was packed."""

import numpy as np
import pytest

from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Completion, Group, Prompt, Rollouts


def rollouts(lengths: list[list[int]]) -> Rollouts:
    def completion(g: int, k: int, length: int) -> Completion:
        tokens = np.arange(length, dtype=np.int32)
        return Completion(f"{g}/{k}", tokens, np.zeros(length, np.float32), np.zeros(length, np.int32), "stop", "")

    groups = [
        Group(
            Prompt(f"0:{g}", g, np.array([1, 2], np.int32), "p"),
            [completion(g, k, length) for k, length in enumerate(row)],
        )
        for g, row in enumerate(lengths)
    ]
    return Rollouts(0, 0, groups)


@pytest.mark.parametrize("mode", ["forest", "block", "single"])
def test_later_advantages_equal_immediate_ones(mode) -> None:
    advantages = np.array([[1, -1, 0.5], [2, 0, -2]], np.float32)
    made = rollouts([[3, 1, 2], [2, 0, 4]])
    at_once = pack(forest_from_rollouts(made, advantages), 2, 16, mode)
    later = pack(forest_from_rollouts(made), 2, 16, mode)
    later.set_per_target("advantage", advantages.ravel()[later.sequences])
    np.testing.assert_array_equal(later.fields["advantage"], at_once.fields["advantage"])
    (first,), (second,) = list(at_once.minibatches()), list(later.minibatches())
    for rows, others in zip(first.by_rank, second.by_rank, strict=True):
        for row, other in zip(rows, others, strict=True):
            assert row.fields.keys() == other.fields.keys()
            for name in row.fields:
                np.testing.assert_array_equal(row.fields[name], other.fields[name])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.zeros(7), "expected one for each of 6"),
        (np.zeros((2, 3)), "expected one for each of 6"),
        (np.array([0, 0, np.nan, 0, 0, 0]), "not finite for sequence 2"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: np.ndarray, words: str) -> None:
    batch = pack(forest_from_rollouts(rollouts([[1, 1, 1], [1, 1, 1]])), 1, 64)
    with pytest.raises(ValueError, match=words):
        batch.set_per_target("advantage", values)


def test_weights_cannot_be_set() -> None:
    batch = pack(forest_from_rollouts(rollouts([[1]])), 1, 64)
    with pytest.raises(ValueError, match="aggregation"):
        batch.set_per_target("weight", np.ones(1))


def test_truncated_completions_may_be_left_out() -> None:
    made = rollouts([[3, 1], [2, 4]])
    for g, k in ((0, 1), (1, 0), (1, 1)):
        made.groups[g].completions[k].finish = "length"
    batch = pack(forest_from_rollouts(made, mask_truncated=True), 2, 16)
    assert batch.sequences.tolist() == [0, 0, 0]
    (minibatch,) = batch.minibatches()
    assert (minibatch.targets, minibatch.sequences) == (3, 1)
    tokens = sum(row.tokens.size for rank in minibatch.by_rank for row in rank)
    assert tokens == 5 + 1, "the prompt and the one completion, and an empty row: what is left out costs nothing"

    made.groups[0].completions[0].finish = "length"
    batch = pack(forest_from_rollouts(made, mask_truncated=True), 2, 16)
    batch.set_per_target("advantage", np.zeros(0))
    (minibatch,) = batch.minibatches()
    assert minibatch.targets == 0 and [len(rank) for rank in minibatch.by_rank] == [1, 1]
