"""Sizes and costs of vision towers, compared with counts of torch and with the figures of published models."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText

from lockstep.config.model import ModelConfig
from lockstep.config.vision import VisionConfig
from lockstep.data.images.image_processor import load_image_processor
from lockstep.models.model_facts import model_facts
from lockstep.models.model_loader import load_tokenizer
from lockstep.models.vision.row_images import image_features, row_images
from lockstep.models.vision.tiny_families import VISION_FAMILIES
from lockstep.models.vision.tiny_vision import make_tiny_vision
from lockstep.models.vision.vision_facts import vision_facts


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def folder(request, tmp_path_factory) -> str:
    fields = {"hidden": 64, "heads": 2, "ffn": 64, "alphabet": "ab", "vision_ffn": 256, "image_size": 32}
    return str(make_tiny_vision(tmp_path_factory.mktemp("tiny") / request.param, family=request.param, **fields))


def test_the_parts_are_the_whole(folder: str) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    facts = model_facts(ModelConfig(path=folder), "cpu")
    assert facts.vision is not None
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    decoder = sum(parameter.numel() for parameter in model.get_decoder().parameters())
    assert facts.vision.tower + facts.vision.projector == facts.parameters - decoder  # the head is tied
    assert facts.vision.blocks == 2 and facts.vision.hidden == 64 and facts.vision.block > 64 * 256 * 2
    assert facts.root == facts.vocabulary * facts.hidden + facts.hidden  # embedding and last norm
    assert facts.frozen == 0


def test_a_frozen_part_is_counted(folder: str) -> None:
    cfg = ModelConfig(path=folder, vision=VisionConfig.model_validate({"tower": {"train": False}}))
    facts = model_facts(cfg, "cpu")
    assert facts.vision is not None and facts.frozen == facts.vision.tower


def test_operations_are_those_that_torch_counts(folder: str) -> None:
    """Within the patch embedding, which is not counted, and the windows of Qwen2.5-VL."""
    cfg = ModelConfig(path=folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    images, facts = load_image_processor(cfg, load_tokenizer(cfg)), vision_facts(model)
    assert images is not None and facts is not None
    from PIL import Image

    image = images.prepare(Image.new("RGB", (32, 32), (90, 20, 200)), "0123456789abcdef")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        found = image_features(model, row_images([image], [], "cpu").inputs)
    assert len(found.rows) == image.features
    # LLaVA-OneVision has the whole image and its only tile, and a token at the end of each line
    tokens = image.features if "llava" not in folder else 2 * 16
    assert 0.75 < counter.get_total_flops() / facts.flops(tokens) < 1.35


def test_the_costs_of_a_published_model() -> None:
    """Qwen2.5-VL-3B with an image of 1008 x 1008 pixels: 1296 tokens, 669 million parameters of tower and projector."""
    config = AutoConfig.for_model("qwen2_5_vl")
    config.vision_config.hidden_size, config.vision_config.out_hidden_size = 1280, 2048
    text = config.text_config
    text.hidden_size, text.num_attention_heads, text.num_key_value_heads, text.num_hidden_layers = 2048, 16, 2, 1
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    facts = vision_facts(model)
    assert facts is not None
    assert facts.tower + facts.projector == pytest.approx(668.7e6, rel=0.01)
    assert (facts.blocks, facts.hidden, facts.patches_per_token) == (32, 1280, 4)
    # 7.2e12 with windows, without the layers that attend to the whole image
    assert 7.2e12 < facts.flops(1296) < 11.5e12
    assert facts.activation_bytes(1296, 2, checkpointing=True) == 1296 * 4 * 2 * 1280 * 32
