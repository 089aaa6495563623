"""When a completion has had enough, for every engine alike: end-of-sequence tokens and stop strings."""

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase


def reach(stop: Sequence[str]) -> int:
    """How many of the last tokens can hold one of these strings that the last token has completed."""
    # A token writes at least one byte, bar special ones; some more tokens cover for those.
    return max(len(each.encode()) for each in stop) + 8


def written(
    tokenizer: PreTrainedTokenizerBase, tails: Sequence[list[int]], stops: Sequence[Sequence[str]]
) -> list[bool]:
    """Whether each tail, the last `reach(stop)` tokens of a completion, holds one of its stop strings."""
    texts = tokenizer.batch_decode(list(tails))
    return [any(each in text for each in stop) for text, stop in zip(texts, stops, strict=True)]


def eos_tokens(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> frozenset[int]:
    """Every token that ends a sequence: the tokenizer's and those of the model's generation config."""
    found: set[int] = set()
    for source in (tokenizer, generation):
        value: Any = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(int(token) for token in found)
