"""Tiny vision-language models with prepared images in a store, and what transformers itself generates for them.

`own_inputs` calls transformers' processor on its own: it shares nothing with Lockstep's preparation of images.
"""

import inspect
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from lockstep.config.model import ModelConfig
from lockstep.data.images.image_processor import load_image_processor
from lockstep.data.images.image_store import ImageStore
from lockstep.data.samples import PlacedImage
from lockstep.models.vision.tiny_vision import make_tiny_vision
from lockstep.rollout.engine_protocol import Request

SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 48, "tiles": 2, "vision_hidden": 32, "vision_ffn": 32,
         "max_length": 4096, "alphabet": "abcdefgh?: ", "tie_embeddings": False}  # fmt: skip


@dataclass(frozen=True)
class PicturePrompt:
    """A prompt as the engine gets it, and what it is made of."""

    text: str
    pictures: list[Image.Image]
    tokens: np.ndarray
    images: tuple[PlacedImage, ...]

    def requests(self, group: str, count: int = 1, **fields: Any) -> list[Request]:
        """Requests of a group, the first of them greedy."""
        settings = {"max_tokens": 12, "ignore_eos": True, "images": self.images, **fields}
        temperatures = [0.0] + [1.0] * (count - 1)
        return [
            Request(f"{group}/{k}", group, self.tokens, seed=k, temperature=temperatures[k], **settings)
            for k in range(count)
        ]


@dataclass
class VisionScene:
    """A tiny model with its processor and a store of prepared images."""

    home: Path
    family: str
    folder: Path = field(init=False)
    store: ImageStore = field(init=False)

    def __post_init__(self) -> None:
        self.folder = make_tiny_vision(self.home / self.family, family=self.family, **SIZES)
        self.store = ImageStore(self.home / f"{self.family}-images")
        lm = AutoModelForImageTextToText.from_pretrained(self.folder)
        torch.manual_seed(1)
        with torch.no_grad():  # so that rounding does not change a choice, and pictures matter
            for parameter in lm.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(3.0)
        lm.save_pretrained(self.folder)

    def load(self) -> Any:
        return AutoModelForImageTextToText.from_pretrained(self.folder, attn_implementation="sdpa").eval()

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def processor(self) -> Any:
        return load_image_processor(ModelConfig(path=str(self.folder)), self.tokenizer)

    def prompt(self, text: str, *pictures: Image.Image) -> PicturePrompt:
        """Makes a prompt. `*` in the text stands for a picture."""
        text = text.replace("*", self.processor.placeholder)
        prepared = []
        for each in pictures:
            digest = self.processor.digest(each.tobytes() + bytes(each.size), len(pictures))
            prepared.append(self.processor.prepare(each, digest, len(pictures)))
            self.store.write(prepared[-1])
        tokens, placed = self.processor.expand(text, prepared)
        return PicturePrompt(text, list(pictures), tokens, tuple(placed))

    @cached_property
    def _own_processor(self) -> Any:
        settings = json.loads((self.folder / "processor_config.json").read_text())
        kind = getattr(transformers, settings.pop("processor_class"))
        parts = [part for part in kind.get_attributes() if part != "video_processor"]
        own = type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda cls: parts)})
        unused = {part: None for part in kind.get_attributes() if part == "video_processor"}
        image_processor = AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        return own(image_processor=image_processor, tokenizer=self.tokenizer, **unused, **settings)

    def own_inputs(self, lm: Any, prompt: PicturePrompt) -> dict[str, torch.Tensor]:
        """The arguments of the model's own forward."""
        if not prompt.pictures:
            return {"input_ids": torch.from_numpy(prompt.tokens.astype(np.int64))[None]}
        texts = {"text": [prompt.text], "add_special_tokens": False, "return_tensors": "pt"}
        inputs = dict(self._own_processor(images=[prompt.pictures], **texts, return_mm_token_type_ids=True))
        assert inputs["input_ids"][0].tolist() == prompt.tokens.tolist()
        accepted = inspect.signature(lm.forward).parameters
        if "token_type_ids" in accepted:  # Gemma 3's name
            inputs["token_type_ids"] = inputs.pop("mm_token_type_ids", inputs.get("token_type_ids"))
        return {name: values for name, values in inputs.items() if name in accepted and name != "attention_mask"}

    @torch.inference_mode()
    def own_greedy(self, lm: Any, prompt: PicturePrompt, tokens: int) -> list[int]:
        """What transformers' `generate` generates."""
        settings = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = lm.generate(**self.own_inputs(lm, prompt), **settings)
        return out[0, len(prompt.tokens) :].tolist()

    @torch.inference_mode()
    def own_logprobs(self, lm: Any, prompt: PicturePrompt, tokens: np.ndarray) -> np.ndarray:
        """Log-probabilities of the tokens of a completion, float32 `[tokens]`, by the model's own forward.

        The prompt and the completion are two calls: in one, the model would take a generated placeholder token for the
        place of an image.
        """
        after = torch.from_numpy(tokens.astype(np.int64))
        first = lm(**self.own_inputs(lm, prompt), use_cache=True, logits_to_keep=1)
        then = lm(input_ids=after[None, :-1], past_key_values=first.past_key_values, use_cache=True)
        logits = torch.cat([first.logits[0, -1:], then.logits[0]])
        return torch.log_softmax(logits.float(), -1).gather(1, after[:, None])[:, 0].numpy()
