"""Runs that start from adapters in peft's format, and weights that are trained in full along with an adapter."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_lora import stirred, with_adapter
from transformers import AutoModelForCausalLM

from lockstep.config.model import AdapterConfig, ModelConfig
from lockstep.models.adapter_folder import resolve_adapter
from lockstep.models.errors import ModelError
from lockstep.models.lora import (
    add_adapter,
    find_modules_to_save,
    named_adapter,
    named_saved_weights,
    peft_config,
    saved_names,
)
from lockstep.models.model_loader import load_policy
from lockstep.models.tiny_model import make_tiny
from lockstep.train.adapters.merged_weights import MergedWeights
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.parallelize import held_rows
from lockstep.train.model_export import export_adapter

IDS = torch.arange(20)[None] % 60 + 4


def made_by_peft(folder: Path, to: Path, **settings: Any) -> PeftModel:
    """Writes an adapter with values other than its initial ones, by peft."""
    torch.manual_seed(3)
    wanted = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"]} | settings
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(task_type="CAUSAL_LM", **wanted))
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(to)
    return model.eval()


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True, "lora_dropout": 0.1},
        {"use_dora": True, "target_modules": "all-linear"},
        {"target_modules": r".*layers\.1\..*(q_proj|v_proj)"},  # a pattern, which only the weights can tell
        {"layers_to_transform": [1]},
        {"modules_to_save": ["layernorm"]},  # peft's ends of names need not begin at a dot
        {"modules_to_save": ["model.norm", "mlp"], "target_modules": ["q_proj"]},
    ],
)
def test_a_policy_starts_from_an_adapter_of_peft(
    tiny_folders: dict[tuple[str, bool], Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    folder = tiny_folders["llama", False]
    reference = made_by_peft(folder, tmp_path, **settings)
    cfg = resolve_adapter(AdapterConfig(path=str(tmp_path)))
    assert (cfg.r, cfg.lora_alpha, cfg.lora_dropout) == (3, 7, settings.get("lora_dropout", 0.0))
    assert resolve_adapter(cfg) == cfg, "what was taken from it does not contradict it"
    policy = with_adapter(folder, cfg)
    with torch.no_grad():
        torch.testing.assert_close(policy.lm(IDS).logits, reference(IDS).logits, atol=1e-5, rtol=0)
    trained = {name for name, _ in [*named_adapter(policy), *named_saved_weights(policy)]}
    assert len(trained) == sum(parameter.requires_grad for _, parameter in reference.named_parameters())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"r": 16}, ["model.adapter.r = 16", "has 3", "leave it out"]),
        ({"lora_alpha": 8}, ["model.adapter.lora_alpha = 8", "has 7"]),
        ({"kind": "dora"}, ["model.adapter.kind = 'dora'", "has 'lora'"]),
        ({"target_modules": ["q_proj"]}, ["model.adapter.target_modules = ['q_proj']", "['down_proj', 'q_proj']"]),
        ({"modules_to_save": ["lm_head"]}, ["model.adapter.modules_to_save = ['lm_head']", "has []"]),
        ({"use_rslora": True}, ["model.adapter.use_rslora"]),
    ],
)
def test_settings_that_contradict_the_adapter_are_refused(
    tiny_folders: dict[tuple[str, bool], Path], tmp_path: Path, given: dict[str, Any], words: list[str]
) -> None:
    made_by_peft(tiny_folders["llama", False], tmp_path)
    with pytest.raises(ModelError) as caught:
        resolve_adapter(AdapterConfig.model_validate({"path": str(tmp_path)} | given))
    for word in words:
        assert word in str(caught.value)
    same = {"r": 3, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.2}
    assert resolve_adapter(AdapterConfig.model_validate({"path": str(tmp_path)} | same)).lora_dropout == 0.2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, ["peft_type 'IA3'", "only LORA"]),
        ({"bias": "all"}, ["bias 'all'", "not supported"]),
        ({"rank_pattern": {"q_proj": 2}}, ["rank_pattern {'q_proj': 2}"]),
        ({"init_lora_weights": "pissa_niter_4"}, ["pissa_niter_4", "weights were changed"]),
    ],
)
def test_other_kinds_of_adapters_are_refused(
    tiny_folders: dict[tuple[str, bool], Path], tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    made_by_peft(tiny_folders["llama", False], tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelError, match=r"model\.adapter\.path") as caught:
        resolve_adapter(AdapterConfig(path=str(tmp_path)))
    for word in words:
        assert word in str(caught.value)


def test_folders_without_an_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.adapter\.path = .*no such folder"):
        resolve_adapter(AdapterConfig(path=str(tmp_path / "none")))
    with pytest.raises(ModelError, match=r"model\.adapter\.path = .*holds no adapter_model.safetensors"):
        resolve_adapter(AdapterConfig(path=str(tmp_path)))


def test_an_adapter_of_another_model_is_refused(tiny_folders: dict[tuple[str, bool], Path], tmp_path: Path) -> None:
    made_by_peft(tiny_folders["llama", False], tmp_path / "adapter")
    cfg = resolve_adapter(AdapterConfig(path=str(tmp_path / "adapter")))
    shallow = make_tiny(tmp_path / "shallow", family="llama", hidden=32, ffn=48, layers=1)
    with pytest.raises(ModelError, match=r"does not match.*has model\.layers\.1\..* and \d more.*the model lacks"):
        with_adapter(shallow, cfg)
    wide = make_tiny(tmp_path / "wide", family="llama", hidden=64, ffn=48)
    with pytest.raises(ModelError, match=r"does not match.*has shape \(3, 48\)|does not match.*shape .* in the model"):
        with_adapter(wide, cfg)
    more = cfg.model_copy(update={"target_modules": "all-linear"})
    with pytest.raises(ModelError, match=r"does not match.*has no model\.layers\.0\.self_attn\.k_proj\.lora_A\.weight"):
        with_adapter(tiny_folders["llama", False], more)


# --- trained whole beside it


@pytest.mark.parametrize("wanted", [("lm_head",), ("embed_tokens",), ("lm_head", "embed_tokens"), ("norm",)])
def test_saved_modules_are_trained_whole_and_stay_tied(folder: Path, tmp_path: Path, wanted: tuple[str, ...]) -> None:

    cfg = AdapterConfig(r=2, modules_to_save=wanted)
    policy = stirred(with_adapter(folder, cfg))
    tied = policy.config.tie_word_embeddings
    with torch.no_grad():
        for _, parameter in named_saved_weights(policy):
            parameter += 0.1 * torch.randn_like(parameter)
    assert (policy.head.weight is policy.lm.get_input_embeddings().weight) == tied
    count = 1 if tied or len(wanted) == 1 else 2
    assert len(dict(named_saved_weights(policy))) == count
    outgoing = MergedWeights(policy, ParallelContext(), partial(held_rows, ParallelContext()))
    changing = {name for name, weight in outgoing.merged().items() if not weight.constant}
    assert {name.removeprefix("base_model.model.") for name in outgoing.saved} <= changing
    parts = outgoing.gather_adapter() | outgoing.gather_saved()
    export_adapter(tmp_path / "adapter", policy, parts, ModelConfig(path=str(folder), adapter=cfg), ParallelContext())
    reference = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(reference(IDS).logits, policy.lm(IDS).logits, atol=1e-5, rtol=0)
    again = with_adapter(folder, resolve_adapter(AdapterConfig(path=str(tmp_path / "adapter"))))
    with torch.no_grad():
        torch.testing.assert_close(again.lm(IDS).logits, policy.lm(IDS).logits, atol=1e-6, rtol=0)
    assert saved_names(again).keys() == saved_names(policy).keys()


def test_an_adapter_with_different_values_of_tied_weights_is_refused(
    tiny_folders: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    folder = tiny_folders["qwen2", True]
    made_by_peft(folder, tmp_path, modules_to_save=["lm_head", "embed_tokens"])
    with pytest.raises(
        ModelError, match=r"different values of lm_head.weight and model.embed_tokens.weight, which the model ties"
    ):
        with_adapter(folder, resolve_adapter(AdapterConfig(path=str(tmp_path))))


def test_exported_names_match_only_what_was_trained(folder: Path) -> None:
    policy = load_policy(ModelConfig(path=str(folder)), "cpu", meta=True)
    for wanted, found, written in (
        (("norm",), ["model.norm"], ["model.norm"]),  # peft would take every layer's by `norm`
        (("input_layernorm",), [f"model.layers.{i}.input_layernorm" for i in range(2)], ["input_layernorm"]),
    ):
        cfg = AdapterConfig(modules_to_save=wanted)
        assert find_modules_to_save(policy, cfg) == found
        assert peft_config(policy, cfg).modules_to_save == written


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"modules_to_save": ["lm_haed"]}, ["'lm_haed'", "no weights", "did you mean lm_head"]),
        ({"modules_to_save": ["act_fn"]}, ["'act_fn'", "no weights"]),
        (
            {"modules_to_save": ["mlp"], "target_modules": ["up_proj"]},
            ["mlp.up_proj", "has an adapter as well", "one of the two"],
        ),
    ],
)
def test_modules_that_cannot_be_saved_are_named(folder: Path, settings: dict[str, Any], words: list[str]) -> None:
    policy = load_policy(ModelConfig(path=str(folder)), "cpu", meta=True)
    with pytest.raises(ModelError, match=r"model\.adapter\.modules_to_save") as caught:
        add_adapter(policy, AdapterConfig.model_validate(settings))
    for word in words:
        assert word in str(caught.value)
