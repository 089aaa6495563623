"""The completions that recipes choose by their rewards."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.forest_builder import forest_from_pairs, forest_from_rollouts
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Completion, Group, Pair, PlacedImage, Prompt, Rollouts
from lockstep.recipes.chosen_completions import (
    best_and_worst,
    best_completions,
    choice_statistics,
    minibatches_of_pairs,
    pair_statistics,
)


def completion(number: int, mask: list[bool] | None, finish: Any = "stop") -> Completion:
    size = 3 if mask is None else len(mask)
    tokens = np.arange(10 * number, 10 * number + size, dtype=np.int32)
    own = None if mask is None else np.array(mask, np.bool_)
    return Completion(f"r{number}", tokens, np.zeros(size, np.float32), np.zeros(size, np.int32), finish, "", own)


def group(
    rewards: list[float], masks: list[list[bool] | None] | None = None, finish: list[str] | None = None, number: int = 0
) -> Group:
    """A group whose completions have different tokens."""
    every = masks or [None] * len(rewards)
    ends = finish or ["stop"] * len(rewards)
    completions = [completion(k + 1, mask, end) for k, (mask, end) in enumerate(zip(every, ends, strict=True))]
    prompt = Prompt(f"0:{number}", number, np.array([100, 101], np.int32), "")
    return Group(prompt, completions, np.array(rewards, np.float32))


def rollouts(*groups: Group) -> Rollouts:
    return Rollouts(0, 0, list(groups))


REWARDS = st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=6)


@given(st.lists(REWARDS, min_size=1, max_size=5))
def test_a_pair_is_the_first_best_and_the_first_worst_completion(every: list[list[float]]) -> None:
    groups = [group(rewards, number=number) for number, rewards in enumerate(every)]
    for each, rewards, pair in zip(groups, every, best_and_worst(rollouts(*groups)), strict=True):
        if len(set(rewards)) == 1:
            assert pair is None
            continue
        assert pair is not None and pair.uid == each.prompt.uid
        best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
        assert pair.chosen is each.completions[best].tokens and pair.rejected is each.completions[worst].tokens
        assert pair.margin == max(rewards) - min(rewards) > 0


@given(REWARDS, st.integers(1, 6), st.sampled_from([None, -1.0, 0.5, 2.0]), st.data())
def test_the_best_completions(rewards: list[float], best_k: int, lowest: float | None, data: st.DataObject) -> None:
    """They are as many as possible, none is worse than one that was left out, and of equal ones the first are taken."""
    ends = data.draw(st.lists(st.sampled_from(["stop", "length"]), min_size=len(rewards), max_size=len(rewards)))
    masked = data.draw(st.booleans())
    (found,) = best_completions(rollouts(group(rewards, finish=ends)), best_k, lowest, masked).tolist()
    allowed = [
        (lowest is None or reward >= lowest) and not (masked and end == "length")
        for reward, end in zip(rewards, ends, strict=True)
    ]
    assert sum(found) == min(best_k, sum(allowed))
    assert all(allowed[k] for k, taken in enumerate(found) if taken)
    for k, taken in enumerate(found):
        for other, left in enumerate(found):
            if taken and allowed[other] and not left:
                assert (rewards[k], -k) > (rewards[other], -other)


def test_rewards_are_compared_with_the_limit_as_they_are_rounded() -> None:
    assert float(np.float32(0.7)) < 0.7
    assert best_completions(rollouts(group([0.7, 0.6])), 2, 0.7).tolist() == [[True, False]]


def test_what_the_model_did_not_write_is_in_no_pair() -> None:
    """The best one has only tokens of the environment, and the worst one no tokens at all."""
    made = group([3.0, 2.0, 1.0, 0.0], [[False, False], [True, False], None, []])
    (pair,) = best_and_worst(rollouts(made))
    assert pair is not None and pair.chosen_mask is not None
    assert (pair.chosen.tolist(), pair.chosen_mask.tolist(), pair.rejected_mask) == ([20, 21], [True, False], None)
    assert best_completions(rollouts(made), 4).tolist() == [[False, True, True, False]]
    assert best_and_worst(rollouts(group([1.0, 0.0], [[], []]))) == [None]
    same = group([1.0, 0.0])
    same.completions[1].tokens = same.completions[0].tokens.copy()
    assert best_and_worst(rollouts(same)) == [None], "nothing is learned from a pair of equal completions"
    unscored = group([1.0])
    unscored.rewards = None
    with pytest.raises(ValueError, match="group '0:0' is not scored"):
        best_and_worst(rollouts(unscored))


def test_a_pair_of_conversations_learns_what_the_model_wrote() -> None:
    made = group([1.0, 0.0], [[True, False, True], [True, True, False, False, True]])
    (pair,) = best_and_worst(rollouts(made))
    assert pair is not None
    batch = pack(forest_from_pairs([pair]), 1, 64)
    (row,) = batch.everything().by_rank[0]
    assert row.tokens.size == 2 + 3 + 5, "all are read"
    targets = {s: row.targets[row.sequences == s].tolist() for s in (0, 1)}
    assert targets == {0: [10, 12], 1: [20, 21, 24]}


def test_only_chosen_completions_are_built() -> None:
    made = rollouts(group([1.0, 0.0, 0.5]), group([0.0, 0.0, 0.0], number=1))
    chosen = best_completions(made, 2, 0.5)
    batch = pack(forest_from_rollouts(made, chosen=chosen), 1, 64)
    assert sorted(set(batch.sequences.tolist())) == [0, 2]
    (minibatch,) = batch.minibatches()
    assert minibatch.columns.tokens.size == 2 + 3 + 3, "a group without a chosen one costs nothing"
    found = list(batch.minibatches(1, 3, seed=0))
    assert sorted(each.sequences for each in found) == [0, 2], "an optimizer step has groups, chosen or not"


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 3), st.integers(1, 5), st.integers(0, 99))
def test_every_pair_is_in_one_optimizer_step_of_each_epoch(
    present: list[bool], epochs: int, groups: int, seed: int
) -> None:
    empty = np.zeros(0, np.int32)
    pairs = [Pair(str(n), n, empty, empty, empty) if each else None for n, each in enumerate(present)]
    expected = [pair.row for pair in pairs if pair is not None]
    steps = [[pair.row for pair in step] for step in minibatches_of_pairs(pairs, epochs, groups, seed)]
    assert all(steps) and all(len(step) <= groups and step == sorted(step) for step in steps)
    assert sorted(row for step in steps for row in step) == sorted(expected * epochs)
    assert len(steps) <= epochs * -(-len(pairs) // groups)
    whole = list(minibatches_of_pairs(pairs, epochs, None, seed))
    assert [[pair.row for pair in step] for step in whole] == ([expected] * epochs if expected else [])


def test_statistics() -> None:
    made = rollouts(group([1.0, 0.25], [[True, False], [True, True, True]]), group([0.5, 0.5], number=1))
    pairs = best_and_worst(made)
    assert pair_statistics(pairs) == {
        "pairs/count": 1.0, "pairs/reward_margin": 0.75, "pairs/chosen_length_mean": 1.0,
        "pairs/rejected_length_mean": 3.0,
    }  # fmt: skip
    assert pair_statistics([None, None]) == {"pairs/count": 0.0}
    chosen = best_completions(made)
    assert choice_statistics(made, chosen) == {
        "chosen/count": 2.0, "chosen/reward_mean": 0.75, "chosen/length_mean": 2.0,
    }  # fmt: skip
    assert choice_statistics(made, ~chosen & chosen) == {"chosen/count": 0.0}


def test_a_pair_keeps_the_images_of_its_prompt_and_of_the_answers() -> None:
    one = group([1.0, 0.0, 0.5], [[True, False, True]] * 3)
    one.prompt.images = [PlacedImage("a" * 8, np.array([0], np.int32))]
    for completed, digest in zip(one.completions, "bcd", strict=True):
        completed.images = [PlacedImage(digest * 8, np.array([1], np.int32))]
    (pair,) = best_and_worst(rollouts(one))
    (row,) = pack(forest_from_pairs([pair]), 1, 100).everything().by_rank[0]
    assert [(image.digest[0], image.places.tolist()) for image in row.images] == [("a", [0]), ("b", [3]), ("c", [6])]
    assert row.tokens.tolist() == [100, 101, 10, 11, 12, 20, 21, 22]
    # Two completions with the same tokens differ by what the model saw.
    one.completions[1].tokens = one.completions[0].tokens
    assert best_and_worst(rollouts(one))[0] is not None
    one.completions[1].images = one.completions[0].images
    assert best_and_worst(rollouts(one)) == [None]
