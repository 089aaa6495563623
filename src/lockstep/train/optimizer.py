"""AdamW on the rows that this rank holds, and the learning rate as a pure function of the optimizer step.

AdamW is elementwise, so every rank updates its own rows as plain tensors, without the cost of DTensor dispatch.
"""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from lockstep.config.trainer import AdamWConfig, LRScheduleConfig

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm(\.|$)|_norm(\.|$)")


def is_decayed(name: str) -> bool:
    """Returns whether weight decay applies to a parameter with this name: to all but biases and norms. Together with
    `norm_parameter_ids`, the rule is the same as in transformers' Trainer (and so in TRL)."""
    return _NOT_DECAYED.search(name.lower()) is None


def norm_parameter_ids(model: nn.Module) -> set[int]:
    """Returns the `id` of every parameter of an `nn.LayerNorm`, whatever its name is (GPT-2: `ln_1`)."""
    modules = (module for module in model.modules() if isinstance(module, nn.LayerNorm))
    return {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}


def decay_groups(model: nn.Module, weights: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Returns the groups of torch's optimizers: the weights that decay, and those that do not. One may be empty."""
    norms = norm_parameter_ids(model)
    decays = {name: is_decayed(name) and id(each) not in norms for name, each in weights.items()}
    return [
        {"params": [each for name, each in weights.items() if decays[name] is decayed], "weight_decay": decay}
        for decayed, decay in ((True, weight_decay), (False, 0.0))
    ]


class ShardedAdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), by torch's fused kernels.

    Args:
        parameters: this rank's rows by name.
        norms: names that are not decayed, in addition to those that `is_decayed` excludes.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: AdamWConfig, norms: Collection[str] = ()) -> None:
        self.config = config
        self._decays = {name: is_decayed(name) and name not in norms for name in parameters}
        self.steps = 0
        """Steps taken."""
        self.exp_avg = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}

    @torch.no_grad()
    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float) -> None:
        """Updates the parameters that have a gradient, in place."""
        self.steps += 1
        with_gradient = [name for name in gradients if gradients[name].numel()]
        for decayed in (True, False):
            names_of_kind = [name for name in with_gradient if self._decays[name] is decayed]
            if not names_of_kind:
                continue
            adamw(
                [parameters[name] for name in names_of_kind],
                [gradients[name] for name in names_of_kind],
                [self.exp_avg[name] for name in names_of_kind],
                [self.exp_avg_sq[name] for name in names_of_kind],
                [],
                # The kernel increments each counter before it uses it, so every parameter needs its own.
                [torch.full((), self.steps - 1.0, device=gradients[name].device) for name in names_of_kind],
                fused=True,
                amsgrad=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=lr,
                weight_decay=self.config.weight_decay if decayed else 0.0,
                eps=self.config.eps,
                maximize=False,
            )

    def reset(self) -> None:
        """Forgets all steps."""
        self.steps = 0
        for moments in (self.exp_avg, self.exp_avg_sq):
            for tensor in moments.values():
                tensor.zero_()

    def to(self, device: torch.device) -> None:
        """Moves the moments to the device."""
        for moments in (self.exp_avg, self.exp_avg_sq):
            for name in moments:
                moments[name] = moments[name].to(device)


@torch.no_grad()
def square_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """Returns the sum of squares of this rank's gradients, a float64 scalar. It is not finite if a gradient is not."""
    present = [gradient for gradient in gradients.values() if gradient.numel()]
    if not present:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(present, 2, dtype=torch.float32)
    return torch.stack([norm.double() for norm in norms]).square().sum()


@torch.no_grad()
def clip_gradients(gradients: Mapping[str, Tensor], norm: float, max_norm: float | None) -> None:
    """Scales gradients so that their global norm is at most `max_norm` (Pascanu et al. 2013), with torch's `1e-6` in
    the divisor."""
    if max_norm is not None and norm > max_norm:
        torch._foreach_mul_(list(gradients.values()), max_norm / (norm + 1e-6))


def learning_rate(step: int, peak: float, schedule: LRScheduleConfig, total: int) -> float:
    """Returns the learning rate of optimizer step `step` (the first is 0) of `total`.

    During warm-up the rate rises linearly. It starts at `peak / (warmup_steps + 1)` and not at 0, so that no batch is
    wasted, and the first step after warm-up has the peak. Afterwards it is constant, or decays linearly or by a half
    cosine (Loshchilov & Hutter 2017) to `final * peak`, which it keeps from step `total` on.
    """
    total = schedule.total_steps or total
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if schedule.kind == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    remaining = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final + (1 - schedule.final) * remaining)
