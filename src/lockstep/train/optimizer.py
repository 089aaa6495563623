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

from lockstep.config.model import ModelConfig
from lockstep.config.trainer import AdamWConfig, LRScheduleConfig, TrainerConfig
from lockstep.models.vision.model_parts import MODEL_PARTS, ModelPart

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm(\.|$)|_norm(\.|$)")


def is_decayed(name: str) -> bool:
    """Returns whether weight decay applies to a parameter with this name: to all but biases and norms. Together with
    `norm_parameter_ids`, the rule is the same as in transformers' Trainer (and so in TRL)."""
    return _NOT_DECAYED.search(name.lower()) is None


def norm_parameter_ids(model: nn.Module) -> set[int]:
    """Returns the `id` of every parameter of an `nn.LayerNorm`, whatever its name is (GPT-2: `ln_1`)."""
    modules = (module for module in model.modules() if isinstance(module, nn.LayerNorm))
    return {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}


def optimizer_groups(
    model: nn.Module, weights: Mapping[str, nn.Parameter], parts: Mapping[str, ModelPart], weight_decay: float
) -> list[dict[str, Any]]:
    """Returns the groups of torch's optimizers: of each part of the model (`part`), the weights that decay, and those
    that do not. None is empty.

    Args:
        parts: the part of each weight.
    """
    norms = norm_parameter_ids(model)
    members: dict[tuple[ModelPart, bool], list[nn.Parameter]] = {}
    for name, each in weights.items():
        members.setdefault((parts[name], is_decayed(name) and id(each) not in norms), []).append(each)
    return [
        {"params": members[part, decayed], "weight_decay": weight_decay if decayed else 0.0, "part": part}
        for part in MODEL_PARTS
        for decayed in (True, False)
        if (part, decayed) in members
    ]


class ShardedAdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), by torch's fused kernels.

    Args:
        parameters: this rank's rows by name.
        parts: the part of the model that each parameter belongs to.
        norms: names that are not decayed, in addition to those that `is_decayed` excludes.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: AdamWConfig,
        parts: Mapping[str, ModelPart],
        norms: Collection[str] = (),
    ) -> None:
        self.config = config
        self._groups = {name: (parts[name], is_decayed(name) and name not in norms) for name in parameters}
        self.steps = 0
        """Steps taken."""
        self.exp_avg = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}

    @torch.no_grad()
    def step(
        self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rates: Mapping[ModelPart, float]
    ) -> None:
        """Updates the parameters that have a gradient, in place.

        Args:
            rates: the learning rate of each part.
        """
        self.steps += 1
        groups: dict[tuple[ModelPart, bool], list[str]] = {}
        for name in gradients:
            if gradients[name].numel():
                groups.setdefault(self._groups[name], []).append(name)
        for (part, decayed), names_of_kind in groups.items():
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
                lr=rates[part],
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


def learning_rates(step: int, model: ModelConfig, trainer: TrainerConfig, total: int) -> dict[ModelPart, float]:
    """Returns the learning rate of each part of the model in an optimizer step; see `learning_rate`. All parts have the
    same schedule, and may have their own peak (`model.vision`)."""
    peaks = {part: getattr(model.vision, part).lr or trainer.optimizer.lr for part in MODEL_PARTS}
    return {part: learning_rate(step, peak, trainer.schedule, total) for part, peak in peaks.items()}


def lr_metrics(rates: Mapping[ModelPart, float], model: ModelConfig) -> dict[str, float]:
    """Returns the metrics about learning rates: `lr`, and `lr_PART` of parts with a rate of their own."""
    own = {part: rate for part, rate in rates.items() if getattr(model.vision, part).lr is not None}
    common = next((rate for part, rate in rates.items() if part not in own), rates["language"])
    return {"lr": common, **{f"lr_{part}": rate for part, rate in own.items()}}


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
