"""Conversations as trees: a shared turn is one segment with one term per completion."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_packing import forest_of, trees_of
from test_mini_batches import observed
from turn_samples import TURNS, conversation, conversations

from lockstep.config.algorithm import PPOClip
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Completion, Group, PlacedImage, Prompt, Rollouts

MODES = ("forest", "block", "single")


def expected(rollouts: Rollouts, advantages: np.ndarray) -> list[tuple[object, ...]]:
    """Returns (sequence, token, context, advantage, log-probability) of the tokens that the model wrote."""
    found = []
    size = len(rollouts.groups[0].completions)
    for g, group in enumerate(rollouts.groups):
        for k, each in enumerate(group.completions):
            whole = [*group.prompt.tokens.tolist(), *each.tokens.tolist()]
            for i in np.flatnonzero(each.mask):
                context = tuple(whole[: len(group.prompt.tokens) + i])
                values = (float(advantages[g, k]), float(each.logprobs[i]))
                found.append((g * size + k, int(each.tokens[i]), context, *values))
    return sorted(found)


@settings(max_examples=60, deadline=None)
@given(conversations(), st.sampled_from(MODES), st.integers(1, 3), st.integers(0, 30), st.integers(0, 2**16))
def test_the_models_tokens_are_targets_once_per_completion(rollouts, mode, ranks, slack, seed) -> None:
    advantages = np.random.default_rng(seed).normal(size=(2, 4)).astype(np.float32)
    longest = max(3 + len(each.tokens) for group in rollouts.groups for each in group.completions)
    batch = pack(forest_from_rollouts(rollouts, advantages), ranks, longest + slack, mode)
    seen = observed(batch.everything())
    assert sorted((s, token, context, *values[:2]) for _, s, token, context, values in seen) == expected(
        rollouts, advantages
    )


@settings(max_examples=30, deadline=None)
@given(conversations())
def test_weights_count_what_the_model_wrote(rollouts) -> None:
    lengths = np.array([each.generated for group in rollouts.groups for each in group.completions])
    batch = pack(forest_from_rollouts(rollouts, np.ones((2, 4))), 1, 500)
    for aggregation, wanted in {
        "token-mean": np.repeat(1 / lengths.sum(), lengths.size),
        "seq-mean-token-mean": 1 / lengths / lengths.size,
    }.items():
        (minibatch,) = batch.minibatches(objective=PPOClip(aggregation=aggregation))
        for row in (row for rank in minibatch.by_rank for row in rank):
            np.testing.assert_allclose(row.fields["weight"], wanted[row.sequences], rtol=1e-5)


def test_shared_turns_are_computed_once() -> None:
    random = np.random.default_rng(0)
    turns = [([(0, 0), (1, 1)], 0), ([(0, 0), (1, 1)], 3), ([(0, 0)], 2), ([(1, 0)], 0)]
    completions = [conversation(str(k), said, last, random) for k, (said, last) in enumerate(turns)]
    rollouts = Rollouts(0, 0, [Group(Prompt("0:0", 0, np.array([9, 9], np.int32), ""), completions)])
    (tree,) = trees_of(forest_from_rollouts(rollouts, np.arange(4.0)[None]))
    assert [(s.tokens.tolist(), s.parent, s.sequences) for s in tree.segments] == [
        ([9, 9], -1, ()),
        ([5, 1], 0, (0, 1, 2)),
        ([5, 6, 2, 3], 1, (0, 1)),
        (TURNS[0], 2, (0,)),
        (TURNS[3], 2, (1,)),
        (TURNS[2], 1, (2,)),
        ([5, 6, 1, 5], 0, (3,)),
    ]
    forest_of([tree])  # accepts it again
    assert tree.segments[1].fields["advantage"][:, 0].tolist() == [0, 1, 2]  # the model wrote the first token


def test_equal_completions_are_one_segment() -> None:
    random = np.random.default_rng(0)
    completions = [conversation(str(k), [(0, 0)], 1, random) for k in range(3)]
    rollouts = Rollouts(0, 0, [Group(Prompt("0:0", 0, np.array([9], np.int32), ""), completions)])
    (tree,) = trees_of(forest_from_rollouts(rollouts, np.zeros((1, 3))))
    assert len(tree.segments) == 2 and tree.samples == 3
    assert pack(forest_of([tree]), 1, 100).targets == 3 * 3


def test_a_mask_that_does_not_fit_is_refused() -> None:
    completion = conversation("r7", [(0, 0)], 1, np.random.default_rng(0))
    completion.mask = completion.mask[:-1]
    rollouts = Rollouts(0, 0, [Group(Prompt("0:0", 0, np.array([9], np.int32), ""), [completion])])
    with pytest.raises(ValueError, match=r"r7.*mask"):
        forest_from_rollouts(rollouts)


def pictured(request: str, digest: str, last: int = 1) -> Completion:
    made = conversation(request, [(0, 1), (1, 1)], last, np.random.default_rng(0))
    made.images = [PlacedImage(digest, np.array([1, 2], np.int32)), PlacedImage("b" * 8, np.array([6], np.int32))]
    return made


@pytest.mark.parametrize("mode", MODES)
def test_images_of_an_answer_are_at_its_places_in_every_row(mode) -> None:
    prompt = Prompt("0:0", 0, np.array([9, 9, 9], np.int32), "", images=[PlacedImage("c" * 8, np.array([1], np.int32))])
    completions = [pictured("0", "a" * 8), pictured("1", "a" * 8, last=3), pictured("2", "d" * 8)]
    rollouts = Rollouts(0, 0, [Group(prompt, completions)])
    batch = pack(forest_from_rollouts(rollouts), 1, 500, mode).everything()
    rows = batch.by_rank[0]
    shown = sorted(image.digest[0] for row in rows for image in row.images)
    # The third completion begins with the same tokens as the others, and another picture.
    assert shown == sorted("cabdb" if mode == "forest" else "cabcabcdb")
    for row in rows:
        for image in row.images:
            expected = {"a": [2, 3], "d": [2, 3], "b": [3], "c": [9]}[image.digest[0]]
            assert row.tokens[image.places].tolist() == expected


def test_images_among_the_models_own_tokens_are_refused() -> None:
    completion = pictured("r7", "a" * 8)
    completion.images[1].places += 1
    rollouts = Rollouts(0, 0, [Group(Prompt("0:0", 0, np.array([9], np.int32), ""), [completion])])
    with pytest.raises(ValueError, match=r"r7.* places 7 to 7, which are not all among the tokens of an environment"):
        forest_from_rollouts(rollouts)


@settings(max_examples=60, deadline=None)
@given(conversations(), st.sampled_from(MODES), st.integers(1, 3), st.integers(0, 30))
def test_no_sequence_is_cut(rollouts, mode, ranks, slack) -> None:
    """Values that depend on all tokens of a completion (GSPO's ratio) can be computed within its row."""
    longest = max(3 + len(each.tokens) for group in rollouts.groups for each in group.completions)
    batch = pack(forest_from_rollouts(rollouts), ranks, longest + slack, mode)
    rows = [row for rank in batch.everything().by_rank for row in rank]
    owners = [set(row.sequences[row.index >= 0].tolist()) for row in rows]
    assert sum(map(len, owners)) == len(set().union(*owners)) == 8
