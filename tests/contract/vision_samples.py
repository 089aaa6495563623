"""Tiny vision-language models with prompts and images that transformers' own processors prepared, and transformers' own
forward of each sequence to compare with."""

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from lockstep.config.model import ModelConfig
from lockstep.data.images.image_processor import load_image_processor
from lockstep.data.images.image_store import PreparedImage
from lockstep.data.samples import PlacedImage
from lockstep.models.vision.tiny_vision import make_tiny_vision

SIZES = {
    "hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 48, "layers": 3, "alphabet": "abcdefgh?", "sliding_window": 12,
    "vision_hidden": 16, "vision_heads": 2, "vision_ffn": 32, "vision_layers": 3, "image_size": 16, "tiles": 2,
}  # fmt: skip
"""Small, and of a kind that shows mistakes: as many layers in the tower as in the language model, several tiles, and a
window that is shorter than an image."""
SPARE = "h"
"""A character whose embedding is that of the placeholder token: transformers' own forward takes every placeholder for
an image, so it gets this one where a completion has a placeholder."""


@dataclass(slots=True)
class VisionPrompt:
    """A prompt with images, as a run has it, and as transformers' own model gets it."""

    tokens: list[int]
    placed: list[PlacedImage]
    prepared: list[PreparedImage]
    inputs: dict[str, Tensor]
    """What transformers' processor gave for the whole prompt, without the tokens."""


class VisionSamples:
    """A tiny model of a family, and its prompts."""

    def __init__(self, folder: Path, family: str, **fields: Any) -> None:
        self.folder = make_tiny_vision(folder, family=family, **{**SIZES, **fields})
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.reference = AutoModelForImageTextToText.from_pretrained(self.folder).eval()
        self.image_token = self.reference.config.image_token_id
        self.spare = self.tokenizer.convert_tokens_to_ids(SPARE)
        images = load_image_processor(ModelConfig(path=str(self.folder)), self.tokenizer)
        assert images is not None
        self.images = images
        self._processor = self._make_processor()

    def _make_processor(self) -> Any:
        settings = json.loads((self.folder / "processor_config.json").read_text())
        kind = getattr(transformers, settings.pop("processor_class"))
        parts = [part for part in kind.get_attributes() if part != "video_processor"]
        without_video = type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: parts)})
        unused = {part: None for part in kind.get_attributes() if part == "video_processor"}
        image_processor = AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        return without_video(image_processor=image_processor, tokenizer=self.tokenizer, **unused, **settings)

    def prompt(self, text: str, pictures: list[Image.Image]) -> VisionPrompt:
        content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
        if len(pictures) == 2:
            content.insert(1, {"type": "text", "text": "b"})
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        digests = [self.images.digest(picture.tobytes(), len(pictures)) for picture in pictures]
        prepared = [
            self.images.prepare(picture, digest, len(pictures))
            for picture, digest in zip(pictures, digests, strict=True)
        ]
        tokens, placed = self.images.expand(rendered, prepared)
        found = dict(self._processor(images=[pictures] if pictures else None, text=[rendered], return_tensors="pt"))
        assert found.pop("input_ids")[0].tolist() == tokens.tolist()
        found.pop("attention_mask")
        pixels = {name: value for name, value in found.items() if "token_type_ids" not in name}
        return VisionPrompt(tokens.tolist(), placed, prepared, pixels)

    def share_embedding(self, model: Any) -> None:
        """Gives the spare character the embedding of the placeholder token."""
        with torch.no_grad():
            weight = model.get_input_embeddings().weight
            weight[self.spare] = weight[self.image_token]

    def own_logprobs(self, prompt: VisionPrompt, completion: list[int]) -> Tensor:
        """Computes `[completion]` log-probabilities by transformers' own forward of one sequence."""
        shown = [self.spare if token == self.image_token else token for token in completion]
        tokens = torch.tensor([[*prompt.tokens, *shown]])
        types = torch.zeros_like(tokens)
        for image in prompt.placed:
            types[0, torch.from_numpy(image.places.astype(np.int64))] = 1
        accepted = inspect.signature(inspect.unwrap(self.reference.forward)).parameters
        inputs = {name: types for name in ("token_type_ids", "mm_token_type_ids") if name in accepted}
        logits = self.reference(input_ids=tokens, **inputs, **prompt.inputs).logits[0]
        chosen = torch.log_softmax(logits, dim=-1)[len(prompt.tokens) - 1 : -1]
        return chosen.gather(-1, torch.tensor(completion)[:, None]).squeeze(-1)


def picture(width: int, height: int, seed: int) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 255, (height, width, 3), dtype=np.uint8))
