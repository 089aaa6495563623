"""Groups of requests in messages, and which requests with images are refused."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cluster.rpc.codec import decode_payload, encode_payload, signature_of
from lockstep.data.samples import Completion, PlacedImage
from lockstep.rollout.engine_protocol import (
    CompletionBatch,
    EngineAPI,
    Request,
    RequestGroup,
    check_request,
    prompt_key,
)
from lockstep.rollout.errors import BadRequest


def image(*places: int, digest: str = "0123456789abcdef") -> PlacedImage:
    return PlacedImage(digest, np.array(places, np.int32), "photo.png", (40, 30), (32, 28))


def request(id: str, prompt: np.ndarray, images: tuple[PlacedImage, ...] = (), **fields: Any) -> Request:
    return Request(id, "g", prompt, seed=1, images=images, **fields)


def sent(requests: list[Request]) -> list[Request]:
    """The requests as the worker decodes them."""
    payload = signature_of(EngineAPI.submit).encode_arguments((RequestGroup.all_of(requests),), {})
    groups = signature_of(EngineAPI.submit).decode_arguments(bytearray(payload))["groups"]
    return [request for group in groups for request in group.requests]


@given(groups=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=5))
def test_requests_arrive_as_they_were_sent(groups: list[tuple[int, int, int]]) -> None:
    requests = []
    for number, (length, size, count) in enumerate(groups):
        prompt = np.arange(length, dtype=np.int32)
        images = tuple(image(*range(k, k + 2), digest=f"{number:04d}{k:04d}") for k in range(count))
        requests += [
            Request(f"{number}/{k}", f"{number}", prompt, seed=k, images=images, top_p=0.5, stop=("x",))
            for k in range(size)
        ]
    for before, after in zip(requests, sent(requests), strict=True):
        assert (before.id, before.group, before.seed, before.stop) == (after.id, after.group, after.seed, after.stop)
        assert np.array_equal(before.prompt, after.prompt) and after.prompt.dtype == np.int32
        assert [each.to_json() for each in before.images] == [each.to_json() for each in after.images]


@given(st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=5))
def test_completions_arrive_as_they_were_sent(versions: list[list[int]]) -> None:
    random = np.random.default_rng(len(versions))
    made = [
        Completion(
            f"0/{k}", random.integers(0, 9, len(each), np.int32), random.random(len(each), np.float32),
            np.array(each, np.int32), "stop", f"text {k}",
        )
        for k, each in enumerate(versions)
    ]  # fmt: skip
    batches = [CompletionBatch.of(made[:2]), CompletionBatch.of(made[2:])]
    arrived = [decode_payload(bytearray(encode_payload(batch)), CompletionBatch) for batch in batches]
    unpacked = list(chain.from_iterable(CompletionBatch.unpack_all(arrived)))
    assert len(unpacked) == len(made)
    for before, after in zip(made, unpacked, strict=True):
        assert (before.request, before.finish, before.text) == (after.request, after.finish, after.text)
        for one, two in (
            (before.tokens, after.tokens),
            (before.logprobs, after.logprobs),
            (before.versions, after.versions),
        ):
            assert one.dtype == two.dtype and one.tobytes() == two.tobytes() and two.flags.writeable


def test_a_groups_prompt_and_images_are_sent_once() -> None:
    prompt, images = np.arange(1500, dtype=np.int32), (image(*range(2, 1298)),)
    one = len(encode_payload(RequestGroup.all_of([request("0", prompt, images)])))
    (eight,) = RequestGroup.all_of([request(str(k), prompt, tuple(images)) for k in range(8)])
    assert len(encode_payload(eight)) < one + 8 * 300 < 2 * one
    arrived = decode_payload(encode_payload(eight), RequestGroup).requests
    assert len({id(each.prompt) for each in arrived}) == len({id(each.images) for each in arrived}) == 1


def test_requests_of_a_group_are_divided_by_their_settings_and_ids() -> None:
    prompt = np.arange(9, dtype=np.int32)
    made = [Request(f"g/{k}", "g", prompt, seed=10 + k, max_tokens=5 + k % 2, priority=3) for k in range(5)]
    even, odd = RequestGroup.all_of(made)
    assert (even.ids, even.seeds, even.settings.max_tokens) == (["g/0", "g/2", "g/4"], [10, 12, 14], 5)
    assert (odd.ids, odd.seeds, odd.settings.max_tokens) == (["g/1", "g/3"], [11, 13], 6)
    left = even.only({"g/4", "g/0", "g/1"})
    assert (left.ids, left.seeds, left.prompt, left.settings) == (["g/0", "g/4"], [10, 14], even.prompt, even.settings)
    assert even.ids == ["g/0", "g/2", "g/4"], "the group itself does not change"


def test_equal_prompts_with_different_images_stay_different() -> None:
    prompt = np.arange(9, dtype=np.int32)
    arrived = sent([request("a", prompt, (image(1, digest="aaaaaaaa"),)), request("b", prompt, (image(1),))])
    assert [each.images[0].digest for each in arrived] == ["aaaaaaaa", "0123456789abcdef"]


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        ((image(3, 2),), "not ascending"),
        ((image(3, 3),), "not ascending"),
        ((image(-1, 2),), "not ascending"),
        ((image(1, 2, 5), image(4)), "not after those of the image before"),
        ((image(),), "without places"),
        ((image(4, 12),), "at place 12, but its prompt has 9 tokens"),
        ((image(7, 8),), "at least one token of text must follow"),
    ],
)
def test_images_that_do_not_fit_the_prompt_are_refused(images: tuple[PlacedImage, ...], problem: str) -> None:
    bad = request("a", np.arange(9, dtype=np.int32), images)
    with pytest.raises(BadRequest, match=problem):
        check_request(bad, bad, set(), 512, 64)


@pytest.mark.parametrize("images", [(), (image(1, 2, digest="aaaaaaaa"),), (image(1, 3),), (image(1, 2), image(4))])
def test_requests_of_a_group_have_the_same_images(images: tuple[PlacedImage, ...]) -> None:
    prompt = np.arange(9, dtype=np.int32)
    first = request("a", prompt, (image(1, 2),))
    check_request(first, first, set(), 512, 64)
    check_request(request("b", prompt.copy(), (image(1, 2),)), first, set(), 512, 64)
    with pytest.raises(BadRequest, match="other images than the other requests of group 'g'"):
        check_request(request("b", prompt, images), first, set(), 512, 64)


def test_turns_with_equal_tokens_and_different_images_are_not_one_group() -> None:
    prompt = np.arange(9, dtype=np.int32)
    variants = [(), (image(1),), (image(2),), (image(1, digest="aaaaaaaa"),), (image(1), image(2)), (image(1, 2),)]
    keys = [prompt_key(request("a", prompt, images)) for images in variants]
    assert len(set(keys)) == len(variants)
    assert prompt_key(request("b", prompt.copy(), (image(1),))) == keys[1]
