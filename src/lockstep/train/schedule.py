"""The learning rate as a pure function of the optimizer step."""

import math

from lockstep.config.recipes import Config, GRPOConfig
from lockstep.config.trainer import Schedule


def optimizer_steps(config: Config) -> int:
    """Optimizer steps of a whole run: what a schedule without `total_steps` decays over."""
    if isinstance(config, GRPOConfig):
        completions = config.prompts_per_step * config.group_size
        return config.steps * config.epochs * math.ceil(completions / (config.minibatch_size or completions))
    return config.steps


def learning_rate(step: int, peak: float, schedule: Schedule, total: int) -> float:
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
