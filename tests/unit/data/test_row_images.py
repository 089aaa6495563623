"""Images keep their places: in each row of each packing, an image's places hold the tokens that they hold in the
prompt, and a row has one copy of the images for each copy of the prompt."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.forest import Forest, Segment
from lockstep.data.forest_builder import (
    forest_from_documents,
    forest_from_labelled,
    forest_from_pairs,
    forest_from_rollouts,
    forest_of_scored_pairs,
    forest_of_states,
)
from lockstep.data.micro_batch import MicroBatch, MiniBatch, decode_micro_batches
from lockstep.data.mini_batches import pack
from lockstep.data.packing import plan_packing
from lockstep.data.samples import (
    Completion,
    Document,
    Group,
    LabelledCompletion,
    Pair,
    PlacedImage,
    Prompt,
    Rollouts,
)

STRIDE = 1000
"""Token ids of sample n are from n * STRIDE on, each once, so that a token says which sample it is of."""
ANSWER = 500


def prompt_of(number: int, size: int, images: list[list[int]]) -> Prompt:
    """A prompt of ascending ids. Each image has the given places."""
    tokens = np.arange(number * STRIDE + 1, number * STRIDE + 1 + size, dtype=np.int32)  # empty rows have a token 0
    placed = [
        PlacedImage(f"{number:06d}{n:02d}", np.asarray(places, np.int32), f"{number}/{n}.png", (8, 9), (16, 18))
        for n, places in enumerate(images)
    ]
    return Prompt(f"0:{number}", number, tokens, "", images=placed)


@st.composite
def prompts(draw: st.DrawFn, number: int) -> Prompt:
    size = draw(st.integers(2, 20))
    places = sorted(draw(st.sets(st.integers(0, size - 1), max_size=size)))
    cut = draw(st.integers(0, len(places)))
    images = [each for each in (places[:cut], places[cut:]) if each]
    return prompt_of(number, size, images)


def completion_of(number: int, k: int, size: int, masked: bool) -> Completion:
    first = number * STRIDE + ANSWER + 20 * k
    tokens = np.arange(first, first + size, dtype=np.int32)
    mask = np.arange(size) % 3 != 1 if masked else None
    zeros = np.zeros(size, np.float32)
    return Completion(f"{number}-{k}", tokens, zeros, zeros.astype(np.int32), "stop", "", mask)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollouts:
    size, masked = draw(st.integers(1, 4)), draw(st.booleans())
    groups = []
    for number in range(draw(st.integers(1, 5))):
        sizes = [draw(st.integers(1, 12)) for _ in range(size)]
        completions = [completion_of(number, k, each, masked) for k, each in enumerate(sizes)]
        groups.append(Group(draw(prompts(number)), completions))
    return Rollouts(0, 0, groups)


def rows_of(batch: MiniBatch) -> list[MicroBatch[np.ndarray]]:
    return [row for rank in batch.by_rank for row in rank]


def check(rows: list[MicroBatch[Any]], images: dict[str, tuple[np.ndarray, PlacedImage]]) -> set[str]:
    """Checks the images of rows against those of the samples: by digest, the sample's tokens and the image there.
    Returns which images are in a row."""
    found = set()
    for row in rows:
        tokens = np.asarray(row.tokens)
        for image in row.images or ():
            own, original = images[image.digest]
            np.testing.assert_array_equal(tokens[image.places], own[original.places])
            about = (image.source, image.size, image.resized)
            assert about == (original.source, original.size, original.resized)
            found.add(image.digest)
        for digest, (own, original) in images.items():
            copies = int(np.count_nonzero(tokens == own[original.places[0]]))
            held = [image.places.tolist() for image in row.images or () if image.digest == digest]
            assert len(held) == copies, "one copy of the image for each copy of the prompt"
            assert len(set(map(tuple, held))) == copies
        starts = [image.places[0] for image in row.images or ()]
        assert starts == sorted(starts) or len({image.digest[:6] for image in row.images or ()}) > 1
    return found


def images_of(samples: list[Any], name: str = "tokens") -> dict[str, tuple[np.ndarray, PlacedImage]]:
    return {image.digest: (getattr(each, name), image) for each in samples for image in each.images}


@settings(max_examples=120, deadline=None)
@given(rollouts(), st.integers(1, 3), st.integers(0, 40), st.sampled_from(["forest", "block", "single"]))
def test_images_of_prompts(given_rollouts: Rollouts, ranks: int, spare: int, mode: Any) -> None:
    longest = max(g.prompt.tokens.size + c.tokens.size for g in given_rollouts.groups for c in g.completions)
    advantages = np.ones((len(given_rollouts.groups), len(given_rollouts.groups[0].completions)))
    expected = images_of([group.prompt for group in given_rollouts.groups])
    for forest in (forest_from_rollouts(given_rollouts, advantages), forest_of_states(given_rollouts)):
        assert (forest.images is None) == (not expected)
        batch = pack(forest, ranks, longest + 1 + spare, mode).everything()
        assert check(rows_of(batch), expected) == set(expected)
        decoded = [row for encoded in batch.encode() for row in decode_micro_batches(encoded)]
        assert check(decoded, expected) == set(expected)
        for other in (1, 2, 5):
            assert check(rows_of(batch.spread(other)), expected) == set(expected)
        device = [row.to(torch.device("cpu")) for row in decoded]
        assert check(device, expected) == set(expected)


def test_a_cut_tree_has_the_images_in_each_piece() -> None:
    prompt = prompt_of(0, 10, [[2, 3, 4], [7, 8]])
    group = Group(prompt, [completion_of(0, k, 10, False) for k in range(4)])
    forest = forest_from_rollouts(Rollouts(0, 0, [group]), np.ones((1, 4)))
    batch = pack(forest, 2, 30).everything()
    assert [[image.places.tolist() for image in row.images] for row in rows_of(batch)] == [[[2, 3, 4], [7, 8]]] * 2


@pytest.mark.parametrize("mode", ["forest", "block"])
def test_images_of_documents_and_pairs(mode: Any) -> None:
    drawn = [prompt_of(n, 8 + n, [[1, 2], [5 + n]] if n != 1 else []) for n in range(3)]
    ends = [np.arange(n * STRIDE + ANSWER, n * STRIDE + ANSWER + 4, dtype=np.int32) for n in range(3)]
    masks = [np.arange(each.tokens.size) > 5 + n for n, each in enumerate(drawn)]
    documents = [Document(p.uid, p.row, p.tokens, mask, p.images) for p, mask in zip(drawn, masks, strict=True)]
    pairs = [Pair(p.uid, p.row, p.tokens, end, end + 100, images=p.images) for p, end in zip(drawn, ends, strict=True)]
    labelled = [
        LabelledCompletion(p.uid, p.row, p.tokens, end, True, p.images) for p, end in zip(drawn, ends, strict=True)
    ]
    for forest in (
        forest_from_documents(documents), forest_from_pairs(pairs), forest_from_pairs(pairs, learn_prompts=True),
        forest_of_scored_pairs(pairs), forest_from_labelled(labelled, mismatched=True),
    ):  # fmt: skip
        rows = rows_of(pack(forest, 2, 60, mode).everything())
        assert check(rows, images_of(drawn)) == set(images_of(drawn))


def test_features_are_no_targets_where_prompts_are_learned() -> None:
    prompt = prompt_of(0, 8, [[2, 3]])
    end = np.arange(ANSWER, ANSWER + 3, dtype=np.int32)
    forest = forest_from_pairs([Pair("0:0", 0, prompt.tokens, end, end + 50, images=prompt.images)], learn_prompts=True)
    (row,) = rows_of(pack(forest, 1, 40).everything())
    assert sorted(set(row.targets.tolist()) & set(prompt.tokens.tolist())) == [2, 5, 6, 7, 8]


@pytest.mark.parametrize(("places", "expected"), [([], [None, None]), ([[1, 2]], [["the image"], []])])
def test_a_batch_without_images_sends_none(places: list[list[int]], expected: list[Any]) -> None:
    rollout = Rollouts(0, 0, [Group(prompt_of(0, 4, places), [completion_of(0, 0, 3, False)])])
    batch = pack(forest_from_rollouts(rollout, np.ones((1, 1))), 2, 20).everything()
    decoded = [row for encoded in batch.encode() for row in decode_micro_batches(encoded)]
    for rows in (rows_of(batch), decoded):
        shown = [row.images and ["the image"] for row in rows]
        assert shown == expected or shown == expected[::-1], "the other rank has an empty row"


def test_the_tower_counts_in_the_cost() -> None:
    """Two prompts of equal length: the one with an image costs a token more per feature, once per copy of it."""
    plain, seen = prompt_of(0, 10, []), prompt_of(1, 10, [[1, 2, 3]])
    groups = [Group(each, [completion_of(each.row, k, 5, False) for k in range(2)]) for each in (plain, seen)]
    forest = forest_from_rollouts(Rollouts(0, 0, groups), np.ones((2, 2)))
    for mode, copies in (("forest", 1), ("single", 2)):
        plan = plan_packing(forest, np.arange(2), 1, 100, mode)  # type: ignore[arg-type]
        cost = np.bincount(plan.tree, plan.cost)
        assert cost[1] - cost[0] == 3 * copies


def test_an_image_outside_of_its_segment_is_an_error() -> None:
    image = PlacedImage("00000000", np.asarray([1, 4], np.int32))
    segment = Segment(np.zeros(4, np.int32), images=[image])
    with pytest.raises(ValueError, match="has 4 tokens, but an image at places 1 to 4"):
        Forest.of([[segment]], ["0:0"])
