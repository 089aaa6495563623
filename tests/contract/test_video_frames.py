"""A video in the data is frames of the prompt: log-probabilities of completions below it, packed together, equal the
model's own forward of each sequence with what transformers' own template and processor make of the same images."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from lockstep.config.data import DatasetConfig
from lockstep.data.datasets import load_rows
from lockstep.data.images.image_store import ImageStore
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.samples import Prompt
from lockstep.data.source_factory import SourceOptions, open_source
from tests.contract.test_vision_models import VisionPrompt, VisionSamples, loaded, pack, row_logprobs
from tests.contract.vision_samples import picture

FAMILIES = ["qwen3_vl", "smolvlm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "internvl"))]
FRAMES = [picture(28, 20, seed) for seed in range(4)]


def taken(samples: VisionSamples, folder: Path) -> tuple[Prompt, ImageStore]:
    """The prompt of a row with a video of four frames."""
    first, *others = FRAMES
    first.save(folder / "clip.webp", save_all=True, append_images=others, duration=500, lossless=True)
    (folder / "data.jsonl").write_text(json.dumps({"problem": "<video>abc?", "video": "clip.webp", "answer": "a"}))
    cfg = DatasetConfig(path=str(folder / "data.jsonl"), chat=True)
    store = ImageStore(folder / "images")
    options = SourceOptions(images=samples.images, image_store=store)
    source = open_source("prompts", load_rows(cfg), cfg, samples.tokenizer, 0, LengthLimit(4000), options)
    return source.take(0, 1)[0], store


def own_prompt(samples: VisionSamples, prompt: Prompt, store: ImageStore, frames: list[Image.Image]) -> VisionPrompt:
    """The prompt with the tokens that the run has, and the inputs that transformers' processor makes of the frames."""
    assert prompt.conversation is not None
    rendered = samples.tokenizer.apply_chat_template(prompt.conversation, add_generation_prompt=True, tokenize=False)
    found = dict(samples._processor(images=[frames], text=[rendered], return_tensors="pt"))
    assert found.pop("input_ids")[0].tolist() == prompt.tokens.tolist()
    found.pop("attention_mask")
    pixels = {name: value for name, value in found.items() if "token_type_ids" not in name}
    prepared = [store.read(image.digest) for image in prompt.images]
    return VisionPrompt(prompt.tokens.tolist(), prompt.images, prepared, pixels)


def own_logprobs(samples: VisionSamples, prompt: VisionPrompt, completions: list[list[int]]) -> Tensor:
    with torch.no_grad():
        return torch.cat([samples.own_logprobs(prompt, each) for each in completions])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_video_of_four_frames(family: str, tmp_path: Path) -> None:
    samples = VisionSamples(tmp_path / "model", family, alphabet="abcdefgh?<>. 0123456789sonFrm:YuipvtlwHMS[]")
    prompt, store = taken(samples, tmp_path)
    assert [image.origin[-2:] for image in prompt.images] == ["#0", "#1", "#2", "#3"]
    shown = own_prompt(samples, prompt, store, FRAMES)
    completions = [samples.tokenizer.convert_tokens_to_ids(list(text)) for text in ("abcdefg", "gf?", "ddab")]
    policy = loaded(samples, fused=True)
    with torch.no_grad():
        found = row_logprobs(policy, pack([(shown, completions)]))
    expected = own_logprobs(samples, shown, completions)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-5)
    # The order of the frames counts.
    other = own_prompt(samples, prompt, store, FRAMES[::-1])
    assert float((own_logprobs(samples, other, completions) - expected).abs().max()) > 1e-4
