"""The table of image tokens and tower sizes in docs/vision.md is what processors and models of these sizes have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from lockstep.config.model import ModelConfig
from lockstep.data.images.image_processor import load_image_processor
from lockstep.models.model_loader import load_tokenizer
from lockstep.models.vision.tiny_vision import make_tiny_vision
from lockstep.models.vision.vision_facts import vision_facts

PAGE = Path(__file__).parents[4] / "docs" / "vision.md"
SIGLIP = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
QWEN = {"depth": 32, "num_heads": 16, "patch_size": 14}
MODELS: dict[str, tuple[str, dict[str, int], dict[str, Any], int, dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2-VL-2B", {"image_size": 2800, "patch": 14, "merge": 2},
        {**QWEN, "embed_dim": 1280, "hidden_size": 1536}, 1536, {},
    ),
    "qwen2_5_vl": (
        "Qwen2.5-VL-3B", {"image_size": 2800, "patch": 14, "merge": 2},
        {**QWEN, "hidden_size": 1280, "out_hidden_size": 2048, "intermediate_size": 3420}, 2048, {},
    ),
    "qwen3_vl": (
        "Qwen3-VL-4B", {"image_size": 3200, "patch": 16, "merge": 2},
        {
            "depth": 24, "num_heads": 16, "patch_size": 16, "hidden_size": 1024, "out_hidden_size": 2560,
            "intermediate_size": 4096, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
        },
        2560, {},
    ),
    "idefics3": (
        "Idefics3-8B", {"image_size": 364, "patch": 14, "merge": 2, "tiles": 4},
        {**SIGLIP, "image_size": 364, "patch_size": 14}, 4096, {"scale_factor": 2},
    ),
    "smolvlm": (
        "SmolVLM2-500M", {"image_size": 512, "patch": 16, "merge": 4, "tiles": 4},
        {
            "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
            "image_size": 512, "patch_size": 16,
        },
        960, {"scale_factor": 4},
    ),
    "gemma3": (
        "Gemma-3-4B", {"image_size": 896, "patch": 14, "merge": 4},
        {**SIGLIP, "image_size": 896, "patch_size": 14, "vision_use_head": False}, 2560, {"mm_tokens_per_image": 256},
    ),
    "internvl": (
        "InternVL3-1B", {"image_size": 448, "patch": 14, "merge": 2, "tiles": 3},
        {
            "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
            "image_size": [448, 448], "patch_size": [14, 14], "model_type": "internvl_vision",
        },
        896, {"downsample_ratio": 0.5},
    ),
    "llava_onevision": (
        "LLaVA-OneVision-0.5B", {"image_size": 378, "patch": 14, "merge": 1, "tiles": 6},
        {**SIGLIP, "num_hidden_layers": 26, "image_size": 384, "patch_size": 14, "vision_use_head": False}, 896, {},
    ),
}  # fmt: skip
"""By family: a published model, the sizes of its processor for a tiny one, its `vision_config`, the hidden size of its
language model, and further settings. The tiles of LLaVA-OneVision have 378 pixels here, a multiple of the patch."""


def tokens_of(home: Path, family: str, sizes: dict[str, int]) -> list[int]:
    """Tokens of square images of these sides."""
    cfg = ModelConfig(path=str(make_tiny_vision(home / family, family=family, max_length=64, **sizes)))
    processor = load_image_processor(cfg, load_tokenizer(cfg))
    assert processor is not None
    return [processor.expansion((side, side)).features for side in (448, 1008, 2016)]


def row(home: Path, family: str) -> str:
    name, sizes, vision, hidden, further = MODELS[family]
    config = AutoConfig.for_model(family, vision_config=vision, **further)
    text = config.get_text_config()
    text.hidden_size, text.num_hidden_layers = hidden, 1
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    facts, tokens = vision_facts(model), tokens_of(home, family, sizes)
    assert facts is not None
    parameters = (facts.tower + facts.projector) / 1e6
    kept, recomputed = (facts.activation_bytes(tokens[1], 2, again) / 2**30 for again in (False, True))
    counts = " | ".join(f"{count:,}" for count in tokens)
    return f"| {name} | {counts} | {parameters:,.0f} | {2 * parameters / 1e3:.1f} | {kept:.1f} | {recomputed:.2f} |"


@pytest.mark.parametrize("family", MODELS)
def test_the_table_is_true(tmp_path: Path, family: str) -> None:
    assert row(tmp_path, family) in PAGE.read_text().splitlines()
