"""AdamW over the rows that this rank holds, and the learning rate as a pure function of the optimizer step.

AdamW is elementwise, so every rank updates its own rows: plain tensors, no DTensor dispatch per parameter.
"""

import math
import re
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from lockstep.config.recipes import GRPOConfig, RecipeConfig
from lockstep.config.trainer import AdamWConfig, LRScheduleConfig

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm(\.|$)|_norm(\.|$)")


def is_decayed(name: str) -> bool:
    """Whether weight decay applies to a parameter by its name: to all but biases and norms. With `norm_parameter_ids`
    that equals transformers' Trainer (and so TRL)."""
    return _NOT_DECAYED.search(name.lower()) is None


def norm_parameter_ids(model: nn.Module) -> set[int]:
    """Ids of the parameters of `nn.LayerNorm`s, whatever they are called (GPT-2: `ln_1`)."""
    modules = (module for module in model.modules() if isinstance(module, nn.LayerNorm))
    return {id(parameter) for module in modules for parameter in module.parameters(recurse=False)}


class ShardedAdamW:
    """Decoupled weight decay Adam (Loshchilov & Hutter 2019), torch's fused kernels.

    Args:
        parameters: this rank's rows by name; updated in place.
        norms: names that are not decayed, beside those that `is_decayed` excludes.
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
        """One update; a parameter without gradient is left alone."""
        self.steps += 1
        names = [name for name in gradients if gradients[name].numel()]
        for decayed in (True, False):
            chosen = [name for name in names if self._decays[name] is decayed]
            if not chosen:
                continue
            adamw(
                [parameters[name] for name in chosen],
                [gradients[name] for name in chosen],
                [self.exp_avg[name] for name in chosen],
                [self.exp_avg_sq[name] for name in chosen],
                [],
                # The kernel counts before it uses them, so each wants a counter of its own.
                [torch.full((), self.steps - 1.0, device=gradients[name].device) for name in chosen],
                fused=True,
                amsgrad=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=lr,
                weight_decay=self.config.weight_decay if decayed else 0.0,
                eps=self.config.eps,
                maximize=False,
            )

    def to(self, device: torch.device) -> None:
        """Moves the moments."""
        for moments in (self.exp_avg, self.exp_avg_sq):
            for name in moments:
                moments[name] = moments[name].to(device)


@torch.no_grad()
def square_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """Sum of squares of this rank's gradients, float64 scalar. Not finite where one of them is not."""
    present = [gradient for gradient in gradients.values() if gradient.numel()]
    if not present:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(present)
    return torch.stack([norm.double() for norm in norms]).square().sum()


@torch.no_grad()
def clip_gradients(gradients: Mapping[str, Tensor], norm: float, max_norm: float | None) -> None:
    """Clips to a global norm (Pascanu et al. 2013), with torch's `1e-6` in the divisor."""
    if max_norm is not None and norm > max_norm:
        torch._foreach_mul_(list(gradients.values()), max_norm / (norm + 1e-6))


def optimizer_steps(config: RecipeConfig) -> int:
    """Optimizer steps of a whole run: what a schedule without `total_steps` decays over."""
    if isinstance(config, GRPOConfig):
        completions = config.prompts_per_step * config.group_size
        return config.steps * config.epochs * math.ceil(completions / (config.minibatch_size or completions))
    return config.steps


def learning_rate(step: int, peak: float, schedule: LRScheduleConfig, total: int) -> float:
    """The rate of optimizer step `step` (the first is 0) of `total`.

    Warm-up rises linearly to the peak, which the step after the last of warm-up has; the first step's rate is
    `peak / (warmup_steps + 1)`, never 0, so that no batch is wasted. Then constant, or linear or half-cosine
    (Loshchilov & Hutter 2017) decay to `final * peak`, which holds from step `total` on.
    """
    total = schedule.total_steps or total
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if schedule.kind == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final + (1 - schedule.final) * left)
