"""The weights that leave the trainer, for engines and exports: an adapter is merged into those that it adapts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lockstep.models.lora import NAME, LowRank, adapted, named_adapter, named_saved, saved_names
from lockstep.models.policy import Policy, hf_name
from lockstep.models.quantized import plain_shape, plain_weight
from lockstep.models.weights import named_weights
from lockstep.train.distributed import Ranks
from lockstep.train.sharding import local
from lockstep.train.shards import rows_of


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight under its checkpoint name, of which this rank makes its rows when they are asked for."""

    shape: tuple[int, ...]
    """Of the whole."""
    rows: Callable[[], Tensor]
    """This rank's rows; a view of the trainer's memory where nothing is merged."""
    constant: bool = False
    """Whether it is the same in every version."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Names of an adapted layer's parts."""

    down: str
    up: str
    magnitude: str | None
    scaling: float
    transposed: bool


class Outgoing:
    """Knows a policy's parameters, taken while none of its layers is gathered."""

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self.ranks = ranks
        self.weights: dict[str, nn.Parameter] = dict(named_weights(policy))
        """The model's own, by checkpoint name."""
        self.adapter: dict[str, nn.Parameter] = dict(named_adapter(policy))
        """By name in peft's files; empty without one."""
        self.saved: dict[str, nn.Parameter] = dict(named_saved(policy))
        """Those of `weights` that are trained whole beside an adapter, by name in peft's files."""
        self._saved_names = saved_names(policy)
        names = {id(parameter): name for name, parameter in self.adapter.items()}
        self._layers = {}
        for name, layer in adapted(policy).items():
            magnitudes = layer.lora_magnitude_vector
            self._layers[name] = _Layer(
                names[id(layer.lora_A[NAME].weight)],
                names[id(layer.lora_B[NAME].weight)],
                names[id(magnitudes[NAME].weight)] if NAME in magnitudes else None,
                layer.scaling[NAME],
                getattr(layer, "fan_in_fan_out", False),
            )
        self._packed = _packed(policy)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """With an adapter its parameters and the weights beside it, by name in peft's files; else all weights."""
        return self.adapter | self.saved or self.weights

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a weight as it leaves, whatever it is kept as."""
        parameter = self.weights[name]
        module = self._packed.get(name)
        return tuple(parameter.shape) if module is None else plain_shape(module, parameter)

    def merged(self) -> dict[str, Weight]:
        """Every weight of the model, merged with its adapter where it has one.

        All ranks call it together: an adapter is gathered whole by each of them, as a row of `B A` needs all of A.
        """
        whole, saved = self.gather_adapter(), {id(parameter) for parameter in self.saved.values()}
        found = {}
        for name, parameter in self.weights.items():
            layer, rows = self._layers.get(name), partial(self._plain, name)
            if layer is not None:
                magnitude = None if layer.magnitude is None else whole[layer.magnitude]
                factors = LowRank(whole[layer.down], whole[layer.up], layer.scaling, magnitude, layer.transposed)
                first = self.ranks.rows(parameter.shape[0])[0]
                rows = partial(self._merged, factors, name, first)
            constant = bool(whole) and layer is None and id(parameter) not in saved
            found[name] = Weight(self.shape(name), rows, constant)
        return found

    def _plain(self, name: str) -> Tensor:
        module = self._packed.get(name)
        return local(self.weights[name]) if module is None else plain_weight(module)

    @torch.no_grad()
    def _merged(self, factors: LowRank, name: str, first: int) -> Tensor:
        return factors.merged(self._plain(name), first)

    @torch.no_grad()
    def gather_adapter(self) -> dict[str, Tensor]:
        """The whole adapter, float32, on every rank (at one rank the trainer's own memory); empty without one."""
        if self.ranks.world == 1 or not self.adapter:
            return {name: local(parameter) for name, parameter in self.adapter.items()}
        shards = self.ranks.shards
        chunks = {name: rows_of(0, shards, parameter.shape[0])[1] for name, parameter in self.adapter.items()}
        parts = [_padded(local(parameter), chunks[name]).flatten() for name, parameter in self.adapter.items()]
        everyone = self.ranks.gather_flat(torch.cat(parts), why="the adapter, to merge it")
        whole, at = {}, 0
        for name, parameter in self.adapter.items():
            rest = tuple(parameter.shape[1:])
            size = chunks[name] * torch.Size(rest).numel()
            whole[name] = everyone[:, at : at + size].reshape(-1, *rest)[: parameter.shape[0]]
            at += size
        return whole

    def gather_saved(self) -> dict[str, Tensor]:
        """What is trained whole beside an adapter, on rank 0 and its CPU, tied weights under each of their names there;
        empty elsewhere. All ranks call it."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.saved.items():
            whole = self.ranks.gather_rows(local(parameter), parameter.shape[0], why=f"export {name}")
            if whole is not None:
                found |= {alias: whole.clone() for alias in self._saved_names[name]}
        return found


def _padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(count - rows.shape[0], *rows.shape[1:])])


def _packed(policy: Policy) -> dict[str, nn.Module]:
    """The layers that keep their weight in other bits than its own, by the weight's checkpoint name."""
    linear = ((path, module) for path, module in policy.named_modules() if isinstance(module, nn.Linear))
    return {hf_name(f"{path}.weight"): module for path, module in linear if not module.weight.is_floating_point()}
