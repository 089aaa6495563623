"""Creates tiny models with random weights and a tokenizer of single characters, for examples, tests and dry runs.

Nothing is downloaded. `AutoModelForCausalLM.from_pretrained` loads the folder.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lockstep.base.folders import make_scratch_dir
from lockstep.base.json_text import read_json
from lockstep.models.huggingface import quiet_transformers

TinyFamily = Literal["qwen2", "llama"]
TINY_FAMILIES: tuple[TinyFamily, ...] = ("qwen2", "llama")

DEFAULT_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ +-*/=()<>[]{}.,:;!?'\"#$%&@_|\n"
PAD, EOS, BOS, UNK = "<pad>", "<eos>", "<bos>", "<unk>"
ROLES = ("<system>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
_RECIPE_FILE = "lockstep_tiny.json"
_ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """The settings of a tiny model, which determine every bit of its weights.

    Raises:
        ValueError: a size is invalid. Names the field, its value, and a valid value.
    """

    family: TinyFamily = "qwen2"
    alphabet: str = DEFAULT_ALPHABET
    """The characters of the tokenizer, one token each. Other characters become `<unk>` in Llama's tokenizer, and are
    dropped by Qwen2's, which has no unknown token."""
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 512
    max_length: int = 256
    """Longest sequence in tokens (`max_position_embeddings`)."""
    tie_embeddings: bool = True
    bos: bool = False
    """Whether the tokenizer puts `<bos>` before every text."""
    chat: bool = False
    """Whether the tokenizer has role tokens and a chat template with assistant masks."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.family not in TINY_FAMILIES:
            raise ValueError(f"family: {self.family!r} is unknown, expected one of {', '.join(TINY_FAMILIES)}")
        for name in ("hidden", "layers", "heads", "kv_heads", "ffn", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is too small, expected at least 1")
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ValueError(
                f"hidden: {self.hidden} with {self.heads} heads gives {self.hidden / self.heads:g} per head, expected "
                f"an even whole number; nearest: {max(1, round(self.hidden / (2 * self.heads))) * 2 * self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} does not divide heads = {self.heads}")
        if not self.alphabet:
            raise ValueError("alphabet: is empty, expected at least one character")


def make_tiny(folder: Path | str, model: TinyModel | None = None, *, overwrite: bool = False, **fields: Any) -> Path:
    """Writes config, random weights and tokenizer into `folder` and returns it.

    If the folder already holds a model with the same settings, it is not written again.

    Args:
        model: the settings; alternatively keywords: `make_tiny(folder, family="llama", seed=3)`.
        overwrite: replace a tiny model in the folder, whatever its settings.

    Raises:
        FileExistsError: the folder has other content.
        ValueError: a size is invalid.
    """
    if model is not None and fields:
        raise ValueError("give either a TinyModel or its fields, not both")
    model = model or TinyModel(**fields)

    def write(scratch: Path) -> None:
        tokenizer = char_tokenizer(model)
        tokenizer.save_pretrained(scratch)
        _build_model(model, tokenizer).save_pretrained(scratch)

    return write_tiny(Path(folder), asdict(model), write, overwrite=overwrite)


def write_tiny(folder: Path, recipe: dict[str, Any], write: Callable[[Path], None], *, overwrite: bool) -> Path:
    """Writes a model's files into `folder` by `write`, all or none, unless it holds a model of the same recipe.

    Args:
        recipe: the settings as JSON values, which are written beside the model.

    Raises:
        FileExistsError: the folder has other content.
    """
    replaced = folder.exists() and any(folder.iterdir())
    if replaced:
        if _read_recipe(folder) == recipe and not overwrite:
            return folder
        _check_replaceable(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch, hold = make_scratch_dir(f".{folder.name}.tmp-", folder.parent)
    try:
        with quiet_transformers():
            write(scratch)
        (scratch / _RECIPE_FILE).write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
        scratch.chmod(0o755)
        if replaced:
            folder.rename(old := Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent)) / "old")
        elif folder.exists():
            folder.rmdir()
        scratch.rename(folder)
        if replaced:
            shutil.rmtree(old.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(hold)
    return folder


def holds_tiny(folder: Path, model: TinyModel) -> bool:
    """Whether the folder holds a tiny model that was made with these settings."""
    return _read_recipe(folder) == asdict(model)


def _check_replaceable(folder: Path, overwrite: bool) -> None:
    if _read_recipe(folder) is None:
        raise FileExistsError(f"{folder} has files, but holds no tiny model; choose another folder")
    if not overwrite:
        raise FileExistsError(
            f"{folder} holds a tiny model with other settings; choose another folder, or replace it with --overwrite"
        )


def char_tokenizer(model: TinyModel) -> PreTrainedTokenizerFast:
    """Makes a tokenizer with the special tokens, then one token per character of the alphabet.

    It is a byte-level BPE that merges only the bytes of one character, because transformers rebuilds Qwen2's tokenizer
    from vocabulary and merges and ignores the rest of `tokenizer.json`.
    """
    specials = [*([BOS] if model.bos else []), *(ROLES if model.chat else [])]
    core, vocabulary = character_core(specials, model.alphabet)
    if model.bos:
        core.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        bos_token=BOS if model.bos else None,
        additional_special_tokens=list(ROLES) if model.chat else None,
        model_max_length=model.max_length,
        clean_up_tokenization_spaces=False,
    )
    if model.chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def character_core(specials: list[str], alphabet: str) -> tuple[Tokenizer, dict[str, int]]:
    """Returns the tokenizer of `char_tokenizer` without transformers' part, and its vocabulary.

    Args:
        specials: special tokens in addition to those for padding, the end of a sequence and unknown characters.
    """
    vocabulary, merges = _characters([PAD, EOS, UNK, *specials], alphabet)
    core = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=UNK, fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return core, vocabulary


def _characters(specials: list[str], alphabet: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns vocabulary and merges: special tokens, then characters, then the bytes of characters outside ASCII."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    symbols = ["".join(piece for piece, _ in byte_level.pre_tokenize_str(character)) for character in alphabet]
    merges: dict[tuple[str, str], None] = {}
    for symbol in symbols:
        for end in range(1, len(symbol)):
            merges[symbol[:end], symbol[end]] = None
    parts = [part for pair in merges for part in pair]
    tokens = dict.fromkeys([*specials, *symbols, *parts])
    return {token: index for index, token in enumerate(tokens)}, list(merges)


def _build_model(model: TinyModel, tokenizer: PreTrainedTokenizerFast) -> Any:
    config_class, network_class = _ARCHITECTURES[model.family]
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        intermediate_size=model.ffn,
        max_position_embeddings=model.max_length,
        tie_word_embeddings=model.tie_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(model.seed)
        return network_class(config)


def _read_recipe(folder: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = read_json(folder / _RECIPE_FILE)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return found
