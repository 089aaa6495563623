"""Creates tiny vision-language models with random weights, for examples, tests and dry runs.

Nothing is downloaded. `AutoModelForImageTextToText`, `AutoTokenizer` and `AutoImageProcessor` load the folder.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)

from lockstep.models.tiny_model import (
    DEFAULT_ALPHABET,
    EOS,
    PAD,
    ROLES,
    UNK,
    character_core,
    write_tiny,
)
from lockstep.models.vision.tiny_families import VISION_FAMILIES, TinyVisionFamily, VisionFamily

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for block in message['content'] %}{{ block['text'] }}{% endfor %}{% endif %}"
    "{{ eos_token }}{% endgeneration %}"
    "{% elif message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for block in message['content'] %}"
    "{% if block['type'] == 'image' %}{{ 'IMAGE' }}{% else %}{{ block['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyVision:
    """The settings of a tiny vision-language model, which determine every bit of its weights.

    Raises:
        ValueError: a size is invalid. Names the field, its value, and a valid value.
    """

    family: TinyVisionFamily = "qwen3_vl"
    alphabet: str = DEFAULT_ALPHABET
    """The characters of the tokenizer, one token each. A line break is added, because processors write it."""
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    """vLLM needs heads of at least 32: `hidden` of at least 32 times `heads`."""
    kv_heads: int = 2
    ffn: int = 512
    max_length: int = 512
    """Longest sequence in tokens (`max_position_embeddings`)."""
    tie_embeddings: bool = True
    sliding_window: int = 32
    """In tokens; every second layer of Gemma 3 has it, from the first. Other families have none."""
    vision_hidden: int = 64
    vision_layers: int = 2
    vision_heads: int = 4
    vision_ffn: int = 128
    image_size: int = 32
    """Side of a tile in pixels. Qwen's models have no tiles: the area of an image is at most that of all tiles."""
    tiles: int = 1
    """Most tiles per side of an image, of the families that cut images into tiles: all but Qwen's and Gemma 3."""
    patch: int = 4
    """Side of a patch in pixels."""
    merge: int = 2
    """How many patches per side become one token. LLaVA-OneVision merges none, so its patches are larger by this."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.family not in VISION_FAMILIES:
            known = ", ".join(VISION_FAMILIES)
            raise ValueError(f"family: {self.family!r} is unknown, expected one of {known}")
        for name, value in asdict(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and name != "seed" and value < 1:
                raise ValueError(f"{name}: {value} is too small, expected at least 1")
        self._check_heads("hidden", self.hidden, self.heads, 8)
        self._check_heads("vision_hidden", self.vision_hidden, self.vision_heads, 4)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} does not divide heads = {self.heads}")
        if self.vision_ffn % self.vision_hidden and self.family == "qwen2_vl":
            raise ValueError(
                f"vision_ffn: {self.vision_ffn} is no multiple of vision_hidden = {self.vision_hidden}, as Qwen2-VL "
                f"needs it; nearest: {max(1, round(self.vision_ffn / self.vision_hidden)) * self.vision_hidden}"
            )
        if self.image_size % (self.patch * self.merge):
            side = self.patch * self.merge
            raise ValueError(
                f"image_size: {self.image_size} is no multiple of patch * merge = {side}; "
                f"nearest: {max(1, round(self.image_size / side)) * side}"
            )
        if not self.alphabet:
            raise ValueError("alphabet: is empty, expected at least one character")

    def _check_heads(self, field: str, size: int, heads: int, unit: int) -> None:
        if size % (heads * unit):
            raise ValueError(
                f"{field}: {size} with {heads} heads gives {size / heads:g} per head, expected a multiple of {unit} "
                f"because of rotary positions; nearest: {max(1, round(size / (unit * heads))) * unit * heads}"
            )

    @property
    def features_per_tile(self) -> int:
        """Number of tokens of a tile of `image_size`."""
        return (self.image_size // (self.patch * self.merge)) ** 2


def make_tiny_vision(
    folder: Path | str, model: TinyVision | None = None, *, overwrite: bool = False, **fields: Any
) -> Path:
    """Writes config, random weights, tokenizer, chat template and processor into `folder` and returns it.

    If the folder already holds a model with the same settings, it is not written again.

    Args:
        model: the settings; alternatively keywords: `make_tiny_vision(folder, family="gemma3", seed=3)`.
        overwrite: replace a tiny model in the folder, whatever its settings.

    Raises:
        FileExistsError: the folder has other content.
        ValueError: a size is invalid.
    """
    if model is not None and fields:
        raise ValueError("give either a TinyVision or its fields, not both")
    model = model or TinyVision(**fields)

    def write(scratch: Path) -> None:
        family = VISION_FAMILIES[model.family]
        tokenizer = _tokenizer(model, family)
        tokenizer.save_pretrained(scratch)
        _build_model(model, family, tokenizer).save_pretrained(scratch)
        processor = {"processor_class": family.processor_class}
        files = {
            "preprocessor_config.json": {**processor, **family.image_processor(model)},
            "processor_config.json": {**processor, **family.processor(model)},
        }
        for name, content in files.items():
            (scratch / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    return write_tiny(Path(folder), asdict(model), write, overwrite=overwrite)


def _tokenizer(model: TinyVision, family: VisionFamily) -> PreTrainedTokenizerFast:
    named = family.named_tokens or {}
    specials = list(dict.fromkeys([*ROLES, *family.token_ids.values(), *named.values(), *family.tokens(model)]))
    alphabet = model.alphabet if "\n" in model.alphabet else model.alphabet + "\n"
    core, _ = character_core(specials, alphabet)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=specials,
        model_max_length=model.max_length,
        clean_up_tokenization_spaces=False,
        **named,
    )
    tokenizer.add_tokens(list(family.words))
    tokenizer.chat_template = _CHAT_TEMPLATE.replace("IMAGE", family.placeholder)
    return tokenizer


def _build_model(model: TinyVision, family: VisionFamily, tokenizer: PreTrainedTokenizerFast) -> Any:
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn,
        "max_position_embeddings": model.max_length,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **family.text(model),
    }
    if family.text_type is not None:
        text["model_type"] = family.text_type
    config = AutoConfig.for_model(
        model.family,
        text_config=text,
        vision_config=family.vision(model),
        tie_word_embeddings=model.tie_embeddings,
        dtype="float32",
        **{field: tokenizer.convert_tokens_to_ids(token) for field, token in family.token_ids.items()},
        **family.config(model),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        network = AutoModelForImageTextToText.from_config(config)
        for parameter in network.parameters():
            if parameter.ndim > 1 and not parameter.any():  # Gemma 3's projector, which would hide all images
                torch.nn.init.normal_(parameter, std=0.02)
    return network
