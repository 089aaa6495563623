"""Corrects vLLM's layerwise reload where it would leave old or wrongly packed weights without an error."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import CopyCounter, materialize_layer
from vllm.platforms import current_platform


def accept_bare_tower_names() -> None:
    """Lets vLLM's SigLIP tower (Gemma 3, LLaVA-OneVision) load weights under the names that transformers 5 saves, which
    lack the `vision_model.` of older checkpoints."""
    try:
        from vllm.model_executor.models.siglip import SiglipVisionModel
        from vllm.model_executor.models.utils import AutoWeightsLoader
    except ImportError:  # another vLLM: it loads what it knows, and names what it does not
        return

    def load_weights(self: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        inner = "vision_model."
        named = ((name if name.startswith(inner) else inner + name, weight) for name, weight in weights)
        loaded: set[str] = AutoWeightsLoader(self).load_weights(named)
        return loaded

    if not hasattr(SiglipVisionModel, "load_weights"):
        SiglipVisionModel.load_weights = load_weights


class DirectWrites(TorchFunctionMode):
    """Keeps what a model's `load_weights` writes into parameters itself, and not through their weight loaders.

    During a reload the parameters are on the meta device, and vLLM keeps only what passes through weight loaders. Other
    writes would be lost without an error, and the layers would keep their old weights: gpt-oss writes its experts and
    attention sinks in this way. Use it between `initialize_layerwise_reload` and `finalize_layerwise_reload`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._owners: dict[int, tuple[Tensor, nn.Module, str]] = {
            _storage(parameter): (parameter, layer, name)
            for layer in model.modules()
            for name, parameter in layer._parameters.items()
            if parameter is not None and parameter.is_meta
        }
        """Layer and name of each parameter, by its storage, which the parameter's views share."""
        self._layers: set[nn.Module] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # vLLM runs a weight loader under its CopyCounter, once to count and later again to load.
        if func is Tensor.copy_ and args[0].is_meta and not isinstance(_get_current_dispatch_mode(), CopyCounter):
            self._write(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _write(self, target: Tensor, src: Tensor, non_blocking: bool = False) -> None:
        _, layer, name = self._owners.get(_storage(target), (None, None, ""))
        if layer is None:
            return
        if layer not in self._layers:
            materialize_layer(layer, get_layerwise_info(layer))
            self._layers.add(layer)
        parameter = getattr(layer, name)
        parameter.data.as_strided(target.size(), target.stride(), target.storage_offset()).copy_(src)

    def finish(self) -> None:
        """Makes the written layers ready for use, as vLLM does for a layer whose loaders have everything."""
        for layer in self._layers:
            _layerwise_process(layer, get_layerwise_info(layer))


def _storage(tensor: Tensor) -> int:
    """Identifies the memory of a tensor, also on the meta device, where no tensor has an address."""
    return int(tensor.untyped_storage()._cdata)


def copy_biases(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Copies biases, which a model may overwrite while it loads them, before the model gets them.

    A bias must be added by one tensor-parallel worker only, and on the others gpt-oss sets the given tensor to zero.
    Published weights are read-only, and shared by all workers.
    """
    for name, tensor in tensors:
        yield name, tensor.clone() if name.endswith("bias") else tensor


def drop_expert_kernels(model: nn.Module) -> None:
    """Makes a reload build the kernels of expert layers anew on the CPU platform.

    There the kernels need packed weights, and vLLM packs them only when it builds a kernel: a reload that finds one
    puts the new weights unpacked where the kernel expects packed ones.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


@torch.no_grad()
def pack_heads(model: nn.Module) -> None:
    """Packs the weights of output layers again on the CPU platform, where vLLM keeps a packed copy of them.

    If an output layer is tied to the embedding, vLLM's reload packs the weight for the embedding only, and the output
    layer would keep its old copy.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and type(layer.quant_method) is UnquantizedEmbeddingMethod:
            layer.quant_method.process_weights_after_loading(layer)
