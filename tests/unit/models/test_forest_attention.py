"""Attention over forests with windows, soft caps and sinks, and attention without a layout."""

import pytest
import torch
from test_policy_model import make_row, separate
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen3Config,
)

from lockstep.data.row_layout import RowLayout
from lockstep.models.forest_attention import FOREST_ATTENTION, forest_attention, forest_mask, without_model_mask
from lockstep.models.policy_model import PolicyModel

SIZES = {
    "vocab_size": 98,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
WINDOW = {"sliding_window": 4}
MODELS = {
    "qwen2, one layer with a window": Qwen2Config(**SIZES, **WINDOW, use_sliding_window=True, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "mistral, window": MistralConfig(**SIZES, **WINDOW),
    "mixtral, window, experts": MixtralConfig(**SIZES, **WINDOW, num_local_experts=4),
    "phimoe, window told by the mask only": PhimoeConfig(**SIZES, **WINDOW, num_local_experts=4),
    "gemma 2, soft caps and window": Gemma2Config(
        **SIZES, **WINDOW, head_dim=8, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
    ),
    "gpt-oss, sinks, window, experts": GptOssConfig(**SIZES, **WINDOW, head_dim=8, num_local_experts=4),
}


def pair(config) -> tuple[PolicyModel, torch.nn.Module]:
    """The policy, and transformers' model with its eager attention and the same weights."""
    torch.manual_seed(0)
    forest_model = AutoModelForCausalLM.from_config(config, attn_implementation=FOREST_ATTENTION).eval()
    with torch.no_grad():
        for parameter in forest_model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    reference = AutoModelForCausalLM.from_config(type(config)(**config.to_dict()), attn_implementation="eager").eval()
    reference.load_state_dict(forest_model.state_dict())
    return PolicyModel(forest_model), reference


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS.keys())
def test_forest_equals_separate_forwards(config) -> None:
    policy, reference = pair(config)
    row = make_row(seed=7)
    found, _ = policy(row.tokens, row.layout, row.sources, row.targets)
    expected, _ = separate(reference, row)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("config", [Qwen2Config(**SIZES), MODELS["gemma 2, soft caps and window"]])
def test_without_a_layout_it_is_ordinary_attention(config) -> None:
    """With left padding and with a cache, as transformers' own generate uses it."""
    policy, reference = pair(config)
    batch = torch.randint(2, 98, (2, 9))
    mask = torch.ones_like(batch)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    inputs = {"attention_mask": mask, "position_ids": positions}
    forest_model, other = policy.lm(batch, **inputs).logits, reference(batch, **inputs).logits
    torch.testing.assert_close(forest_model[0], other[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(forest_model[1, 4:], other[1, 4:], rtol=1e-4, atol=1e-4)
    greedy = [model.generate(batch[:1], max_new_tokens=6, do_sample=False) for model in (policy.lm, reference)]
    assert torch.equal(*greedy)


def test_a_layout_can_be_given_to_the_plain_model() -> None:
    policy, reference = pair(LlamaConfig(**SIZES))
    row = make_row(seed=8)
    positions = row.layout.positions()[None]
    logits = policy.lm(row.tokens[None], position_ids=positions, layout=row.layout, use_cache=False).logits[0]
    found = logits.log_softmax(-1)[row.sources].gather(-1, row.targets[:, None])[:, 0]
    torch.testing.assert_close(found, separate(reference, row)[0], rtol=0, atol=2e-5)


def test_with_a_layout_no_mask_is_built() -> None:
    sizes = {"batch_size": 1, "q_length": 4, "kv_length": 4}
    with without_model_mask():
        assert forest_mask(**sizes) is None
        assert forest_mask(**sizes, local_size=3).shape == (0, 3)
        with pytest.raises(ValueError, match="custom mask function"):
            forest_mask(**sizes, use_vmap=True)
    assert forest_mask(**sizes, allow_is_causal_skip=False).shape == (1, 1, 4, 4)


def test_what_a_layout_cannot_express_is_refused() -> None:
    module = torch.nn.Module()
    query, layout = torch.zeros(1, 2, 5, 4), RowLayout([5], [-1])

    def attend(query=query, key=query, **kwargs):
        return forest_attention(module, query, key, key, None, layout=layout, **kwargs)

    assert attend()[0].shape == (1, 5, 2, 4)
    for kwargs in (
        {"is_causal": False},
        {"position_bias": query},
        {"query": query[:, :, 1:]},
        {"key": query[:, :, 1:]},
    ):
        with pytest.raises(ValueError, match="Module"):
            attend(**kwargs)
    with pytest.raises(ValueError, match="one row"):
        attend(query=query.repeat(2, 1, 1, 1))
