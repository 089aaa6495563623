"""Frozen parts of vision-language models: what is trained, adapted, published, and measured."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.model import AdapterConfig, ModelConfig
from lockstep.models.errors import ModelError
from lockstep.models.lora import add_adapter, find_targets, named_adapter
from lockstep.models.model_facts import model_facts
from lockstep.models.model_loader import load_policy
from lockstep.models.policy_model import PolicyModel
from lockstep.models.tiny_model import make_tiny
from lockstep.models.vision.model_parts import parameter_parts
from lockstep.models.vision.tiny_vision import make_tiny_vision
from lockstep.rollout.errors import WeightsMismatch
from lockstep.rollout.weight_loading import ExpectedParameters

SIZES = {"hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "vision_hidden": 16, "vision_heads": 2, "vision_ffn": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vision")
    for family in ("qwen3_vl", "idefics3"):
        make_tiny_vision(made / family, family=family, **SIZES)
    make_tiny(made / "text")
    return made


def load(folder: Path, family: str, **model: Any) -> PolicyModel:
    return load_policy(ModelConfig(path=str(folder / family), **model), "cpu", meta=True)


def frozen(*parts: str) -> dict[str, Any]:
    return {part: {"train": False} for part in parts}


def trained_parts(policy: PolicyModel) -> set[str]:
    parts = parameter_parts(policy.lm)
    return {parts[id(each)] for each in policy.parameters() if each.requires_grad}


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_only_parts_that_the_config_trains_need_gradients(folder: Path, family: str) -> None:
    assert trained_parts(load(folder, family)) == {"tower", "projector", "language"}
    assert trained_parts(load(folder, family, vision=frozen("tower"))) == {"projector", "language"}
    assert trained_parts(load(folder, family, vision=frozen("tower", "language"))) == {"projector"}


def test_a_language_model_cannot_be_frozen_as_a_whole(folder: Path) -> None:
    assert trained_parts(load(folder, "text", vision=frozen("tower", "projector"))) == {"language"}
    with pytest.raises(ModelError, match=r"model\.vision.*language.*train to true"):
        load(folder, "text", vision=frozen("language"))


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_all_linear_means_the_language_model(folder: Path, family: str) -> None:
    policy = load(folder, family)
    add_adapter(policy, AdapterConfig())
    parts = parameter_parts(policy.lm)
    assert {parts[id(each)] for _, each in named_adapter(policy)} == {"language"}
    assert trained_parts(policy) == {"language"}


def test_names_reach_the_tower_unless_it_is_frozen(folder: Path) -> None:
    cfg = AdapterConfig(target_modules=("q_proj",))
    both = find_targets(load(folder, "idefics3"), cfg)
    assert {name.split(".")[1] for name in both} == {"vision_model", "text_model"}
    policy = load(folder, "idefics3", vision=frozen("tower"))
    assert {name.split(".")[1] for name in find_targets(policy, cfg)} == {"text_model"}
    add_adapter(policy, cfg)
    assert trained_parts(policy) == {"language"}
    with pytest.raises(ModelError, match=r"no layer of that name in the parts that model\.vision trains"):
        find_targets(load(folder, "idefics3", vision=frozen("tower")), AdapterConfig(target_modules=("out_proj",)))
    with pytest.raises(ModelError, match=r"model\.vision freezes the language model"):
        find_targets(load(folder, "idefics3", vision=frozen("language")), AdapterConfig())


def test_engines_take_versions_without_a_part_but_not_without_some_of_it(folder: Path) -> None:
    lm = load(folder, "qwen3_vl").lm
    tensors = dict(lm.named_parameters())
    expected = ExpectedParameters(lm)
    expected.check(tensors)
    expected.check({name: each for name, each in tensors.items() if "visual" not in name})
    expected.check({name: each for name, each in tensors.items() if "merger" in name})
    with pytest.raises(WeightsMismatch, match=r"visual\.blocks\.0\.attn\.qkv\.weight"):
        expected.check({name: each for name, each in tensors.items() if "blocks.0.attn.qkv" not in name})
    with pytest.raises(WeightsMismatch):
        expected.check({})


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_facts_count_parameters_by_part(folder: Path, family: str) -> None:
    policy = load(folder, family)
    parts, weights = parameter_parts(policy.lm), list(policy.parameters())
    seeing = sum(each.numel() for each in weights if parts[id(each)] != "language")
    facts = model_facts(ModelConfig(path=str(folder / family)), "cpu")
    assert facts.vision is not None and facts.vision.tower + facts.vision.projector == seeing
    assert (facts.frozen, facts.copied, facts.trained) == (0, 0, facts.parameters)
    assert facts.vision.hidden == SIZES["vision_hidden"] and facts.vision.blocks == 2
    # blocks, the rest of the tower (in Qwen with the projector), and a projector beside it
    assert facts.vision_units == 3 + (family == "idefics3")
    layers = sum(each.numel() for layer in policy.layers for each in layer.parameters())
    assert facts.root == facts.parameters - layers - seeing
    cold = model_facts(
        ModelConfig.model_validate({"path": str(folder / family), "vision": frozen("tower", "projector")}), "cpu"
    )
    assert cold.vision_units == 0 and cold.changing == {"language"}
    assert cold.frozen == cold.copied == seeing and cold.trained == facts.parameters - seeing
    adapted = model_facts(ModelConfig(path=str(folder / family), adapter=AdapterConfig(r=2)), "cpu")
    assert adapted.copied == seeing and adapted.frozen == 0


def test_a_language_model_has_no_vision(folder: Path) -> None:
    facts = model_facts(ModelConfig(path=str(folder / "text")), "cpu")
    assert facts.vision is None and facts.trained == facts.parameters and facts.copied == 0
