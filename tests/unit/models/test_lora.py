"""Adapters: their layers, names and merged weights."""

from pathlib import Path

import pytest
import torch
from peft import get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, GPT2Config

from lockstep.config.model import AdapterConfig, ModelConfig
from lockstep.models.errors import ModelError
from lockstep.models.hf_checkpoint import check_weights, fill_policy, folder_digest, named_weights
from lockstep.models.lora import (
    LowRankFactors,
    adapted_layers,
    add_adapter,
    fill_adapter,
    find_targets,
    named_adapter,
    peft_config,
    with_dropout,
    without_adapter,
)
from lockstep.models.model_loader import load_policy
from lockstep.models.policy_model import PolicyModel


def with_adapter(folder: Path, cfg: AdapterConfig, seed: int = 0) -> PolicyModel:
    policy = load_policy(ModelConfig(path=str(folder)), "cpu", meta=True)
    add_adapter(policy, cfg)
    fill_policy(policy, folder, "cpu")
    fill_adapter(policy, cfg, seed, "cpu")
    return policy


def stirred(policy: PolicyModel) -> PolicyModel:
    """Sets B to values other than zero."""
    torch.manual_seed(1)
    with torch.no_grad():
        for _, parameter in named_adapter(policy):
            parameter += 0.1 * torch.randn_like(parameter)
    return policy


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_names_are_those_of_the_checkpoint_and_of_peft(folder: Path, kind: str) -> None:
    policy = with_adapter(folder, AdapterConfig(kind=kind, r=4))
    plain = load_policy(ModelConfig(path=str(folder)), "cpu")
    assert [name for name, _ in named_weights(policy)] == [name for name, _ in named_weights(plain)]
    assert not check_weights(policy, folder).missing
    expected = {f"base_model.model.{name}" for name in get_peft_model_state_dict(policy.lm)}
    assert {name for name, _ in named_adapter(policy)} == expected
    assert all(parameter.requires_grad for _, parameter in named_adapter(policy))
    assert not any(parameter.requires_grad for _, parameter in named_weights(policy))


@pytest.mark.parametrize(
    "cfg",
    [
        AdapterConfig(r=3, lora_alpha=5),
        AdapterConfig(kind="dora", r=3, use_rslora=True, init_lora_weights="gaussian"),
        AdapterConfig(r=2, target_modules=("self_attn.q_proj", "layers.1.mlp.up_proj")),
    ],
)
def test_a_new_adapter_changes_nothing_and_merges_as_in_peft(folder: Path, cfg: AdapterConfig) -> None:
    policy = with_adapter(folder, cfg)
    ids = torch.arange(20)[None] % 60 + 4
    with torch.no_grad():
        start = policy.lm(ids).logits
        torch.testing.assert_close(
            start, load_policy(ModelConfig(path=str(folder)), "cpu").lm(ids).logits, atol=1e-6, rtol=0
        )
        stirred(policy)
        expected = policy.lm(ids).logits
        assert (expected - start).abs().max() > 1e-3
        with without_adapter(policy):
            torch.testing.assert_close(policy.lm(ids).logits, start, atol=1e-6, rtol=0)
        assert torch.equal(policy.lm(ids).logits, expected)
    for layer in adapted_layers(policy).values():
        magnitudes = layer.lora_magnitude_vector
        low = LowRankFactors(
            layer.lora_A["default"].weight,
            layer.lora_B["default"].weight,
            cfg.scaling,
            magnitudes["default"].weight if "default" in magnitudes else None,
        )
        weight, middle = layer.base_layer.weight.detach().clone(), layer.base_layer.weight.shape[0] // 2
        parts = torch.cat([low.merged(weight[:middle], 0), low.merged(weight[middle:], middle)])
        layer.merge()
        torch.testing.assert_close(parts, layer.base_layer.weight, atol=1e-6, rtol=0)


def test_a_is_drawn_from_the_runs_seed_as_peft_draws_it(folder: Path) -> None:
    one, same, other = (dict(named_adapter(with_adapter(folder, AdapterConfig(r=8), seed))) for seed in (5, 5, 6))
    name = next(name for name in one if "q_proj.lora_A" in name)
    assert torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name])
    down = one[name]
    assert down.abs().max() <= down.shape[1] ** -0.5  # uniform in +-1/sqrt(in), Kaiming's with a = sqrt(5)
    assert float(down.detach().std()) == pytest.approx((3 * down.shape[1]) ** -0.5, rel=0.2)
    layers = {float(rows.detach()[0, 0]) for key, rows in one.items() if "lora_A" in key}
    assert len(layers) == sum("lora_A" in key for key in one), "every layer has its own"


def test_all_linear_is_every_layer_but_the_output(folder: Path) -> None:
    policy = load_policy(ModelConfig(path=str(folder)), "cpu", meta=True)
    targets = find_targets(policy, AdapterConfig())
    assert len(targets) == 7 * len(policy.layers)
    assert sorted(peft_config(policy, AdapterConfig()).target_modules) == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    )


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("q_prj", ["'q_prj'", "no layer of that name", "did you mean q_proj"]),
        ("query_key_value", ["no layer of that name", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"]),
        ("lm_head", ["the output layer"]),
        ("input_layernorm", ["RMSNorm", "not a linear layer"]),
    ],
)
def test_targets_that_do_not_fit_are_named(folder: Path, target: str, words: list[str]) -> None:
    policy = load_policy(ModelConfig(path=str(folder)), "cpu", meta=True)
    with pytest.raises(ModelError) as caught:
        add_adapter(policy, AdapterConfig(target_modules=("q_proj", target)))
    assert caught.value.field == "model.adapter.target_modules"
    for word in words:
        assert word in str(caught.value)
    assert not any(isinstance(module, LoraLayer) for module in policy.modules()), "nothing was changed"


def test_transposed_layers_are_merged_and_refused_for_dora(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=80, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy = stirred(with_adapter(tmp_path, AdapterConfig(r=4, target_modules=("c_attn",))))
    for name, layer in adapted_layers(policy).items():
        assert name.endswith("attn.c_attn.weight") and layer.fan_in_fan_out
        down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        low = LowRankFactors(down, up, layer.scaling["default"], transposed=True)
        found = low.merged(layer.base_layer.weight.detach()[5:9], 5)
        layer.merge()
        torch.testing.assert_close(found, layer.base_layer.weight[5:9], atol=1e-6, rtol=0)
    with pytest.raises(ModelError, match=r"model\.adapter\.kind = 'dora'.*Conv1D.*kind=lora"):
        with_adapter(tmp_path, AdapterConfig(kind="dora"))


def test_only_the_adapters_dropout_is_switched(folder: Path) -> None:
    policy = stirred(with_adapter(folder, AdapterConfig(lora_dropout=0.5)))
    ids = torch.arange(20)[None] % 60 + 4
    with torch.no_grad():
        dry = policy.lm(ids).logits
        with with_dropout(policy):
            assert not torch.equal(policy.lm(ids).logits, dry)
            assert not policy.lm.training
        assert torch.equal(policy.lm(ids).logits, dry)


def test_digests_of_models_of_one_shape_differ(folder: Path, tmp_path: Path) -> None:
    before = folder_digest(folder)
    copy = tmp_path / "model.safetensors"
    content = bytearray((folder / "model.safetensors").read_bytes())
    copy.write_bytes(content)
    assert folder_digest(tmp_path) == before
    content[-1] ^= 1
    copy.write_bytes(content)
    assert folder_digest(tmp_path) != before
