"""Computes the weights that engines and exports get from the trainer: merges adapters into this rank's rows."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.models.hf_checkpoint import named_weights
from lockstep.models.lora import (
    ADAPTER_NAME,
    LowRankFactors,
    adapted_layers,
    named_adapter,
    named_saved_weights,
    saved_names,
)
from lockstep.models.model_loader import dequantized_shape, dequantized_weight
from lockstep.models.policy_model import PolicyModel, hf_name
from lockstep.train.distributed import ParallelContext, shard_rows
from lockstep.train.fsdp.parallelize import local_shard
from lockstep.train.lazy_weights import LazyWeight


@dataclass(frozen=True, slots=True)
class _AdaptedLayer:
    """Names of an adapted layer's adapter parameters, and how they are merged."""

    down: str
    up: str
    magnitude: str | None
    scaling: float
    transposed: bool


class MergedWeights:
    """A policy's weights with the adapter merged. Create it while none of the policy's layers is gathered."""

    def __init__(self, policy: PolicyModel, ranks: ParallelContext) -> None:
        self.ranks = ranks
        self.weights: dict[str, nn.Parameter] = dict(named_weights(policy))
        """The model's weights, by their names in checkpoints."""
        self.adapter: dict[str, nn.Parameter] = dict(named_adapter(policy))
        """The adapter's parameters, by their names in peft's files; empty without an adapter."""
        self.saved: dict[str, nn.Parameter] = dict(named_saved_weights(policy))
        """The weights that are trained in full along with an adapter (`modules_to_save`), by their names in peft's
        files."""
        self._saved_names = saved_names(policy)
        names = {id(parameter): name for name, parameter in self.adapter.items()}
        self._layers = {}
        for name, layer in adapted_layers(policy).items():
            magnitudes = layer.lora_magnitude_vector
            self._layers[name] = _AdaptedLayer(
                names[id(layer.lora_A[ADAPTER_NAME].weight)],
                names[id(layer.lora_B[ADAPTER_NAME].weight)],
                names[id(magnitudes[ADAPTER_NAME].weight)] if ADAPTER_NAME in magnitudes else None,
                layer.scaling[ADAPTER_NAME],
                getattr(layer, "fan_in_fan_out", False),
            )
        self._quantized = _quantized_layers(policy)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """With an adapter, its parameters and the weights trained with it, by their names in peft's files; else all."""
        return self.adapter | self.saved or self.weights

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a weight when it is exported, also if the trainer keeps it quantized."""
        parameter = self.weights[name]
        module = self._quantized.get(name)
        return tuple(parameter.shape) if module is None else dequantized_shape(module, parameter)

    def merged(self) -> dict[str, LazyWeight]:
        """Returns every weight of the model, merged with the adapter of its layer if there is one.

        All ranks call it: each gathers the whole adapter, because a row of `B A` needs all of A.
        """
        whole, saved = self.gather_adapter(), {id(parameter) for parameter in self.saved.values()}
        found = {}
        for name, parameter in self.weights.items():
            layer, rows = self._layers.get(name), partial(self._unmerged, name)
            if layer is not None:
                magnitude = None if layer.magnitude is None else whole[layer.magnitude]
                factors = LowRankFactors(whole[layer.down], whole[layer.up], layer.scaling, magnitude, layer.transposed)
                first = self.ranks.rows(parameter.shape[0])[0]
                rows = partial(self._merged, factors, name, first)
            constant = bool(whole) and layer is None and id(parameter) not in saved
            found[name] = LazyWeight(self.shape(name), rows, constant)
        return found

    def _unmerged(self, name: str) -> Tensor:
        module = self._quantized.get(name)
        return local_shard(self.weights[name]) if module is None else dequantized_weight(module)

    @torch.no_grad()
    def _merged(self, factors: LowRankFactors, name: str, first: int) -> Tensor:
        return factors.merged(self._unmerged(name), first)

    @torch.no_grad()
    def gather_adapter(self) -> dict[str, Tensor]:
        """Gathers the whole adapter on every rank, in float32. With one rank, returns the trainer's own memory. Empty
        without an adapter."""
        if self.ranks.world == 1 or not self.adapter:
            return {name: local_shard(parameter) for name, parameter in self.adapter.items()}
        shards = self.ranks.shards
        chunks = {name: shard_rows(0, shards, parameter.shape[0])[1] for name, parameter in self.adapter.items()}
        parts = [_pad_rows(local_shard(parameter), chunks[name]).flatten() for name, parameter in self.adapter.items()]
        gathered = self.ranks.gather_flat(torch.cat(parts), why="the adapter, to merge it")
        whole, at = {}, 0
        for name, parameter in self.adapter.items():
            rest = tuple(parameter.shape[1:])
            size = chunks[name] * torch.Size(rest).numel()
            whole[name] = gathered[:, at : at + size].reshape(-1, *rest)[: parameter.shape[0]]
            at += size
        return whole

    def gather_saved(self) -> dict[str, Tensor]:
        """Gathers the weights that are trained in full along with an adapter, on the CPU of rank 0; returns nothing on
        other
        ranks. Tied weights appear under each of their names. All ranks call it."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.saved.items():
            whole = self.ranks.gather_rows(local_shard(parameter), parameter.shape[0], why=f"export {name}")
            if whole is not None:
                found |= {alias: whole.clone() for alias in self._saved_names[name]}
        return found


def _pad_rows(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(count - rows.shape[0], *rows.shape[1:])])


def _quantized_layers(policy: PolicyModel) -> dict[str, nn.Module]:
    """Returns the layers with quantized weights, by the weight's name in checkpoints."""
    linear = ((path, module) for path, module in policy.named_modules() if isinstance(module, nn.Linear))
    return {hf_name(f"{path}.weight"): module for path, module in linear if not module.weight.is_floating_point()}
