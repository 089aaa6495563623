"""The fused forward against the model, for each family and variant."""

import functools
import logging
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lockstep.models.tiny_model import TinyModel, char_tokenizer
from lockstep.rollout.builtin import BuiltinEngine
from lockstep.rollout.builtin import fused_forward as fused_module
from lockstep.rollout.builtin.fused_forward import FusedForward
from lockstep.rollout.builtin.model_forward import ModelForward
from lockstep.rollout.builtin.model_runner import CachedRunner
from lockstep.rollout.engine_protocol import Request

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
TOKENIZER = char_tokenizer(TinyModel())
CONTEXT = 96
SIZES = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama-linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR, "num_key_value_heads": 4}),
    "llama-dynamic": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": DYNAMIC}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12, "tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 9, "head_dim": 8}),
}


def build(name, seed=0):
    """A model with large random weights, biases and norms."""
    network, config, fields = MODELS[name]
    torch.manual_seed(seed)
    lm = network(config(**{**SIZES, **fields})).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.mul_(6.0) if parameter.ndim == 2 else parameter.add_(0.3 * torch.randn_like(parameter))
    return lm


@functools.cache
def reference(name):
    return build(name)


def fused(name, **options):
    engine = BuiltinEngine(build(name), TOKENIZER, max_length=CONTEXT, **options)
    assert isinstance(engine._runner, CachedRunner)
    assert isinstance(engine._runner.forward, FusedForward)
    return engine


def ask(lengths=(11, 2, 1, 6), size=3, limits=(14,), **fields):
    random = np.random.default_rng(5)
    prompts = [random.integers(4, 60, size=length).astype(np.int32) for length in lengths]
    pairs = [(g, k) for g in range(len(lengths)) for k in range(size)]
    return [
        Request(f"{g}/{k}", str(g), prompts[g], 100 * g + k, max_tokens=limits[n % len(limits)], ignore_eos=True,
                **fields)
        for n, (g, k) in enumerate(pairs)
    ]  # fmt: skip


def run(engine, requests):
    engine.submit(requests)
    done = {}
    while len(done) < len(requests):
        done.update((each.request, each) for each in engine.step())
    return done


@torch.inference_mode()
def whole_logprobs(lm, request, tokens):
    """Log-probabilities `[tokens]` by one forward of the model itself, without a cache."""
    whole = torch.from_numpy(np.concatenate([request.prompt, tokens]).astype(np.int64))
    logprobs = torch.log_softmax(lm(whole.unsqueeze(0), use_cache=False).logits[0].float(), -1)
    at = torch.arange(len(request.prompt), len(whole))
    return logprobs[at - 1, whole[at]].numpy()


@pytest.fixture(params=["transposed", "as-in-the-model"])
def layers(request, monkeypatch):
    """How a layer's matrices are stored: `[inputs, outputs]`, or as in the model, like those of large layers."""
    if request.param == "as-in-the-model":
        monkeypatch.setattr(fused_module, "_MAX_TRANSPOSED_BYTES", 0)
    return request.param


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_equal_those_of_the_model(name, layers):
    requests = ask(limits=(14, 5, 9))
    done = run(fused(name, max_rows=7), requests)
    for request in requests:
        got = done[request.id]
        np.testing.assert_allclose(got.logprobs, whole_logprobs(reference(name), request, got.tokens), atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama-biases", "mistral"])
def test_new_weights_reach_the_fused_tensors(name, layers):
    new = build(name, seed=1)

    @contextmanager
    def reader(source, version):
        yield dict(new.named_parameters())

    engine = fused(name, reader=reader)
    requests = ask(size=1)
    run(engine, requests)
    engine.load_weights(Path("anywhere"), 1)
    for own, given_ in zip(engine.lm.parameters(), new.parameters(), strict=True):
        assert torch.equal(own, given_)
    done = run(engine, requests)
    for request in requests:
        got = done[request.id]
        np.testing.assert_allclose(got.logprobs, whole_logprobs(new, request, got.tokens), atol=1e-4)


def test_no_weight_is_stored_twice_and_the_model_still_works(layers):
    lm = build("qwen2")
    ids = torch.arange(4, 20).unsqueeze(0)
    before, values = lm(ids).logits, [parameter.clone() for parameter in lm.parameters()]
    forward = FusedForward(lm)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in lm.parameters()}
    assert sum(storages.values()) == sum(value.nbytes for value in values)
    layer = forward.layers[0]
    assert layer.qkv.weight.is_contiguous() == (layers == "transposed")
    assert layer.qkv.weight.untyped_storage().data_ptr() in storages
    assert all(torch.equal(one, other) for one, other in zip(lm.parameters(), values, strict=True))
    torch.testing.assert_close(lm(ids).logits, before)


def test_the_log_says_which_forward_and_why(caplog):
    with caplog.at_level(logging.INFO):
        BuiltinEngine(build("qwen3"), TOKENIZER)
    assert "Qwen3ForCausalLM decodes through the fused forward" in caplog.text
    other = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2))
    engine = BuiltinEngine(other, TOKENIZER)
    assert isinstance(engine._runner.forward, ModelForward)
    assert "slower: there is no fused forward for MixtralForCausalLM" in caplog.text


@pytest.mark.parametrize("name", ["qwen3", "llama-biases"])
def test_steps_of_rounded_shapes_compute_the_same(name):
    """The steps that CUDA graphs would repeat, run without graphs."""
    requests = ask(limits=(9, 3, 14, 6))
    expected = run(fused(name, max_rows=7), requests)
    engine = fused(name, max_rows=7)
    runner = engine._runner
    made = []
    engine._runner = CachedRunner(
        runner.forward, engine.device, runner.dtype, capture=lambda step: made.append(step) or step
    )
    done = run(engine, requests)
    assert made
    for each in requests:
        assert done[each.id].tokens.tolist() == expected[each.id].tokens.tolist()
        np.testing.assert_allclose(done[each.id].logprobs, expected[each.id].logprobs, atol=1e-5)


class Doubled(nn.Linear):
    """A layer that is no longer plain."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_changed_models_keep_their_own_forward(caplog):
    adapted = build("llama")
    old = adapted.model.layers[1].mlp.up_proj
    adapted.model.layers[1].mlp.up_proj = Doubled(old.in_features, old.out_features, bias=False)
    engine = BuiltinEngine(adapted, TOKENIZER)
    assert isinstance(engine._runner.forward, ModelForward) and "Doubled is not a plain linear layer" in caplog.text
    scaled = build("llama")
    scaled.model.norm.register_forward_hook(lambda module, inputs, out: out * 1.5)
    engine = BuiltinEngine(scaled, TOKENIZER)
    assert isinstance(engine._runner.forward, ModelForward) and "differ from those of whole sequences" in caplog.text


@functools.cache
def expected_completions():
    done = run(fused("qwen3"), ask(limits=(9, 3, 14, 6)))
    return {name: (each.tokens.tolist(), each.logprobs) for name, each in done.items()}


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    order=st.permutations(range(12)),
    capacity=st.integers(1, 12),
    arrivals=st.lists(st.integers(0, 4), max_size=8),
    aborted=st.sets(st.integers(0, 11), max_size=3),
)
def test_any_order_of_admission_and_retirement_gives_the_same_completions(order, capacity, arrivals, aborted):
    requests = ask(limits=(9, 3, 14, 6))
    engine = BuiltinEngine(_shared_model(), TOKENIZER, max_rows=capacity, max_length=CONTEXT)
    pending, done, step = [requests[n] for n in order], {}, 0
    while pending or engine.progress().running or engine.progress().waiting:
        count = arrivals[step] if step < len(arrivals) else len(pending)
        engine.submit(pending[:count])
        del pending[:count]
        done.update((each.request, each) for each in engine.step())
        if step == 4:
            done.update((each.request, each) for each in engine.abort([requests[n].id for n in aborted]))
        step += 1
    for name, got in done.items():
        tokens, logprobs = expected_completions()[name]
        count = len(got.tokens)
        assert got.tokens.tolist() == tokens[:count] and (got.finish == "abort" or count == len(tokens))
        np.testing.assert_allclose(got.logprobs, logprobs[:count], atol=1e-4)


@functools.cache
def _shared_model():
    return build("qwen3")
