"""Rows for ranks of unequal speed: all targets once with their values, work in proportion to the speeds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_packing import forest_of
from test_mini_batches import MODES, longest, observed, random_trees, rollouts

from lockstep.data.arrangement.rank_arrangement import SLOWEST, arrange_by_speed, normalised_speeds
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.mini_batches import pack


@settings(max_examples=120, deadline=None)
@given(
    random_trees(), st.lists(st.floats(0.01, 10), min_size=1, max_size=4), st.integers(0, 40), st.sampled_from(MODES)
)
def test_the_targets_and_their_values_are_those_of_equal_ranks(trees, speeds, slack, mode) -> None:
    ranks, budget = len(speeds), longest(trees) + slack
    equal = pack(forest_of(trees), ranks, budget, mode).everything()
    made = pack(forest_of(trees), ranks, budget, mode, speeds=speeds).everything()
    assert observed(made) == observed(equal), "the sum over targets, and so the objective and its gradient"
    assert {len(rank) for rank in made.by_rank} == {made.microbatches}, "the schedule of collectives"
    assert all(row.tokens.size <= budget for rank in made.by_rank for row in rank)
    assert made.cost.shape == made.tokens_of_ranks.shape == (ranks,)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=40, max_size=120),
    st.lists(st.floats(0.2, 1), min_size=2, max_size=5),
    st.integers(50, 400),
)
def test_work_is_in_proportion_to_speed(sizes, speeds, budget) -> None:
    tokens = np.array(sizes)
    found = arrange_by_speed(tokens, tokens.astype(np.float64), len(speeds), budget, np.array(speeds))
    loads = np.bincount(found.row, tokens, len(speeds) * found.microbatches).reshape(len(speeds), -1)
    times = loads / np.array(speeds)[:, None]
    assert loads.max() <= budget
    assert found.duration == pytest.approx(times.max(axis=0).sum())
    ideal = tokens.sum() / sum(speeds)
    # each micro-batch may miss the ideal by about one piece, or be full
    full = len(speeds) * found.microbatches * budget < tokens.sum() * 1.3
    assert full or found.duration <= ideal + found.microbatches * 50 / min(speeds)


def test_a_rank_of_half_the_speed_gets_half_the_tokens() -> None:
    lengths = [[20] * 4 for _ in range(30)]
    made = pack(forest_from_rollouts(rollouts(lengths, [10] * 30)), 2, 2048, "block", speeds=[1.0, 0.5]).everything()
    share = made.tokens_of_ranks[1] / made.tokens_of_ranks.sum()
    assert share == pytest.approx(1 / 3, abs=0.02)


def test_an_arrangement_is_a_function_of_its_arguments() -> None:
    lengths = [[3, 9, 1], [7, 7, 7], [2, 4, 30], [5, 5, 5], [1, 1, 1]]
    made = [
        pack(
            forest_from_rollouts(rollouts(lengths, [4, 8, 3, 6, 2])), 3, 60, "forest", speeds=[1, 0.3, 0.7]
        ).everything()
        for _ in range(2)
    ]
    assert made[0].columns.tokens.tobytes() == made[1].columns.tokens.tobytes()
    assert (made[0].token_bounds == made[1].token_bounds).all()


def test_speeds_are_relative_and_bounded() -> None:
    assert normalised_speeds(None, 3) is None and normalised_speeds([2, 2], 2) is None
    assert normalised_speeds([4.0, 2.0, 0.001], 3).tolist() == [1.0, 0.5, SLOWEST]  # type: ignore[union-attr]
    for wrong in ([1.0], [1.0, 0.0], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="expected one positive number for each of 2 ranks"):
            normalised_speeds(wrong, 2)
