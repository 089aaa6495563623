"""What a rank holds of a model's master weights, moments and gradients at each stage of ZeRO.

DeepSpeed's optimizers keep them in flat tensors: at stages 1 and 2 a rank has a part of all parameters of a group, one
after the other; at stage 3 it has a part of every parameter. Here they are seen by parameter, as pieces. The names are
those of DeepSpeed's optimizers (`DeepSpeedZeroOptimizer`, `DeepSpeedZeroOptimizer_Stage3`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.train.checkpoints.checkpoint import LocalRows

_MOMENTS = ("exp_avg", "exp_avg_sq")
_NO_MICROBATCH = -1
"""`micro_step_id` of an optimizer of stages 1 and 2 before the first micro-batch of a step."""


@dataclass(frozen=True, slots=True)
class _FlatPart:
    """Where the elements of a parameter that this rank holds are."""

    flat: Tensor
    """The master weights of a group of parameters, as torch's optimizer has them."""
    offset: int
    """Place of the first element in `flat`."""
    start: int
    """Place of the first element in the flattened parameter."""
    count: int


class ZeroState(Protocol):
    """The state of one rank at one stage."""

    def state(self) -> dict[str, LocalRows]:
        """Returns master weights (`parameter.NAME`) and moments (`exp_avg.NAME`, `exp_avg_sq.NAME`) that this rank
        holds, as views. All ranks have all names; a piece may be empty."""

    def gradients(self) -> dict[str, Tensor]:
        """Returns the gradients that this rank adds to the global norm, after the last micro-batch of a step."""

    def discard_gradients(self) -> None:
        """Drops the gradients of a step that is not taken."""

    def set_weights(self) -> None:
        """Copies the master weights to the model's parameters. All ranks call it."""


class ReplicatedState:
    """Stage 0: every rank holds everything.

    Args:
        optimizer: torch's optimizer of the parameters.
        first: whether this rank adds its gradients to the global norm.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], first: bool) -> None:
        self._optimizer, self._parameters, self._first = optimizer, parameters, first

    def state(self) -> dict[str, LocalRows]:
        found: dict[str, LocalRows] = {}
        for name, parameter in self._parameters.items():
            moments = {key: _moment(self._optimizer, parameter, key) for key in _MOMENTS}
            tensors = {"parameter": parameter.detach(), **moments}
            found |= {f"{part}.{name}": LocalRows(each, tuple(each.shape)) for part, each in tensors.items()}
        return found

    def gradients(self) -> dict[str, Tensor]:
        if not self._first:
            return {}
        return {name: each.grad for name, each in self._parameters.items() if each.grad is not None}

    def discard_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def set_weights(self) -> None:
        pass


class _FlatState:
    """Stages 1 to 3: flat tensors.

    Args:
        zero: DeepSpeed's optimizer.
    """

    def __init__(self, zero: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self._zero, self._parameters = zero, parameters

    def state(self) -> dict[str, LocalRows]:
        found = {}
        for name, parameter in self._parameters.items():
            shape, part = full_shape(parameter), self._part(parameter)
            for key in ("parameter", *_MOMENTS):
                if part is None:
                    piece, start = torch.empty(0), 0
                else:
                    whole = part.flat.detach() if key == "parameter" else _moment(self._zero.optimizer, part.flat, key)
                    piece, start = whole.narrow(0, part.offset, part.count), part.start
                found[f"{key}.{name}"] = LocalRows(piece, tuple(shape), start)
        return found

    def _part(self, parameter: nn.Parameter) -> _FlatPart | None:
        raise NotImplementedError

    def _groups(self) -> list[Tensor]:
        """The flat master weights of every group."""
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor]:
        return {str(number): each for number, each in enumerate(self._flat_gradients())}

    def _flat_gradients(self) -> Iterator[Tensor]:
        if self._offloads():
            if hasattr(self._zero, "_wait_for_offload_copies"):  # stages 1 and 2 copy without blocking
                self._zero._wait_for_offload_copies()
            yield from (flat.grad for flat in self._groups() if flat.grad is not None)
            return
        for group in self._zero.averaged_gradients.values():
            yield from group or ()

    def _offloads(self) -> bool:
        raise NotImplementedError


class _LinkedState(_FlatState):
    """Optimizers that link each parameter to its place in the flat master weights."""

    def _part(self, parameter: nn.Parameter) -> _FlatPart | None:
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        flat, place = self._groups()[mapping.param_group_index], mapping.hp_fragment_address
        return _FlatPart(flat, place.start, mapping.lp_fragment_address.start, place.numel)


class PartitionedState(_LinkedState):
    """Stages 1 and 2."""

    def _groups(self) -> list[Tensor]:
        return list(self._zero.single_partition_of_fp32_groups)

    def _offloads(self) -> bool:
        return bool(self._zero.cpu_offload)

    def discard_gradients(self) -> None:
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        zero._release_preflattened_grad_buffers()
        zero.micro_step_id = _NO_MICROBATCH
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
        for group in zero.averaged_gradients:
            zero.averaged_gradients[group] = None
            zero.all_grad_tensors[group] = None

    def set_weights(self) -> None:
        self._zero.update_lp_params()
        for group in range(len(self._zero.bit16_groups)):
            self._zero._update_model_bit16_weights(group)


class Float32Sums(_LinkedState):
    """Stage 1 in bfloat16 with sums of gradients in float32. DeepSpeed's `BF16_Optimizer` keeps those of all parameters
    on every rank."""

    def _groups(self) -> list[Tensor]:
        return list(self._zero.fp32_groups_flat_partition)

    def _flat_gradients(self) -> Iterator[Tensor]:
        yield from self._zero.fp32_groups_gradient_flat_partition

    def discard_gradients(self) -> None:
        self._zero.zero_grad()

    def set_weights(self) -> None:
        self._zero.update_lp_params()


class PartitionedParameters(_FlatState):
    """Stage 3."""

    def _part(self, parameter: nn.Parameter) -> _FlatPart | None:
        zero, tensor = self._zero, parameter.ds_tensor  # type: ignore[attr-defined]
        group, offset, held = zero.grad_position[zero.get_param_id(parameter)]
        start = zero._get_param_partition_rank(parameter) * tensor.ds_numel
        count = max(0, min(held, full_shape(parameter).numel() - start))  # the last part is padded
        return _FlatPart(self._groups()[group], offset, min(start, full_shape(parameter).numel()), count)

    def _groups(self) -> list[Tensor]:
        return list(self._zero.fp32_partitioned_groups_flat)

    def _offloads(self) -> bool:
        return bool(self._zero.offload_optimizer)

    def discard_gradients(self) -> None:
        self._zero._overflow_clean_up(self._zero.loss_scale)

    def set_weights(self) -> None:
        zero = self._zero
        zero._partition_all_parameters()
        zero.invalidate_secondary_tensor()  # a second copy has the weights of before
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def make_state(engine: Any, stage: int, parameters: Mapping[str, nn.Parameter], first: bool) -> ZeroState:
    """Returns the view of an engine's state, whose moments then exist. Torch creates them in the first step.

    Args:
        parameters: the trained parameters, by name.
        first: whether this is the first rank.
    """
    if stage == 0:
        _create_moments(engine.optimizer, list(parameters.values()))
        return ReplicatedState(engine.optimizer, parameters, first)
    sums_apart = stage == 1 and hasattr(engine.optimizer, "fp32_groups_gradients")
    kind = PartitionedParameters if stage == 3 else Float32Sums if sums_apart else PartitionedState
    state = kind(engine.optimizer, parameters)
    _create_moments(engine.optimizer.optimizer, state._groups())
    return state


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of a whole parameter, whatever part of it this rank holds."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def set_step(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Sets the number of steps that torch's optimizer has taken."""
    for state in optimizer.state.values():
        state["step"].fill_(step)


def reset_moments(optimizer: torch.optim.Optimizer) -> None:
    """Sets all moments and the number of steps to zero."""
    for state in optimizer.state.values():
        for each in state.values():
            each.zero_()


def _create_moments(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> None:
    for weight in weights:
        step = torch.zeros((), dtype=torch.float32, device=weight.device)
        moments = {name: torch.zeros_like(weight.detach()) for name in _MOMENTS}
        optimizer.state[weight] = {"step": step, **moments}


def _moment(optimizer: torch.optim.Optimizer, weight: Tensor, name: str) -> Tensor:
    found: Tensor = optimizer.state[weight][name]
    return found
