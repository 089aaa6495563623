"""QLoRA without a GPU: refusals, the config for transformers, and dequantized weights for engines."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.config.loader import check_config
from lockstep.config.model import AdapterConfig, ModelConfig, QuantizationConfig
from lockstep.models import model_loader
from lockstep.models.errors import ModelError
from lockstep.models.hf_checkpoint import fill_policy
from lockstep.models.lora import adapted_layers, add_adapter, fill_adapter
from lockstep.models.model_loader import check_quantization, load_policy, load_quantized_policy, quantization_config
from lockstep.models.policy_model import PolicyModel
from lockstep.train.adapters.merged_weights import MergedWeights
from lockstep.train.distributed import ParallelContext
from lockstep.train.errors import TrainerUnsupported
from lockstep.train.fsdp.parallelize import held_rows
from lockstep.train.trainer_kinds import trainer_kind

QLORA = {"path": "m", "adapter": {"r": 4}, "quantization": {"kind": "nf4"}}


def config(**changes: Any) -> Any:
    return check_config({"recipe": "sft", "name": "x", "steps": 1, "data": {"path": "d"}, **changes}, "test")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"path": "m", "quantization": {}}}, "set model.adapter as well"),
        ({"model": {**QLORA, "quantization": {"kind": "fp8"}}}, "'nf4' or 'int8'"),
    ],
)
def test_impossible_settings_are_refused_by_the_config(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config(**changes)


@pytest.mark.parametrize(
    ("trainer", "words"),
    [
        ({"ranks": 2}, r"model.quantization with trainer.ranks 2; .*set trainer.ranks=1"),
        ({"offload": {"parameters": True}}, "set trainer.offload.parameters=false"),
    ],
)
def test_what_the_trainer_cannot_do_with_it_is_refused_before_it_starts(trainer: dict[str, Any], words: str) -> None:
    role = config(model=QLORA, trainer=trainer).policy
    with pytest.raises(TrainerUnsupported, match=words):
        trainer_kind(role).planner.check(role)
    critic = role.model_copy(update={"name": "critic"})
    with pytest.raises(TrainerUnsupported, match=r"critic\.model\.quantization with critic\.trainer\."):
        trainer_kind(critic).planner.check(critic)


def test_it_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(model=QLORA).model
    monkeypatch.setattr(model_loader.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"model.quantization.kind = 'nf4': bitsandbytes is not installed; .*pip"):
        check_quantization(cfg, "cuda")
    with pytest.raises(ModelError, match="not installed"):
        load_quantized_policy(cfg, torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(model_loader.importlib.util, "find_spec", lambda name: "somewhere")
    with pytest.raises(ModelError, match="the trainer is on cpu"):
        check_quantization(cfg, "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_quantization(cfg, "cuda")  # of other hosts: the ranks there ask again
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (5, 2))
    with pytest.raises(ModelError, match=r"compute capability 5\.2, and 6\.0 is needed"):
        check_quantization(cfg, "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_quantization(cfg, "cuda")
    check_quantization(ModelConfig(path="m"), "cpu")


def test_quantization_config_follows_the_config() -> None:
    four = quantization_config(QuantizationConfig(double_quant=False), torch.bfloat16).to_dict()
    assert (four["load_in_4bit"], four["bnb_4bit_quant_type"]) == (True, "nf4")
    assert (four["bnb_4bit_compute_dtype"], four["bnb_4bit_use_double_quant"]) == ("bfloat16", False)
    assert quantization_config(QuantizationConfig(kind="int8"), torch.bfloat16).to_dict()["load_in_8bit"] is True


class Packed(nn.Linear):
    """Imitates a layer of bitsandbytes, whose weight is a column of bytes."""

    plain: Tensor


def pack(linear: nn.Linear) -> Packed:
    made = Packed(linear.in_features, linear.out_features, bias=linear.bias is not None)
    made.plain = (linear.weight.detach() * 64).round() / 64
    made.weight = nn.Parameter(torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)
    return made


def packed_policy(folder: Path, cfg: AdapterConfig) -> PolicyModel:
    policy = load_policy(ModelConfig(path=str(folder)), "cpu", meta=True)
    add_adapter(policy, cfg)
    fill_policy(policy, folder, "cpu")
    for layer in adapted_layers(policy).values():
        layer.base_layer = pack(layer.base_layer)
    mlp = policy.layers[0].mlp
    mlp.up_proj = pack(mlp.up_proj)
    fill_adapter(policy, cfg, 0, "cpu")
    return policy


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_trainer_exports_dequantized_weights(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = model_loader.dequantize_module_weight
    monkeypatch.setattr(
        model_loader, "dequantize_module_weight", lambda m: m.plain if isinstance(m, Packed) else original(m)
    )
    policy = packed_policy(folder, AdapterConfig(kind=kind, r=4, target_modules=("q_proj",)))
    outgoing = MergedWeights(policy, ParallelContext(), partial(held_rows, ParallelContext()))
    whole = load_policy(ModelConfig(path=str(folder)), "cpu")
    expected = {name.removeprefix("lm."): tuple(p.shape) for name, p in whole.named_parameters()}
    assert {name: outgoing.shape(name) for name in outgoing.weights} == expected
    for name, weight in outgoing.merged().items():
        assert tuple(weight.rows().shape) == weight.shape == expected[name]
    attention, mlp = policy.layers[0].self_attn, policy.layers[0].mlp
    merged = outgoing.merged()
    found = merged["model.layers.0.self_attn.q_proj.weight"].rows()
    torch.testing.assert_close(found, attention.q_proj.base_layer.plain)
    assert torch.equal(merged["model.layers.0.mlp.up_proj.weight"].rows(), mlp.up_proj.plain)
