"""The prefix cache: lookup, eviction, and the same completions as without it."""

import functools
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.rollout.builtin import BuiltinEngine
from lockstep.rollout.builtin.fused_forward import FusedForward
from lockstep.rollout.builtin.kv_cache import PrefixCache
from lockstep.rollout.builtin.model_forward import ModelForward
from lockstep.rollout.builtin.model_runner import CachedRunner
from lockstep.rollout.engine_protocol import Request
from tests.unit.rollout.builtin.test_fused_forward import CONTEXT, TOKENIZER, build, run, whole_logprobs

NAMES = ["qwen2", "qwen2-window", "qwen3", "mistral"]


def engine_of(name, **options):
    return BuiltinEngine(build(name), TOKENIZER, max_length=CONTEXT, **options)


def first_turns(keep=True, tokens=9):
    random = np.random.default_rng(5)
    prompts = [random.integers(4, 60, size=length).astype(np.int32) for length in (19, 2, 30)]
    return [
        Request(f"{g}/{k}", str(g), prompts[g], 100 * g + k, max_tokens=tokens + 3 * k, ignore_eos=True, keep=keep)
        for g in range(3)
        for k in range(2)
    ]


def next_turns(requests, done, more=(7, 1, 3)):
    """Requests for the next turns, after replies of an environment."""
    random = np.random.default_rng(6)
    made = []
    for number, request in enumerate(requests):
        answer = random.integers(4, 60, size=more[number % len(more)]).astype(np.int32)
        prompt = np.concatenate([request.prompt, done[request.id].tokens, answer])
        name = f"{request.id}/next"
        made.append(Request(name, name, prompt, request.seed + 7, max_tokens=6, ignore_eos=True, keep=True))
    return made


@functools.cache
def without(name):
    engine = engine_of(name, prefix_cache=0.0)
    first = first_turns()
    said = run(engine, first)
    following = next_turns(first, said)
    again = run(engine, following)
    assert engine.progress().prefix_cache_hits == 0
    return said, following, again


@pytest.mark.parametrize("own", [False, True], ids=["fused", "own-forward"])
@pytest.mark.parametrize("name", NAMES)
def test_a_next_turn_computes_only_new_tokens(name, own):
    said, following, expected = without(name)
    engine = engine_of(name)
    if own:
        engine._runner = CachedRunner(ModelForward(engine.lm), engine.device, torch.float32, prefix_cache=0.5)
        engine.lm.set_attn_implementation("lockstep_decode")
    else:
        assert isinstance(engine._runner.forward, FusedForward)
    run(engine, first_turns())
    before = engine.progress()
    done = run(engine, following)
    now = engine.progress()
    first = first_turns()
    # The last token of a turn was never an input, so it is not kept. Prefixes of fewer than 16 tokens are not reused.
    kept = [len(each.prompt) + len(said[each.id].tokens) - 1 for each in first]
    assert now.prefix_cache_hits - before.prefix_cache_hits == sum(count for count in kept if count >= 16) > 0
    assert now.prefix_cache_queries - before.prefix_cache_queries == sum(len(each.prompt) - 1 for each in following)
    for each in following:
        got = done[each.id]
        assert got.tokens.tolist() == expected[each.id].tokens.tolist()
        np.testing.assert_allclose(got.logprobs, expected[each.id].logprobs, atol=1e-4)
        if not own:
            np.testing.assert_allclose(got.logprobs, whole_logprobs(build(name), each, got.tokens), atol=1e-4)


def test_branches_share_a_prefix_and_nothing_is_kept_without_request():
    engine = engine_of("qwen2")
    first = first_turns(keep=False)
    said = run(engine, first)
    assert len(engine._runner.prefixes) == 0
    engine = engine_of("qwen2")
    run(engine, first_turns())
    begun = np.concatenate([first[0].prompt, said["0/0"].tokens])
    prompts = [np.concatenate([begun[:-cut] if cut else begun, np.arange(4, 9)]) for cut in (0, 0, 4)]
    branches = [
        Request(f"b{n}", f"b{n}", prompt.astype(np.int32), n, max_tokens=5, ignore_eos=True)
        for n, prompt in enumerate(prompts)
    ]
    before = engine.progress().prefix_cache_hits
    done = run(engine, branches)
    found = engine.progress().prefix_cache_hits - before
    assert found >= 3 * len(begun) - 2 - 4
    for each in branches:
        expected = whole_logprobs(build("qwen2"), each, done[each.id].tokens)
        np.testing.assert_allclose(done[each.id].logprobs, expected, atol=1e-4)


def test_new_weights_never_use_keys_and_values_of_old_ones():
    new = build("qwen2", seed=1)

    @contextmanager
    def reader(source, version):
        yield dict(new.named_parameters())

    engine = engine_of("qwen2", reader=reader)
    first = first_turns()
    run(engine, first[:2])
    assert len(engine._runner.prefixes) == 2
    engine.submit(first[2:])
    for _ in range(4):  # these end with keys and values of both weights
        engine.step()
    engine.load_weights(Path("anywhere"), 1)
    assert len(engine._runner.prefixes) == 0 == engine._runner.prefixes.tokens
    crossed = {}
    while len(crossed) < 4:
        crossed.update((each.request, each) for each in engine.step())
    assert len(engine._runner.prefixes) == 0
    following = next_turns(first[2:], crossed)
    before = engine.progress().prefix_cache_hits
    done = run(engine, following)
    assert engine.progress().prefix_cache_hits == before
    for each in following:
        expected = whole_logprobs(new, each, done[each.id].tokens)
        np.testing.assert_allclose(done[each.id].logprobs, expected, atol=1e-4)
    assert len(engine._runner.prefixes) == 4


def test_a_small_cache_keeps_the_newest():
    engine = engine_of("qwen2", cache_tokens=200, prefix_cache=0.25)
    first = first_turns()
    said = run(engine, first)
    prefixes = engine._runner.prefixes
    assert 0 < prefixes.tokens <= 50 and 0 < len(prefixes) < len(first)
    done = run(engine, next_turns(first, said))
    for name, each in without("qwen2")[2].items():
        np.testing.assert_allclose(done[name].logprobs, each.logprobs, atol=1e-4)


def sequence(*tokens):
    return np.array(tokens, np.int32)


def test_lookup_and_eviction_order():
    long = np.arange(40, dtype=np.int32)
    store = PrefixCache()
    one, two, three = ({0: (torch.full((1,), n), torch.zeros(1))} for n in range(3))
    store.keep(long[:20], one, 100)
    store.keep(long[::-1][:30], two, 100)
    assert (len(store), store.tokens) == (2, 50)
    assert store.find(long) == (one, 20)  # now it is the most recently used
    assert store.find(long[:15]) == ({}, 0)  # too short
    assert (store.queries, store.hits) == (55, 20)
    store.keep(long, three, 100)  # it continues the first sequence, and replaces it
    assert (len(store), store.tokens) == (2, 70)
    assert store.find(np.concatenate([long[:25], [99]])) == (three, 25)
    store.keep(np.full(50, 7, np.int32), one, 100)  # evicts the oldest
    assert (len(store), store.tokens) == (2, 90)
    assert store.find(long[::-1]) == ({}, 0) and store.find(long)[1] == 40
    store.clear()
    assert (len(store), store.tokens, store.find(long)) == (0, 0, ({}, 0))


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=14, max_size=40), min_size=1, max_size=12),
    st.integers(40, 90),
)
def test_the_limit_holds_and_the_longest_prefix_is_found(kept, limit):
    store, all_of = PrefixCache(), []
    for tokens in kept:
        store.keep(np.array(tokens), {}, limit)
        all_of.append(tokens)
        assert store.tokens == sum(len(each.tokens) for each in store._kept.values()) <= limit
    wanted = kept[0] + [1, 0]
    alive = [each.tokens.tolist() for each in store._kept.values()]
    common = [next((i for i, (a, b) in enumerate(zip(one, wanted, strict=False)) if a != b), min(len(one), len(wanted)))
              for one in alive]  # fmt: skip
    best = max(common, default=0)
    assert store.find(np.array(wanted))[1] == (best if best >= 16 else 0)
