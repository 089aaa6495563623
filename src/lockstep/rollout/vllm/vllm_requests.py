"""Requests as vLLM takes them, and those that wait or run."""

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


def core_request(name: str, request: Request, eos: frozenset[int], salt: str) -> Any:
    """A request as vLLM's core takes it.

    Args:
        name: its id within vLLM, never used before.
        eos: tokens that end it, unless it ignores them.
        salt: part of the key of its prompt's blocks in the prefix cache.
    """
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=request.prompt.tolist(),
        mm_features=None,
        sampling_params=sampling_params(request, eos),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
    )


def sampling_params(request: Request, eos: frozenset[int]) -> Any:
    """vLLM's settings of a request. Raises vLLM's errors for unsupported ones."""
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
    """The finish reason. Raises RuntimeError for a request that vLLM gave up."""
    name = str(output.finish_reason)
    if name not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended request {output.request_id} with {name!r} ({output.stop_reason})")
    return "stop" if name == "stop" else "length"


@dataclass(slots=True)
class RunningRequest:
    """A request and its tokens."""

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
    """Requests by priority, then in the order of submission. They wait here and not in vLLM, so that they only use
    prefix cache of the weights that are served when they enter."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RunningRequest]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.put_back(RunningRequest(request, self._count))
            self._count += 1

    def put_back(self, row: RunningRequest) -> None:
        """Puts a request without tokens back to its place."""
        heapq.heappush(self._heap, (row.request.priority, row.number, row))

    def pop(self) -> RunningRequest:
        return heapq.heappop(self._heap)[2]

    def withdraw(self, ids: set[str] | None) -> list[Request]:
        """Removes requests (all if None)."""
        taken = [row.request for _, _, row in self._heap if ids is None or row.request.id in ids]
        self._heap = [entry for entry in self._heap if ids is not None and entry[2].request.id not in ids]
        heapq.heapify(self._heap)
        return taken
