"""Values that are known per sequence only, given to its targets."""

import numpy as np
import pytest

from lockstep.data.packing import pack
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.data.trees import trees_of_rollouts


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
def test_the_same_as_giving_advantages_at_once(mode) -> None:
    advantages = np.array([[1, -1, 0.5], [2, 0, -2]], np.float32)
    made = rollouts([[3, 1, 2], [2, 0, 4]])
    at_once = pack(trees_of_rollouts(made, advantages), 2, 16, mode)
    later = pack(trees_of_rollouts(made), 2, 16, mode)
    later.set_per_sequence("advantage", advantages.ravel())
    np.testing.assert_array_equal(later.fields["advantage"], at_once.fields["advantage"])
    (first,), (second,) = list(at_once.minibatches()), list(later.minibatches())
    for rows, others in zip(first.ranks, second.ranks, strict=True):
        for row, other in zip(rows, others, strict=True):
            assert row.fields.keys() == other.fields.keys()
            for name in row.fields:
                np.testing.assert_array_equal(row.fields[name], other.fields[name])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (np.zeros(5), "expected one for each of 6"),
        (np.zeros((2, 3)), "expected one for each of 6"),
        (np.array([0, 0, np.nan, 0, 0, 0]), "not finite for sequence 2"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: np.ndarray, words: str) -> None:
    batch = pack(trees_of_rollouts(rollouts([[1, 1, 1], [1, 1, 1]])), 1, 64)
    with pytest.raises(ValueError, match=words):
        batch.set_per_sequence("advantage", values)


def test_weights_cannot_be_set() -> None:
    batch = pack(trees_of_rollouts(rollouts([[1]])), 1, 64)
    with pytest.raises(ValueError, match="aggregation"):
        batch.set_per_sequence("weight", np.ones(1))
