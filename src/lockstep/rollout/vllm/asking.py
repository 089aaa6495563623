"""Requests as vLLM takes them, and how it ends them."""

from typing import Any

from lockstep.data.samples import FinishReason
from lockstep.rollout.errors import BadRequest
from lockstep.rollout.protocol import Request
from lockstep.rollout.vllm.settings import vllm_error
from lockstep.watch.errors import first_line


def core_request(name: str, request: Request, eos: frozenset[int], salt: str) -> Any:
    """A request as vLLM's core takes it.

    Args:
        name: its id within vLLM, never used before.
        eos: tokens that end it, unless it ignores them.
        salt: what the blocks of its prompt in the prefix cache are found by, beside their tokens.
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
    """vLLM's settings of a request; its own errors where it has no such."""
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


def reason_of(output: Any) -> FinishReason:
    """Raises RuntimeError for a request that vLLM could not go on with."""
    name = str(output.finish_reason)
    if name not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended request {output.request_id} with {name!r} ({output.stop_reason})")
    return "stop" if name == "stop" else "length"
