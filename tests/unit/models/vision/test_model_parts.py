"""The parts of the supported families, whose names are known here and nowhere in the package."""

import re
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from lockstep.models.vision.model_parts import find_vision, parameter_parts

LAYERS, BLOCKS = 2, 3
EXPECTED = {
    "qwen2_vl": (r"model\.visual\.(?!merger)", r"model\.visual\.merger"),
    "qwen2_5_vl": (r"model\.visual\.(?!merger)", r"model\.visual\.merger"),
    "qwen3_vl": (r"model\.visual\.(?!merger|deepstack)", r"model\.visual\.(merger|deepstack_merger_list)"),
    "smolvlm": (r"model\.vision_model\.", r"model\.connector\."),
    "idefics3": (r"model\.vision_model\.", r"model\.connector\."),
    "gemma3": (r"model\.vision_tower\.", r"model\.multi_modal_projector\."),
    "internvl": (r"model\.vision_tower\.", r"model\.multi_modal_projector\."),
    "llava_onevision": (r"model\.vision_tower\.", r"model\.(multi_modal_projector\.|image_newline)"),
}
"""Patterns of the names of the tower and of the projector; everything else is the language model."""


def build(family: str, *, same_depth: bool = False) -> Any:
    config = CONFIG_MAPPING[family]()
    text, vision = config.get_text_config(), config.vision_config
    text.num_hidden_layers = BLOCKS if same_depth else LAYERS
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    setattr(vision, "depth" if hasattr(vision, "depth") else "num_hidden_layers", BLOCKS)
    if hasattr(vision, "deepstack_visual_indexes"):
        vision.deepstack_visual_indexes = [0]
    with init_empty_weights():
        return AutoModelForImageTextToText.from_config(config)


@pytest.mark.parametrize("same_depth", [False, True])
@pytest.mark.parametrize("family", EXPECTED)
def test_every_parameter_is_in_its_part(family: str, same_depth: bool) -> None:
    lm = build(family, same_depth=same_depth)
    tower, projector = EXPECTED[family]
    parts = parameter_parts(lm)
    for name, parameter in lm.named_parameters():
        expected = "tower" if re.match(tower, name) else "projector" if re.match(projector, name) else "language"
        assert parts[id(parameter)] == expected, name
    assert set(parts.values()) == {"tower", "projector", "language"}


@pytest.mark.parametrize("family", EXPECTED)
def test_the_blocks_are_those_of_the_tower(family: str) -> None:
    lm = build(family, same_depth=True)
    vision = find_vision(lm)
    assert vision is not None and len(vision.blocks) == BLOCKS
    within = {id(module) for module in vision.tower.modules()}
    assert all(id(block) in within for block in vision.blocks)
    assert len({type(block) for block in vision.blocks}) == 1
    assert vision.inside == family.startswith("qwen")


def test_a_language_model_has_one_part() -> None:
    config = CONFIG_MAPPING["qwen2"](hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    with init_empty_weights():
        lm = AutoModelForCausalLM.from_config(config)
    assert find_vision(lm) is None
    assert set(parameter_parts(lm).values()) == {"language"}


def test_an_adapter_belongs_to_the_part_that_it_adapts() -> None:
    lm = build("qwen3_vl")
    block = find_vision(lm).blocks[0]  # type: ignore[union-attr]
    block.adapter = nn.Linear(2, 2, device=torch.device("meta"))
    assert parameter_parts(lm)[id(block.adapter.weight)] == "tower"
