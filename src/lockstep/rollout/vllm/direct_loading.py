"""Loads weights into vLLM's layers on a CPU without its reload: each layer is packed straight from the store's memory.

vLLM's reload (`layerwise`) makes every layer anew, which costs a copy of all weights and, for small models, far more in
Python than in bytes. Equal names and shapes are not enough: some models rearrange what they load, some compute logits
with the embedding. So it is done only for `DIRECT_MODELS`, whose code does nothing but fuse parts as their
`packed_modules_mapping` says, unquantized and in one worker. Other models are reloaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from lockstep.rollout.weight_loading import join_contiguous

_MODELS = "vllm.model_executor.models."
DIRECT_MODELS = frozenset(
    _MODELS + name
    for name in (
        "llama.LlamaForCausalLM",
        "mistral.MistralForCausalLM",
        "qwen2.Qwen2ForCausalLM",
        "qwen3.Qwen3ForCausalLM",
    )
)
"""vLLM's models whose `load_weights` puts each tensor of transformers' names where it is, row by row, and whose output
layer is a `ParallelLMHead`. Each is held against a freshly loaded engine by a test."""


@dataclass(frozen=True, slots=True)
class TensorMove:
    """Tensors of the store that make up a parameter of a layer, concatenated."""

    layer: Any
    name: str
    sources: tuple[str, ...]
    packed: bool
    """Whether vLLM keeps the packed form only."""


def plan_tensor_moves(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[TensorMove] | None:
    """The moves of the store's tensors into the model; None unless they are known for all tensors and parameters."""
    if f"{type(model).__module__}.{type(model).__qualname__}" not in DIRECT_MODELS:
        return None
    if not current_platform.is_cpu() or getattr(current_platform, "is_zen_cpu", lambda: False)():
        return None
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    moves: list[TensorMove] = []
    seen: set[int] = set()
    for path, layer in model.named_modules():
        if hasattr(layer, "process_weights_after_loading") and type(layer).__name__ != "Attention":
            return None
        for name, parameter in layer._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            move = _plan_move(layer, name, parameter, _sources(path, name, fused), shapes)
            if move is None:
                return None
            moves.append(move)
    used = [source for move in moves for source in move.sources]
    return moves if sorted(used) == sorted(shapes) else None


@torch.no_grad()
def apply_tensor_moves(moves: list[TensorMove], tensors: Mapping[str, Tensor]) -> None:
    """Carries out all moves, except for the packed form of output layers. The tensors are not used afterwards."""
    for move in moves:
        pieces = [tensors[name] for name in move.sources]
        if move.packed:
            _pack_weights(move, pieces)
        else:
            _copy_weights(move, pieces)


def _sources(path: str, name: str, fused: Mapping[str, list[str]]) -> tuple[str, ...]:
    """The names that a parameter of the layer at `path` has in a checkpoint."""
    above, _, own = path.rpartition(".")
    parts = fused.get(own, [own])
    return tuple(".".join(filter(None, (above, part, name))) for part in parts)


def _plan_move(
    layer: nn.Module, name: str, parameter: Tensor, sources: tuple[str, ...], shapes: Mapping[str, tuple[int, ...]]
) -> TensorMove | None:
    packed = parameter.numel() == 0
    before = get_layerwise_info(layer).restore_metadata[0].get(name) if packed else parameter
    if before is None or any(source not in shapes for source in sources):
        return None
    shape, found = tuple(before.shape), [shapes[source] for source in sources]
    rows = sum(each[0] for each in found)
    padded = isinstance(layer, VocabParallelEmbedding) and rows <= shape[0]
    if any(each[1:] != shape[1:] for each in found) or not (rows == shape[0] or padded):
        return None
    if isinstance(layer, LinearBase):
        known = type(getattr(layer, "quant_method", None)) is UnquantizedLinearMethod
    else:
        known = not packed and (isinstance(layer, VocabParallelEmbedding) or len(sources) == 1)
    return TensorMove(layer, name, sources, packed) if known else None


def _pack_weights(move: TensorMove, pieces: list[Tensor]) -> None:
    whole = join_contiguous(pieces)
    setattr(move.layer, move.name, nn.Parameter(whole, requires_grad=False))
    move.layer.quant_method.process_weights_after_loading(move.layer)
    kept = getattr(move.layer, move.name)
    if kept.numel():  # it was not packed: it must not refer to memory that others write
        setattr(move.layer, move.name, nn.Parameter(kept.clone(), requires_grad=False))


def _copy_weights(move: TensorMove, pieces: list[Tensor]) -> None:
    parameter, at = move.layer._parameters[move.name], 0
    for piece in pieces:
        parameter.data[at : at + len(piece)].copy_(piece)
        at += len(piece)
    if isinstance(move.layer, LinearBase) and move.name == "weight":
        move.layer.quant_method.process_weights_after_loading(move.layer)
