"""Any causal language model: those that pass the probe use the KV cache, the others compute whole sequences."""

import logging

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from lockstep.models.tiny_model import TinyModel, char_tokenizer
from lockstep.rollout.builtin import BuiltinEngine
from lockstep.rollout.builtin.model_runner import CachedRunner
from lockstep.rollout.builtin.plain_runner import PlainRunner
from lockstep.rollout.engine_protocol import Request
from lockstep.rollout.errors import BadLogits

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
TOKENIZER = char_tokenizer(TinyModel())
COMMON = {"vocab_size": len(TOKENIZER), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_LIKE = {**COMMON, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MODELS = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, {**COMMON, "n_positions": 64}, CachedRunner),
    "mistral-window": (MistralForCausalLM, MistralConfig, {**LLAMA_LIKE, "sliding_window": 6}, CachedRunner),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {**LLAMA_LIKE, "num_local_experts": 3}, CachedRunner),
    "gemma2-softcap": (Gemma2ForCausalLM, Gemma2Config, {**LLAMA_LIKE, "head_dim": 8}, PlainRunner),
    "bloom-alibi": (BloomForCausalLM, BloomConfig, {**COMMON, "seq_length": 64}, PlainRunner),
    "mamba": (MambaForCausalLM, MambaConfig, {**COMMON, "state_size": 4}, PlainRunner),
    "qwen3-next": (
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        {**LLAMA_LIKE, **LINEAR, "head_dim": 8, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]},
        PlainRunner,
    ),
}  # fmt: skip


def build(name):
    network, config, fields, runner = MODELS[name]
    torch.manual_seed(0)
    lm = network(config(**fields, bos_token_id=None, eos_token_id=None, pad_token_id=None)).eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return lm, runner


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_whole_sequences(name, caplog):
    lm, runner = build(name)
    with caplog.at_level(logging.WARNING):
        engine = BuiltinEngine(lm, TOKENIZER, max_rows=4, max_length=64)
    assert type(engine._runner) is runner
    assert ("decodes without the KV cache" in caplog.text) == (runner is PlainRunner)
    random = np.random.default_rng(0)
    prompts = [random.integers(4, 60, size=size).astype(np.int32) for size in (9, 2, 5)]
    requests = [
        Request(f"{g}/{k}", str(g), prompt, seed=10 * g + k, max_tokens=9, ignore_eos=True)
        for g, prompt in enumerate(prompts)
        for k in range(2)
    ]
    engine.submit(requests)
    done = {}
    while len(done) < len(requests):
        done.update((each.request, each) for each in engine.step())
    lm, _ = build(name)
    for request in requests:
        got = done[request.id]
        whole = torch.from_numpy(np.concatenate([request.prompt, got.tokens]).astype(np.int64))
        with torch.inference_mode():
            logprobs = torch.log_softmax(lm(whole.unsqueeze(0), use_cache=False).logits[0].float(), -1)
        at = torch.arange(len(request.prompt), len(whole))
        np.testing.assert_allclose(got.logprobs, logprobs[at - 1, whole[at]].numpy(), atol=1e-4)


def test_a_model_that_diverged_names_the_request():
    lm, _ = build("gpt2")
    engine = BuiltinEngine(lm, TOKENIZER)
    engine.submit([Request("7/3", "g", np.array([5, 6], np.int32), seed=1, max_tokens=4)])
    engine.step()
    with torch.no_grad():
        lm.transformer.ln_f.weight.fill_(torch.nan)
    with pytest.raises(BadLogits, match="request '7/3': the largest logit of token 1 is nan"):
        engine.step()
    assert [len(each.tokens) for each in engine.abort()] == [1]
