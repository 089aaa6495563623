"""Tiny tokenizers for these tests, made without a download."""

from typing import Any

SPECIAL = ("<unk>", "<s>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template without generation blocks; a newline follows the end of each turn, as in Qwen's."""

BLOCKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<eos>{% endgeneration %}{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('@')[-1] }}{% else %}{{ m.content }}{% endif %}"
    "<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that drops the reasoning (before the @) of earlier assistant turns, as Qwen3's does."""

STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + TURNS


def characters(template: str | None = None, eos: bool = True, merges: tuple[str, ...] = (), bos: bool = False) -> Any:
    """Makes a tokenizer with one token per printable character and newline; `merges` are longer tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *merges, "\n", *map(chr, range(32, 127))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    pattern = "|".join([*merges, r"[\s\S]"])
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    if bos:
        inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    named = {"unk_token": "<unk>", "bos_token": "<s>", **({"eos_token": "<eos>"} if eos else {})}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **named)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[3:])})
    if not eos:
        tokenizer.add_tokens(["<eos>"])
    tokenizer.chat_template = template
    return tokenizer


def byte_pairs(template: str) -> Any:
    """Makes a byte-level BPE with merges, like Qwen's and Llama's, in which a character may be several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    inner.train_from_iterator(["the answer is the sum of the numbers\n\n"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer
