"""The sampler against an independent implementation in numpy, and against the distribution it should draw from."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.rollout.builtin.sampler import SamplingRows, sample_tokens, truncate_distribution, uniform_draws
from lockstep.rollout.engine_protocol import request_seed

CPU = torch.device("cpu")


def rows_of(n, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seeds=None):
    each = [np.broadcast_to(np.asarray(value), (n,)) for value in (temperature, top_p, top_k, min_p)]
    return SamplingRows.of(np.arange(n) if seeds is None else np.asarray(seeds), *each, device=CPU)


def by_hand(logits, temperature, top_p, top_k, min_p):
    """Probabilities `[vocabulary]` in float64, one token after the other."""
    scaled = np.asarray(logits, np.float64) / temperature
    probability = np.exp(scaled - scaled.max())
    probability /= probability.sum()
    order = sorted(range(len(probability)), key=lambda token: -probability[token])
    kept = order[:top_k] if top_k else order
    within = sum(probability[token] for token in kept)
    if top_p < 1:
        nucleus, mass = [], 0.0
        for token in kept:
            nucleus.append(token)
            mass += probability[token] / within
            if mass >= top_p:
                break
        kept = nucleus
    kept = [token for token in kept if probability[token] >= min_p * probability[order[0]]]
    result = np.zeros_like(probability)
    result[kept] = probability[kept]
    return result / result.sum()


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.6},
    {"top_p": 0.05},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("vocabulary", [11, 1500])
@pytest.mark.parametrize("setting", SETTINGS)
def test_truncation_equals_numpy(vocabulary, setting):
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(6, vocabulary)) * 2).float()
    full = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **setting}
    got = torch.softmax(truncate_distribution(logits.clone(), rows_of(6, **full)), -1).numpy()
    for row in range(6):
        expected = by_hand(logits[row].numpy(), **full)
        np.testing.assert_array_equal(got[row] > 0, expected > 0)
        np.testing.assert_allclose(got[row], expected, atol=2e-6)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(0.2, 4), st.floats(0.01, 0.99), st.integers(0, 40), st.floats(0, 0.5))
def test_truncation_equals_numpy_anywhere(seed, temperature, top_p, top_k, min_p):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(1, 30)) * 3).float()
    got = torch.softmax(truncate_distribution(logits.clone(), rows_of(1, temperature, top_p, top_k, min_p)), -1)[
        0
    ].numpy()
    expected = by_hand(logits[0].numpy(), temperature, np.float32(top_p), top_k, np.float32(min_p))
    if not np.array_equal(got > 0, expected > 0):  # only where a boundary falls between two roundings
        assert abs(int((got > 0).sum()) - int((expected > 0).sum())) == 1
    else:
        np.testing.assert_allclose(got, expected, atol=5e-6)


@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_follow_the_distribution(setting):
    draws, vocabulary = 40_000, 12
    full = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **setting}
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=vocabulary)).float()
    seeds = np.array([request_seed(3, step, "0:1", k) for step in range(draws // 8) for k in range(8)])
    tokens, logprobs = sample_tokens(
        logits.expand(draws, -1).clone(), rows_of(draws, **full, seeds=seeds), np.full(draws, 5)
    )
    expected = by_hand(logits.numpy(), **full)
    counts = np.bincount(tokens.numpy(), minlength=vocabulary)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    np.testing.assert_allclose(logprobs.numpy(), np.log(expected[tokens.numpy()]), atol=1e-5)
    freedom = int(possible.sum()) - 1
    if freedom:
        square = ((counts[possible] - draws * expected[possible]) ** 2 / (draws * expected[possible])).sum()
        assert square < freedom + 4 * math.sqrt(2 * freedom) + 6  # p about 1e-4


def test_rows_have_their_own_parameters():
    logits = torch.from_numpy(np.random.default_rng(4).normal(size=(5, 50)) * 2).float()
    settings = [SETTINGS[i] for i in (0, 1, 4, 8)]
    full = [{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **each} for each in settings]
    full.append({"temperature": 0.0, "top_p": 0.3, "top_k": 2, "min_p": 0.4})
    columns = {name: [each[name] for each in full] for name in full[0]}
    index = np.arange(5) + 9
    tokens, logprobs = sample_tokens(logits.clone(), rows_of(5, **columns), index)
    for row in range(5):
        alone = rows_of(1, **full[row], seeds=[row])
        token, logprob = sample_tokens(logits[row : row + 1].clone(), alone, index[row : row + 1])
        assert token[0] == tokens[row]
        torch.testing.assert_close(logprob[0], logprobs[row])
    assert tokens[4] == logits[4].argmax()  # greedy: at temperature 1, without truncation
    torch.testing.assert_close(logprobs[4], torch.log_softmax(logits[4], -1).max())


def test_tokens_of_probability_zero_are_never_drawn():
    logits = torch.full((4000, 9), -torch.inf)
    logits[:, 3] = 0.0
    logits[:, 6] = -30.0  # 1e-13
    tokens, logprobs = sample_tokens(logits, rows_of(4000), np.zeros(4000, np.int64))
    assert set(tokens.tolist()) == {3}
    assert logprobs.abs().max() < 1e-6


def test_uniform_is_splitmix64():
    """Against a plain implementation in Python integers."""
    mask = (1 << 64) - 1

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    seeds = [0, 1, 2**62 + 12345, 2**63 - 1]
    for index in (0, 1, 511):
        got = uniform_draws(np.array(seeds), np.full(4, index))
        expected = [(mix((mix((seed + golden) & mask) + index * golden) & mask) >> 11) / 2**53 for seed in seeds]
        assert got.tolist() == expected


def test_uniform_is_uniform_and_independent():
    seeds = np.arange(20_000)
    now, later = (torch.from_numpy(uniform_draws(seeds, np.full_like(seeds, index))) for index in (0, 1))
    for u in (now, later):
        counts = torch.histc(u.float(), 20, 0, 1)
        assert ((counts - 1000) ** 2 / 1000).sum() < 19 + 4 * math.sqrt(38) + 6
        assert u.min() >= 0 and u.max() < 1
    assert abs(float(torch.corrcoef(torch.stack([now, later]))[0, 1])) < 0.03


def test_request_seeds_are_stable_and_apart():
    assert request_seed(0, 0, "0:0", 0) == 6540757640540529436  # of every run there ever was
    places = itertools.product((0, 1), range(9), range(9), range(9))
    seeds = {request_seed(run, step, f"0:{row}", k) for run, step, row, k in places}
    assert len(seeds) == 2 * 9**3
    assert all(0 <= seed < 2**63 for seed in seeds)
