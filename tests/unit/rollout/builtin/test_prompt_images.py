"""Images in the engine's caches and batches: which prefixes are shared, spans, positions, attention."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.samples import PlacedImage
from lockstep.rollout.builtin.forward_batch import PrefillBatch
from lockstep.rollout.builtin.kv_cache import CachedSequence, KVCache, PrefixCache
from lockstep.rollout.builtin.prompt_images import MergedImages, decode_offset, image_spans

PLACEHOLDER = 9


def image(first: int, count: int, digest: str = "a" * 8) -> PlacedImage:
    return PlacedImage(digest, np.arange(first, first + count, dtype=np.int32))


@st.composite
def sequences(draw: st.DrawFn) -> tuple[np.ndarray, list[PlacedImage]]:
    """Text and images; a placeholder token may also be text."""
    tokens: list[int] = []
    images = []
    for _ in range(draw(st.integers(1, 4))):
        tokens += draw(st.lists(st.sampled_from([1, PLACEHOLDER]), min_size=1, max_size=3))
        if draw(st.booleans()):
            count = draw(st.integers(1, 3))
            images.append(image(len(tokens), count, draw(st.sampled_from(["a" * 8, "b" * 8]))))
            tokens += [PLACEHOLDER] * count
    return np.array([*tokens, 1]), images


def inputs(tokens: np.ndarray, images: list[PlacedImage]) -> list[object]:
    """What the model gets for each token: an id, or a feature of an image."""
    found: list[object] = tokens.tolist()
    for each in images:
        for number, place in enumerate(each.places.tolist()):
            found[place] = (each.digest, number, len(each.places))
    return found


@given(sequences(), sequences())
def test_a_shared_prefix_is_equal_and_has_whole_images(
    one: tuple[np.ndarray, list[PlacedImage]], other: tuple[np.ndarray, list[PlacedImage]]
) -> None:
    kept = CachedSequence(*one, {})
    length = kept.shared_tokens(*other)
    assert inputs(*one)[:length] == inputs(*other)[:length]
    for each in [*one[1], *other[1]]:
        assert not each.places[0] < length <= each.places[-1]
    same = [a == b for a, b in zip(inputs(*one), inputs(*other), strict=False)]
    longest = same.index(False) if False in same else len(same)
    starts = [int(each.places[0]) for each in [*one[1], *other[1]] if each.places[0] < longest <= each.places[-1]]
    assert length == min([longest, *starts])
    assert CachedSequence(*one, {}).shared_tokens(*one) == len(one[0])


def test_the_cache_finds_the_sequence_with_the_same_image() -> None:
    cache, tokens = PrefixCache(), np.array([1] * 16 + [PLACEHOLDER] * 4 + [2] * 4)
    for digest in ("a" * 8, "b" * 8):
        cache.keep(tokens, {0: (torch.zeros(1), torch.zeros(1))}, 100, [image(16, 4, digest)])
    assert len(cache) == 2
    assert cache.find(tokens, [image(16, 4, "b" * 8)])[1] == 24
    assert cache.find(tokens, [image(16, 4, "c" * 8)])[1] == 16
    assert cache.find(tokens)[1] == 16
    cache.keep(np.append(tokens, 3), {}, 100, [image(16, 4, "b" * 8)])
    assert len(cache) == 2  # in place of the one that it continues


def test_spans_are_runs_of_adjacent_places() -> None:
    tiles = PlacedImage("a" * 8, np.array([1, 2, 4, 5], np.int32))
    assert image_spans([tiles, image(7, 2)], 10).tolist() == [-1, 0, 0, -1, 1, 1, -1, 2, 2, -1]
    assert image_spans([], 3).tolist() == [-1, -1, -1]


def test_the_offset_follows_from_the_last_position() -> None:
    positions = np.array([[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]])
    assert decode_offset(positions) == -2
    assert decode_offset(None) == 0


def test_features_replace_embeddings_and_deepstack_is_added_after_its_layer() -> None:
    merged = MergedImages(torch.tensor([1, 3]), torch.full((2, 2), 5.0), [torch.ones(2, 2)])
    x = torch.zeros(4, 2)
    merged.merge(x)
    assert x[:, 0].tolist() == [0, 5, 0, 5]
    merged.add_deepstack(1, x)
    assert x[:, 0].tolist() == [0, 5, 0, 5]
    merged.add_deepstack(0, x)
    assert x[:, 0].tolist() == [0, 6, 0, 6]
    assert merged.decoder_arguments(4)["visual_pos_masks"].tolist() == [[False, True, False, True]]


@given(st.data())
def test_attention_inside_spans_has_two_directions(data: st.DataObject) -> None:
    """Against the masked softmax of each prompt alone, with a window, and with prompts whose beginning is cached."""
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    window = data.draw(st.none() | st.integers(2, 6))
    spans = []
    for length in lengths:
        first = data.draw(st.integers(0, length - 1))
        spans.append(image_spans([image(first, data.draw(st.integers(1, length - first)))], length))
    torch.manual_seed(0)
    total = sum(lengths)
    q, k, v = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
    cache = KVCache()
    cache.reserve(len(lengths), max(lengths), 1, 1)
    starts = [
        data.draw(st.sampled_from([0, *(n for n in range(1, len(s)) if s[n] < 0 or s[n] != s[n - 1])])) for s in spans
    ]
    if any(starts):  # the beginnings were computed before
        whole = PrefillBatch(cache, 0, [0] * len(lengths), lengths, torch.device("cpu"), spans)
        whole.store(0, k, v)
    edges = np.cumsum([0, *lengths])
    part = np.concatenate([np.arange(edges[n] + start, edges[n + 1]) for n, start in enumerate(starts)])
    rest = [length - start for length, start in zip(lengths, starts, strict=True)]
    batch = PrefillBatch(cache, 0, starts, rest, torch.device("cpu"), spans)
    found = batch.attend(0, q[part], k[part], v[part], 0.3, window)
    expected = []
    for number, length in enumerate(lengths):
        own = slice(edges[number], edges[number + 1])
        token, span = torch.arange(length), torch.from_numpy(spans[number])
        visible = (token <= token[:, None]) | ((span == span[:, None]) & (span >= 0))
        if window is not None:
            visible &= token > token[:, None] - window
        keys, values = (x[own].repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
        scores = (q[own].transpose(0, 1) @ keys.transpose(1, 2)) * 0.3
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        expected.append((weights @ values).transpose(0, 1)[starts[number] :])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)
