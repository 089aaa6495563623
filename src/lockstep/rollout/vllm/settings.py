"""vLLM's arguments from the config, and an engine core that is started with them."""

import importlib
import socket
from typing import Any

import torch

from lockstep.config.model import Model
from lockstep.config.rollout import VllmEngine as EngineConfig
from lockstep.models.errors import ModelError
from lockstep.models.load import resolve_dtype
from lockstep.models.weights import resolve_folder
from lockstep.watch.errors import first_line

EXTENSION = "lockstep.rollout.vllm.transfer.Worker"
_FAILED = (ValueError, TypeError, KeyError, OSError, ImportError, RuntimeError)
"""What vLLM and what it calls raise over a model or an argument, beside its own errors."""


def engine_arguments(
    model: Model, engine: EngineConfig, device: str, context: int, sleeps: bool = False
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`; `engine.extra` goes over all of them.

    Args:
        context: tokens of the longest sequence.
        sleeps: whether the engine is to give its GPU's memory to others at times.

    Raises:
        ModelError: arguments with which weights cannot be taken.
    """
    on_cpu = device == "cpu"
    arguments: dict[str, Any] = {
        "model": str(resolve_folder(model.path, model.revision)),
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "dtype": str(engine_dtype(model, engine, device)).removeprefix("torch."),
        "seed": 0,
        "max_model_len": context,
        "max_num_seqs": engine.max_num_seqs,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enable_prefix_caching": engine.enable_prefix_caching,
        # As sampled: after temperature, top-k, top-p and min-p; of greedy rows the model's own.
        "logprobs_mode": "processed_logprobs",
        # A batch that is under way while weights are taken would return tokens of unknown weights.
        "async_scheduling": False,
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": {"backend": "lockstep"},
        "enforce_eager": on_cpu if engine.enforce_eager is None else engine.enforce_eager,
    }
    if on_cpu:
        # A prompt that is read in parts draws from its seed's generator for each, and the CPU's cannot be put back.
        most = max(context, min(4096, engine.max_num_seqs * context))
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": most}
        arguments |= {"kv_cache_memory_bytes": int(engine.cpu_kv_cache_gb * 2**30)}
    else:
        arguments |= {"gpu_memory_utilization": engine.gpu_memory_utilization, "enable_sleep_mode": sleeps}
    arguments |= engine.extra
    if on_cpu and not arguments["enforce_eager"]:
        # Compiled code keeps the packed layers that it was made with, and new weights make others.
        remedy = "leave it out (on a CPU it is true)"
        raise ModelError("rollout.engine.enforce_eager", False, "on a CPU the engine could not take weights", remedy)
    return arguments


def engine_dtype(model: Model, engine: EngineConfig, device: str) -> torch.dtype:
    """Of the engine's weights: its own setting, else the model's."""
    return resolve_dtype(engine.dtype if engine.dtype != "auto" else model.dtype, device)


def slower(dtype: torch.dtype, device: str) -> str:
    """Why it does not decode as fast as this machine could; empty where it does."""
    if device == "cpu" and dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return "this CPU computes bfloat16 very slowly: set rollout.engine.dtype=float32"
    return ""


def start_core(path: str, arguments: dict[str, Any]) -> Any:
    """vLLM's engine core in this process, with the model loaded (its tensor-parallel workers are processes below).

    Raises:
        ModelError: vLLM does not support the model or the arguments, or fails to load it.
    """
    host = socket.gethostname()
    args, client = _module("vllm.engine.arg_utils"), _module("vllm.v1.engine.core_client")
    executor = _module("vllm.v1.executor").Executor
    try:
        config = args.EngineArgs(**arguments).create_engine_config()
        made = executor.get_class(config)
    except (*_FAILED, vllm_error()) as error:
        problem = f"vLLM on host {host} refuses it ({_point(error)})"
        remedy = "see the engine's log; rollout.engine.kind=builtin runs any causal language model of transformers"
        raise ModelError("model.path", path, problem, remedy) from error
    if getattr(config, "max_concurrent_batches", 1) > 1:
        raise ModelError(
            "rollout.engine.extra",
            {name: arguments[name] for name in ("async_scheduling", "pipeline_parallel_size") if name in arguments},
            "with several batches under way the weights version of a token is not known",
            "leave async_scheduling and pipeline_parallel_size out",
        )
    try:
        return client.InprocClient(config, made, log_stats=True)
    except (*_FAILED, AssertionError, vllm_error()) as error:
        problem = f"vLLM on host {host} cannot load it ({_point(error)})"
        raise ModelError("model.path", path, problem, "see the engine's log") from error


def try_core(path: str, core: Any, request: Any) -> None:
    """Generates for one request, so that what vLLM cannot compute is found now: it looks for kernels as it goes.

    Raises:
        ModelError: it cannot.
    """
    core.add_request(request)
    try:
        while core.engine_core.scheduler.has_unfinished_requests():
            core.get_output()
    except (*_FAILED, AssertionError, vllm_error()) as error:
        core.shutdown()
        problem = f"vLLM on host {socket.gethostname()} cannot compute it ({first_line(error)})"
        raise ModelError("model.path", path, problem, "use rollout.engine.kind=builtin for this model") from error


def vllm_error() -> type[Exception]:
    """What vLLM's own errors are, which are no ValueErrors in newer versions."""
    found: type[Exception] = getattr(_module("vllm.exceptions"), "VLLMError", ValueError)
    return found


def _module(name: str) -> Any:
    """Of vLLM, which is imported only where it is used."""
    return importlib.import_module(name)


def _point(error: Exception) -> str:
    """What an error says; pydantic puts it behind a line of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        return lines[1].partition(" [type=")[0]
    return first_line(error)
