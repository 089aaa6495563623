"""The sizes of what is measured on a GPU, and small ones for a dry run on a CPU."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from lockstep.models.tiny_model import EOS, PAD, TinyModel, char_tokenizer

LETTERS = 60
"""Tokens 4 to 4 + LETTERS are single characters in every model's tokenizer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 model with random weights; sizes as in the published Qwen2.5 configs."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int = 151_936
    length: int = 4096

    def write(self, folder: Path, device: torch.device) -> Path:
        """Writes config, weights in bf16 and a tokenizer of single characters into `folder`, unless it is there."""
        if (folder / "config.json").exists():
            return folder
        tokenizer = char_tokenizer(TinyModel(max_length=self.length))
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.ffn,
            max_position_embeddings=self.length,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
            eos_token_id=tokenizer.convert_tokens_to_ids(EOS),
            dtype="bfloat16",
        )
        torch.manual_seed(0)
        with device:  # a billion random numbers take a minute on a CPU
            model = Qwen2ForCausalLM(config).to(torch.bfloat16)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        return folder

    @property
    def matrices(self) -> int:
        """Parameters that every token is multiplied with: the layers' matrices and the head."""
        attention = self.hidden * (self.hidden // self.heads) * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.hidden * self.vocabulary

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token, in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * (self.hidden // self.heads)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one run of the measurements does."""

    device: str
    shapes: tuple[Shape, ...]
    documents: int
    """Per optimizer step of SFT, of 64 to `document_tokens` tokens."""
    document_tokens: int
    token_budget: int
    """Tokens of one row of the trainer."""
    decode_rows: tuple[int, ...]
    decode_tokens: int
    prompt_tokens: int
    matmul: int
    """Rows and columns of the square matrices whose product is measured."""
    copied: int
    """Bytes of the measured copy."""
    repeats: int


GPU = Sizes(
    "cuda",
    (
        Shape("0.5B", 896, 24, 14, 2, 4864),
        Shape("1.5B", 1536, 28, 12, 2, 8960),
    ),
    documents=64, document_tokens=2048, token_budget=16_384, decode_rows=(1, 64, 256), decode_tokens=256,
    prompt_tokens=256, matmul=8192, copied=4 << 30, repeats=5,
)  # fmt: skip
DRY = Sizes(
    "cpu",
    (Shape("toy", 32, 2, 4, 2, 64, vocabulary=128, length=256),),
    documents=4, document_tokens=96, token_budget=256, decode_rows=(1, 4), decode_tokens=4, prompt_tokens=8,
    matmul=64, copied=1 << 16, repeats=1,
)  # fmt: skip
"""The dry run: every line of a measurement in seconds on a CPU. Its numbers mean nothing."""
