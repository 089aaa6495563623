"""What all engines share about requests: seeds, validation, stop conditions."""

import hashlib
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerBase

from lockstep.data.samples import Completion
from lockstep.rollout.engine_protocol import Request
from lockstep.rollout.errors import BadRequest


def check_request(request: Request, prompt: np.ndarray, known: Container[str], context: int, vocabulary: int) -> None:
    """Raises BadRequest for a request that cannot be served.

    Args:
        prompt: the prompt of its group.
        known: ids of open requests.
        context: the largest length of a sequence.
        vocabulary: the number of tokens.
    """
    length = len(request.prompt)
    if request.id in known:
        raise BadRequest(request.id, "is already here")
    if length == 0:
        raise BadRequest(request.id, "has an empty prompt")
    if request.max_tokens < 1:
        raise BadRequest(request.id, f"wants {request.max_tokens} tokens, expected at least 1")
    if length + request.max_tokens > context:
        raise BadRequest(
            request.id,
            f"needs {length} prompt tokens + max_tokens {request.max_tokens} = {length + request.max_tokens}, "
            f"the context holds {context}",
        )
    if int(request.prompt.min()) < 0 or int(request.prompt.max()) >= vocabulary:
        raise BadRequest(request.id, f"has a prompt token outside of the vocabulary of {vocabulary}")
    if prompt is not request.prompt and not np.array_equal(prompt, request.prompt):
        raise BadRequest(request.id, f"has another prompt than the rest of group {request.group!r}")


def empty_completion(request: Request) -> Completion:
    """The completion of a request that was aborted before it ran."""
    empty = np.zeros(0, np.int32)
    return Completion(request.id, empty, np.zeros(0, np.float32), empty.copy(), "abort", "")


def request_seed(run_seed: int, step: int, uid: str, k: int) -> int:
    """Seed of the `k`-th completion of prompt `uid` at `step`: a stable hash, 0 <= seed < 2**63.

    It is the same on every machine and in every process and version of Python, so that a repeated generation gives the
    same completion.
    """
    digest = hashlib.blake2b(f"{run_seed}\0{step}\0{uid}\0{k}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stop_window(stop: Sequence[str]) -> int:
    """The number of last tokens in which one of these strings may have just been completed."""
    # A token stands for at least one byte, except special ones, for which there are some more.
    return max(len(each.encode()) for each in stop) + 8


def contains_stop(
    tokenizer: PreTrainedTokenizerBase, tails: Sequence[list[int]], stops: Sequence[Sequence[str]]
) -> list[bool]:
    """Whether each tail, the last `stop_window(stop)` tokens of a completion, contains one of its stop strings."""
    texts = tokenizer.batch_decode(list(tails))
    return [any(each in text for each in stop) for text, stop in zip(texts, stops, strict=True)]


def eos_tokens(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> frozenset[int]:
    """The tokens that end a sequence: of the tokenizer and of the model's generation config."""
    found: set[int] = set()
    for source in (tokenizer, generation):
        value: Any = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [value])
    return frozenset(int(token) for token in found)
