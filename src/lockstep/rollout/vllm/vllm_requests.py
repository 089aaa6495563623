"""Converts requests to vLLM's types, and keeps the requests that are waiting or running."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.base.text import first_line
from lockstep.data.samples import Completion, FinishReason
from lockstep.rollout.engine_protocol import Request
from lockstep.rollout.errors import BadRequest
from lockstep.rollout.vllm.vllm_setup import vllm_error


def core_request(name: str, request: Request, eos: frozenset[int], salt: str, images: list[Any] | None = None) -> Any:
    """Converts a request to the type that vLLM's core receives.

    Args:
        name: the request's id within vLLM, never used before.
        eos: tokens that end the completion, unless the request ignores them.
        salt: part of the key of the prompt's blocks in the prefix cache.
        images: the prompt's images, as features of vLLM.
    """
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=request.prompt.tolist(),
        mm_features=images,
        sampling_params=sampling_params(request, eos),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
    )


def sampling_params(request: Request, eos: frozenset[int]) -> Any:
    """Converts a request's settings to vLLM's. Raises vLLM's errors for unsupported settings."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        max_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=[] if request.ignore_eos else sorted(eos),
        logprobs=0,
        detokenize=False,
    )


def check_sampling(request: Request, eos: frozenset[int]) -> None:
    """Raises BadRequest for settings that vLLM refuses."""
    try:
        sampling_params(request, eos)
    except (ValueError, TypeError, vllm_error()) as error:
        raise BadRequest(request.id, f"is refused by vLLM: {first_line(error)}") from error


def vllm_finish_reason(output: Any) -> FinishReason:
    """Converts the finish reason. Raises RuntimeError for a request that vLLM aborted."""
    name = str(output.finish_reason)
    if name not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended request {output.request_id} with {name!r} ({output.stop_reason})")
    return "stop" if name == "stop" else "length"


@dataclass(slots=True)
class TrackedRequest:
    """A request and the tokens generated for it so far."""

    request: Request
    number: int
    """The order of submission."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def append(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)

    def completion(self, finish: FinishReason, text: str) -> Completion:
        return Completion(
            request=self.request.id,
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            finish=finish,
            text=text,
        )


class WaitingQueue:
    """Holds requests by priority, then in the order of submission.

    Requests wait here and not in vLLM because vLLM fixes the cache salt of a request when it receives the request. So a
    request never uses prefix cache that was computed with older weights.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, TrackedRequest]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.push(TrackedRequest(request, self._count))
            self._count += 1

    def push(self, tracked: TrackedRequest) -> None:
        """Adds a request that has no tokens yet, new or returned by vLLM, in the order of priority and submission."""
        heapq.heappush(self._heap, (tracked.request.priority, tracked.number, tracked))

    def first(self) -> Request:
        return self._heap[0][2].request

    def pop(self) -> TrackedRequest:
        return heapq.heappop(self._heap)[2]

    def remove(self, ids: set[str] | None) -> list[Request]:
        """Removes the requests with the given ids (all if None) and returns them."""
        removed = [tracked.request for _, _, tracked in self._heap if ids is None or tracked.request.id in ids]
        self._heap = [entry for entry in self._heap if ids is not None and entry[2].request.id not in ids]
        heapq.heapify(self._heap)
        return removed
