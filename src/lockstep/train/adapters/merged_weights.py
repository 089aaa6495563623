"""Computes the weights that engines and exports get from the trainer: merges adapters into this rank's rows."""

from collections.abc import Callable, Mapping
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
from lockstep.models.vision.model_parts import ModelPart, changing_parts, parameter_parts
from lockstep.train.distributed import ParallelContext, shard_rows
from lockstep.train.lazy_weights import LazyWeight

HeldRows = Callable[[Mapping[str, nn.Parameter]], dict[str, LazyWeight]]
"""Returns this rank's rows of some parameters, by name. All ranks call it with the same parameters."""


@dataclass(frozen=True, slots=True)
class _AdaptedLayer:
    """Names of an adapted layer's adapter parameters, and how they are merged."""

    down: str
    up: str
    magnitude: str | None
    scaling: float
    transposed: bool


class MergedWeights:
    """A policy's weights with the adapter merged. Create it while none of the policy's layers is gathered.

    Args:
        ranks: the ranks as holders of the model's parameters.
        held: how a rank reads its rows of parameters.
    """

    def __init__(self, policy: PolicyModel, ranks: ParallelContext, held: HeldRows) -> None:
        self.ranks, self.held = ranks, held
        self.weights: dict[str, nn.Parameter] = dict(named_weights(policy))
        """The model's weights, by their names in checkpoints."""
        self.adapter: dict[str, nn.Parameter] = dict(named_adapter(policy))
        """The adapter's parameters, by their names in peft's files; empty without an adapter."""
        self.saved: dict[str, nn.Parameter] = dict(named_saved_weights(policy))
        """The weights that are trained in full along with an adapter (`modules_to_save`), by their names in peft's
        files."""
        self._saved_names = saved_names(policy)
        unfrozen = {name: each for name, each in self.weights.items() if each.requires_grad}
        self.trained: dict[str, nn.Parameter] = self.adapter | self.saved or unfrozen
        """With an adapter, its parameters and the weights trained with it, by their names in peft's files; else all
        weights that are not frozen."""
        parts, changing = parameter_parts(policy.lm), changing_parts(policy.lm)
        self.trained_parts: dict[str, ModelPart] = {name: parts[id(each)] for name, each in self.trained.items()}
        """The part of each trained parameter."""
        self.published: dict[str, nn.Parameter] = {
            name: each for name, each in self.weights.items() if parts[id(each)] in changing
        }
        """The weights that engines receive, by their names in checkpoints: those of all parts of which anything is
        trained. Engines have the others from the model's folder."""
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

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a weight when it is exported, also if the trainer keeps it quantized."""
        parameter = self.weights[name]
        module = self._quantized.get(name)
        return tuple(parameter.shape) if module is None else dequantized_shape(module, parameter)

    def merged(self, published: bool = False) -> dict[str, LazyWeight]:
        """Returns every weight of the model, merged with the adapter of its layer if there is one.

        All ranks call it: each gathers the whole adapter, because a row of `B A` needs all of A.

        Args:
            published: only those that engines receive.
        """
        whole, wanted = self.gather_adapter(), self.published if published else self.weights
        found = self.held(wanted)
        for name in self._quantized.keys() & wanted.keys():
            found[name] = LazyWeight(self.shape(name), partial(dequantized_weight, self._quantized[name]))
        for name, weight in found.items():
            layer, rows = self._layers.get(name), weight.rows
            if layer is not None:
                magnitude = None if layer.magnitude is None else whole[layer.magnitude]
                factors = LowRankFactors(whole[layer.down], whole[layer.up], layer.scaling, magnitude, layer.transposed)
                rows = partial(_merge, factors, weight.rows, self.ranks.rows(weight.shape[0])[0])
            constant = layer is None and not self.weights[name].requires_grad
            found[name] = LazyWeight(weight.shape, rows, constant)
        return found

    @torch.no_grad()
    def gather_adapter(self) -> dict[str, Tensor]:
        """Gathers the whole adapter on every rank, in float32. If this rank holds all of it, returns the trainer's own
        memory where that is float32. Empty without an adapter."""
        held, shards = self.held(self.adapter), self.ranks.shards
        if shards == 1 or not held:
            return {name: part.rows().float() for name, part in held.items()}
        chunks = {name: shard_rows(0, shards, part.shape[0])[1] for name, part in held.items()}
        parts = [_pad_rows(part.rows().float(), chunks[name]).flatten() for name, part in held.items()]
        gathered = self.ranks.gather_flat(torch.cat(parts), why="the adapter, to merge it")
        whole, at = {}, 0
        for name, part in held.items():
            rest = part.shape[1:]
            size = chunks[name] * torch.Size(rest).numel()
            whole[name] = gathered[:, at : at + size].reshape(-1, *rest)[: part.shape[0]]
            at += size
        return whole

    def gather_saved(self) -> dict[str, Tensor]:
        """Gathers the weights that are trained in full along with an adapter, on the CPU of rank 0; returns nothing on
        other ranks. Tied weights appear under each of their names. All ranks call it."""
        found: dict[str, Tensor] = {}
        for name, part in self.held(self.saved).items():
            whole = self.ranks.gather_rows(part.rows(), part.shape[0], why=f"export {name}")
            if whole is not None:
                found |= {alias: whole.clone() for alias in self.exported_names(name)}
        return found

    def exported_names(self, name: str) -> list[str]:
        """Returns the names under which a trained weight is exported with the adapter: several of a tied one."""
        return list(self._saved_names.get(name, [name]))


@torch.no_grad()
def _merge(factors: LowRankFactors, rows: Callable[[], Tensor], first: int) -> Tensor:
    return factors.merged(rows(), first)


def _pad_rows(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(count - rows.shape[0], *rows.shape[1:])])


def _quantized_layers(policy: PolicyModel) -> dict[str, nn.Module]:
    """Returns the layers with quantized weights, by the weight's name in checkpoints."""
    linear = ((path, module) for path, module in policy.named_modules() if isinstance(module, nn.Linear))
    return {hf_name(f"{path}.weight"): module for path, module in linear if not module.weight.is_floating_point()}
