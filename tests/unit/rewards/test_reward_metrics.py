"""Metrics against hand-computed values; splitting into batches and joining the scores."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_samples import prompt, rollouts

from lockstep.rewards.reward_metrics import (
    breakdown_metrics,
    checked_exact_match,
    exact_match_rate,
    groups_without_signal,
    pass_at_k,
    reward_metrics,
)
from lockstep.rewards.scorer_pool import cut_batches, term_columns, unscored_groups, with_rewards
from lockstep.rewards.scoring_messages import RewardError, TermScores


def scored():
    made = rollouts([prompt(0, answer="a"), prompt(1, answer="b")], [["a", "x"], ["b", "b"]])
    values = np.array([1.0, 0.0, 0.5, 0.5], np.float32)
    breakdown = {
        "math": np.array([1.0, 0.0, np.nan, 0.5]),
        "math/undecided": np.array([0.0, 0.0, 0.0, 1.0]),
        "none": np.full(4, np.nan),
    }
    return with_rewards(made, values, breakdown)


def test_reward_metrics():
    found = reward_metrics(scored())
    assert found == pytest.approx(
        {
            "reward/mean": 0.5,
            "reward/std": np.sqrt(0.125),
            "reward/min": 0.0,
            "reward/max": 1.0,
            "rollout/groups_without_signal": 0.5,
            "reward/math/mean": 0.5,
            "reward/math/std": np.sqrt((0.5**2 + 0.5**2) / 3),
            "reward/math/undecided": 0.25,
        }
    )


def test_an_extra_value_called_mean_does_not_hide_the_mean_of_the_term():
    made = with_rewards(
        rollouts([prompt()], [["a"]]), np.ones(1, np.float32), {"f/mean": np.array([9.0]), "f": np.array([1.0])}
    )
    assert breakdown_metrics(made.groups, "eval/reward/") == {"eval/reward/f/mean": 1.0, "eval/reward/f/std": 0.0}


def test_metrics_of_unscored_groups_are_refused():
    with pytest.raises(ValueError, match="not scored"):
        reward_metrics(rollouts([prompt()], [["a"]]))
    with pytest.raises(ValueError, match="not scored"):
        groups_without_signal(rollouts([prompt()], [["a"]]))


def test_exact_match():
    assert checked_exact_match(" 12\n", 12) == 1.0
    assert checked_exact_match("1 2", "12") == 0.0
    assert exact_match_rate(scored()) == 0.75
    with pytest.raises(ValueError, match="answer_column"):
        checked_exact_match("1", None)


def test_a_group_that_fits_into_a_batch_is_never_split():
    made = rollouts([prompt(row) for row in range(4)], [["a"] * 3, ["b"] * 3, ["c"] * 7, ["d"]])
    cut = cut_batches(made.groups, 3, 5)
    assert [[sample.text for sample in batch.samples] for batch in cut] == [
        ["a"] * 3,
        ["b"] * 3,
        ["c"] * 5,
        ["c"] * 2 + ["d"],
    ]
    assert [[each.row for each in batch.prompts] for batch in cut] == [[0], [1], [2], [2, 3]]
    assert cut[3].uid(1) == "0:2#6"
    assert cut[3].uid(2) == "0:3#0"
    assert cut[3].single(2).uid(0) == "0:3#0"


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 12))
def test_batches_keep_every_sample_in_order(sizes, limit):
    texts = [[f"{row}.{index}" for index in range(size)] for row, size in enumerate(sizes)]
    made = rollouts([prompt(row) for row in range(len(sizes))], texts)
    cut = cut_batches(made.groups, 0, limit)
    assert all(0 < len(batch) <= limit for batch in cut)
    uids = [batch.uid(position) for batch in cut for position in range(len(batch))]
    assert uids == [f"0:{row}#{index}" for row, size in enumerate(sizes) for index in range(size)]
    assert [s.text for b in cut for s in b.samples] == [text for group in texts for text in group]
    for size, row in zip(sizes, range(len(sizes)), strict=True):
        if 0 < size <= limit:
            assert sum(any(each.row == row for each in batch.prompts) for batch in cut) == 1


def test_extra_values_are_aligned_with_samples():
    scores = [TermScores([1.0, None]), TermScores([0.0], {"acc": [1.0]}), TermScores([2.0], {"length": [5.0]})]
    found = term_columns("f", scores, [2, 1, 1])
    np.testing.assert_equal(found["f"], [1.0, np.nan, 0.0, 2.0])
    np.testing.assert_equal(found["f/acc"], [np.nan, np.nan, 1.0, np.nan])
    np.testing.assert_equal(found["f/length"], [np.nan, np.nan, np.nan, 5.0])


def test_scored_groups_keep_their_rewards():
    first = scored()
    made = rollouts([prompt(5)], [["z", "y", "x"]])
    mixed = type(first)(0, 0, [first.groups[0], made.groups[0], first.groups[1]])
    assert unscored_groups(mixed) == [made.groups[0]]
    done = with_rewards(mixed, np.array([7, 8, 9], np.float32), {"f": np.array([7.0, 8.0, 9.0])})
    assert done.groups[0] is first.groups[0]
    assert done.groups[2] is first.groups[1]
    assert done.groups[1].rewards.tolist() == [7, 8, 9]
    assert made.groups[0].rewards is None


def test_a_reward_error_has_all_details():
    error = RewardError("f.py:f", "raised KeyError: 1", "0:7#2", 7, "x" * 1000, "3 (int)", "Traceback: here")
    text = str(error)
    assert all(part in text for part in ("f.py:f", "raised KeyError", "0:7#2", "row 7", "3 (int)", "Traceback: here"))
    assert len(text) < 600


def test_pass_at_k_is_the_share_of_samples_of_k_completions_that_contain_one_that_passes() -> None:
    passed = np.array([[1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]], float)
    found = pass_at_k(passed)
    assert list(found) == [1, 2, 4, 6]
    for k, value in found.items():
        samples = [max(chosen) for row in passed for chosen in itertools.combinations(row, k)]
        assert value == pytest.approx(np.mean(samples))
