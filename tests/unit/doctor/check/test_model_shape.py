"""Sizes from a config.json against what transformers builds from it."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.doctor.check.rules.model_shape import UnknownModelShape, model_shape_of

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"head_dim": 16}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"attention_bias": True}),
    ("phi3", {}),
    ("olmo2", {}),
    ("gemma", {"head_dim": 8}),
    ("gemma2", {"head_dim": 8}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2}),
    ("qwen3_moe", {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1]}),
    ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
]


@pytest.mark.parametrize(("family", "fields"), MODELS, ids=lambda value: value if isinstance(value, str) else "")
def test_parameters_are_those_of_the_model(family: str, fields: dict[str, Any]) -> None:
    values = {"vocab_size": 97, **fields} if family == "gpt2" else SMALL | fields
    config = AutoConfig.for_model(family, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = model_shape_of(values | {"model_type": family})
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    layers = next(module for name, module in model.named_modules() if name.endswith((".layers", ".h")))
    assert list(shape.per_layer) == [sum(p.numel() for p in layer.parameters()) for layer in layers]
    assert model_shape_of(config.to_dict()) == model_shape_of({**config.to_dict(), **values}), (
        "also from a file with all defaults"
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_keys_and_values_are_those_of_a_cache(family: str) -> None:
    config = AutoConfig.for_model(family, **SMALL)
    model = AutoModelForCausalLM.from_config(config)
    cache = model(torch.zeros(1, 5, dtype=torch.long), use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert 5 * model_shape_of(SMALL | {"model_type": family}).kv_bytes(4) == held


def test_only_the_experts_that_a_token_uses_are_active() -> None:
    shape = model_shape_of(SMALL | EXPERTS | {"model_type": "qwen3_moe", "head_dim": 16})
    assert shape.per_layer[0] - shape.active_per_layer[0] == 4 * 3 * 32 * 20


@pytest.mark.parametrize("config", [{}, {"model_type": "mamba"}, {"model_type": "llama", "hidden_size": 8}])
def test_what_is_not_known_is_not_estimated(config: dict[str, Any]) -> None:
    with pytest.raises(UnknownModelShape):
        model_shape_of(config)
