"""Tiny vision-language models are ordinary folders: transformers' own classes load them and expand their prompts."""

import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from lockstep.models.tiny_model import TinyModel, holds_tiny, make_tiny
from lockstep.models.vision.tiny_families import VISION_FAMILIES
from lockstep.models.vision.tiny_vision import TinyVision, make_tiny_vision

SMALL = {
    "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 24, "layers": 2, "alphabet": "ab?",
    "vision_hidden": 16, "vision_heads": 2, "vision_ffn": 16,
}  # fmt: skip
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 56, 3), dtype=np.uint8))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_loads_with_transformers(tmp_path, family: str, tied: bool) -> None:
    folder = make_tiny_vision(tmp_path / "m", family=family, tie_embeddings=tied, **SMALL)
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.config.model_type == family
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    text = model.config.get_text_config()
    assert text.vocab_size == len(tokenizer) == model.get_output_embeddings().weight.shape[0]
    assert text.max_position_embeddings == tokenizer.model_max_length == 512
    assert text.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer.encode("ab?\n")) == "ab?\n"


def _processor(folder, image_processor, tokenizer):
    """transformers' processor of the folder, without the part for videos, which needs torchvision."""
    settings = json.loads((folder / "processor_config.json").read_text())
    kind = getattr(transformers, settings.pop("processor_class"))
    parts = [part for part in kind.get_attributes() if part != "video_processor"]
    without_video = type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: parts)})
    unused = {part: None for part in kind.get_attributes() if part == "video_processor"}
    return without_video(image_processor=image_processor, tokenizer=tokenizer, **unused, **settings)


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_the_processor_expands_an_image_to_as_many_tokens_as_it_has_features(
    tmp_path, family: str, tiles: int, monkeypatch
) -> None:
    if family == "smolvlm":  # the package writes numbers of frames in words; images need none
        monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    folder = make_tiny_vision(tmp_path / "m", family=family, tiles=tiles, **SMALL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = _processor(folder, AutoImageProcessor.from_pretrained(folder), tokenizer)
    content = [{"type": "image"}, {"type": "text", "text": "a?"}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    inputs = processor(images=[PICTURE], text=[prompt], return_tensors="pt")
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    model(**inputs)  # compares the number of placeholders with that of features
    expanded = tokenizer.decode(inputs["input_ids"][0])
    assert expanded.startswith("<user>") and expanded.endswith("a?<assistant>") and "<unk>" not in expanded


def test_the_chat_template_marks_the_assistant_in_both_forms_of_content(tmp_path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_vision(tmp_path / "m", **SMALL))
    plain = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "bb"}]
    blocks = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in plain]
    for messages in (plain, blocks):
        found = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert tokenizer.decode(found["input_ids"]) == "<user>a?<assistant>bb<eos>"
        assert found["assistant_masks"] == [0] * 4 + [1] * 3


def test_the_seed_decides_the_weights_and_nothing_else_does(tmp_path) -> None:
    before = torch.random.get_rng_state()
    folders = [make_tiny_vision(tmp_path / str(i), seed=seed, **SMALL) for i, seed in enumerate((0, 0, 1))]
    assert torch.equal(torch.random.get_rng_state(), before)
    first, second, third = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == second != third


def test_a_folder_of_other_settings_is_kept_unless_it_may_be_replaced(tmp_path) -> None:
    folder = make_tiny_vision(tmp_path / "m", **SMALL)
    written = (folder / "config.json").stat().st_mtime_ns
    assert make_tiny_vision(folder, **SMALL) == folder and (folder / "config.json").stat().st_mtime_ns == written
    with pytest.raises(FileExistsError, match="other settings"):
        make_tiny_vision(folder, **SMALL, seed=1)
    with pytest.raises(FileExistsError, match="other settings"):
        make_tiny(folder)
    make_tiny(folder, overwrite=True)
    assert holds_tiny(folder, TinyModel())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"family": "clip"}, "family: 'clip' is unknown, expected one of qwen2_vl"),
        ({"patch": 0}, "patch: 0 is too small"),
        ({"hidden": 100}, "hidden: 100 with 4 heads gives 25 per head, .* nearest: 96"),
        ({"vision_hidden": 10}, "vision_hidden: 10 with 4 heads"),
        ({"kv_heads": 3}, "kv_heads: 3 does not divide heads = 4"),
        ({"image_size": 30}, "image_size: 30 is no multiple of patch \\* merge = 8; nearest: 32"),
        ({"family": "qwen2_vl", "vision_ffn": 100}, "vision_ffn: 100 is no multiple of vision_hidden = 64"),
        ({"alphabet": ""}, "alphabet: is empty"),
    ],
)
def test_invalid_sizes_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyVision(**fields)
