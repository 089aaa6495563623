"""Computes the loss of a micro-batch by the formulas in `lockstep.algos`, and reduces its metrics to one vector of
fixed size per step.

Nothing here communicates, and the shape of the vector does not depend on the data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lockstep.algos import importance_sampling, losses
from lockstep.algos.importance_sampling import ImportanceWeights, logprob_gap
from lockstep.algos.losses import PolicyTerms, cross_entropy, entropy_loss, kl_divergence, sum_weighted_losses
from lockstep.config.algorithm import CISPO, GSPO, CrossEntropy, PolicyLoss, PPOClip
from lockstep.data.micro_batch import MicroBatch

TOTAL_METRICS = ("tokens", "loss", "policy_loss", "kl_loss", "entropy_loss")
"""Summed over targets, micro-batches and ranks; losses are weighted, so their sum is the aggregated loss."""

MEAN_METRICS = (
    "logprob",
    "entropy",
    *losses.POLICY_STATS,
    "kl",
    "engine_gap_mean",
    "importance_weight",
    "importance_cut",
)
"""Summed over targets, micro-batches and ranks, unweighted, and divided by `tokens` at the end."""

MAX_METRICS = ("engine_gap_max", "importance_weight_max")
"""Metrics of which the maximum over targets, micro-batches and ranks is taken."""

METRIC_NAMES = (*TOTAL_METRICS, *MEAN_METRICS, *MAX_METRICS)


@dataclass(slots=True)
class LossOutput:
    """The loss of one micro-batch (a scalar with gradient) and its metrics, by the names in METRIC_NAMES."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def required_fields(loss: PolicyLoss | CrossEntropy) -> tuple[str, ...]:
    """Returns the fields that a `MicroBatch` must have for a loss."""
    if isinstance(loss, CrossEntropy):
        return ("weight",)
    fields = ["weight", "advantage", "engine_logprob"]
    if loss.old_logprobs == "trainer" or loss.importance.kind != "off":
        fields.append("old_logprob")
    if has_kl_loss(loss):
        fields.append("reference_logprob")
    return tuple(fields)


def has_kl_loss(loss: PolicyLoss) -> bool:
    """Returns whether the KL to the reference is a term of the loss."""
    return loss.kl.coefficient > 0 and loss.kl.where == "loss"


def needs_sequences(loss: PolicyLoss | CrossEntropy) -> bool:
    """Returns whether a target's loss depends on the other targets of its sequence; these must then be in the same
    row."""
    return isinstance(loss, GSPO) or (isinstance(loss, PolicyLoss) and loss.importance.level == "sequence")


def check_fields(microbatches: Sequence[MicroBatch[np.ndarray]], loss: PolicyLoss | CrossEntropy) -> None:
    """Raises ValueError if there is no micro-batch, or a field is missing."""
    if not microbatches:
        raise ValueError("a step needs at least one micro-batch, got none; an idle rank gets an empty one")
    for number, microbatch in enumerate(microbatches):
        missing = [name for name in required_fields(loss) if name not in microbatch.fields]
        if missing:
            raise ValueError(
                f"micro-batch {number} has no field {missing[0]!r}, which the configured loss {loss.kind} needs "
                f"(it has {', '.join(sorted(microbatch.fields))}); set it with TrainingBatch.set_field"
            )
        if needs_sequences(loss) and microbatch.sequences is None:
            raise ValueError(f"micro-batch {number} has no sequences of its targets; create it with pack()")


def compute_loss(
    loss: PolicyLoss | CrossEntropy,
    fields: dict[str, Tensor],
    logprobs: Tensor,
    entropies: Tensor | None,
    sequences: Tensor | None = None,
) -> LossOutput:
    """Computes the loss of a micro-batch: a sum over its targets, whose weights include the denominators.

    Args:
        fields: as in `MicroBatch`, float32 `[targets]`.
        logprobs: `[targets]`, with gradient.
        entropies: `[targets]`, for a policy loss.
        sequences: int64 `[targets]`, as in `MicroBatch`; required if `needs_sequences`.
    """
    weights = fields["weight"]
    live = weights != 0
    metrics = {"tokens": live.sum(), "logprob": _masked_sum(logprobs, live)}
    if isinstance(loss, CrossEntropy):
        total = sum_weighted_losses(cross_entropy(logprobs), weights)
        return LossOutput(total, metrics | {"loss": total.detach()})
    if entropies is None:
        raise ValueError("a policy loss needs entropies, got None")
    if sequences is None and needs_sequences(loss):
        raise ValueError(f"the configured loss {loss.kind} needs the sequences of the targets, got None")
    return _policy_loss_output(loss, fields, logprobs, entropies, sequences, metrics)


def _policy_loss_output(
    loss: PolicyLoss,
    fields: dict[str, Tensor],
    logprobs: Tensor,
    entropies: Tensor,
    sequences: Tensor | None,
    metrics: dict[str, Tensor],
) -> LossOutput:
    weights, engine = fields["weight"], fields["engine_logprob"]
    live = weights != 0
    terms = _policy_terms(loss, fields, logprobs, sequences, live)
    per_token = terms.loss
    correction = _importance_correction(loss, fields, sequences, live)
    if correction is not None:
        per_token = per_token * correction.weights
        metrics["importance_weight"] = _masked_sum(correction.weights, live)
        metrics["importance_cut"] = _masked_sum(correction.cut, live)
        metrics["importance_weight_max"] = torch.where(live, correction.raw, torch.zeros_like(correction.raw)).amax()
    total = term = sum_weighted_losses(per_token, weights)
    metrics["policy_loss"] = term.detach()
    if "reference_logprob" in fields and loss.kl.coefficient > 0:
        divergence = kl_divergence(logprobs, fields["reference_logprob"], loss.kl.estimator)
        metrics["kl"] = _masked_sum(divergence, live)
        if has_kl_loss(loss):
            term = loss.kl.coefficient * sum_weighted_losses(divergence, weights)
            total, metrics["kl_loss"] = total + term, term.detach()
    if loss.entropy_coefficient:
        term = sum_weighted_losses(entropy_loss(entropies, loss.entropy_coefficient), weights)
        total, metrics["entropy_loss"] = total + term, term.detach()
    # If the trainer's old log-probabilities are known, use them, so that the gap excludes the updates since then.
    metrics["engine_gap_mean"], metrics["engine_gap_max"] = logprob_gap(
        fields.get("old_logprob", logprobs), engine, weights
    )
    metrics |= {"loss": total.detach(), "entropy": _masked_sum(entropies, live)}
    metrics |= dict(zip(losses.POLICY_STATS, terms.sums(weights).unbind(), strict=True))
    return LossOutput(total, metrics)


def _policy_terms(
    loss: PolicyLoss, fields: dict[str, Tensor], logprobs: Tensor, sequences: Tensor | None, live: Tensor
) -> PolicyTerms:
    """Computes the policy loss per token."""
    old = fields["old_logprob" if loss.old_logprobs == "trainer" else "engine_logprob"]
    advantages = fields["advantage"]
    if isinstance(loss, PPOClip):
        return losses.ppo_clip(logprobs, old, advantages, loss.clip_low, loss.clip_high, loss.dual_clip)
    if isinstance(loss, CISPO):
        return losses.cispo(logprobs, old, advantages, loss.clip_low, loss.clip_high)
    if isinstance(loss, GSPO) and sequences is not None:
        return losses.gspo(logprobs, old, advantages, sequences, live, loss.clip_low, loss.clip_high)
    raise TypeError(f"there is no policy loss {type(loss).__name__}")


def _importance_correction(
    loss: PolicyLoss, fields: dict[str, Tensor], sequences: Tensor | None, live: Tensor
) -> ImportanceWeights | None:
    """Computes the importance weights of the trainer's over the engine's probabilities; None if they are off."""
    config = loss.importance
    if config.kind == "off":
        return None
    trainer, engine = fields["old_logprob"], fields["engine_logprob"]
    if config.level == "sequence" and sequences is not None:
        ratios = importance_sampling.sequence_ratios(trainer, engine, sequences, live)
    else:
        ratios = importance_sampling.token_ratios(trainer, engine)
    if config.kind == "truncate":
        return importance_sampling.truncate_ratios(ratios, config.cap)
    return importance_sampling.mask_ratios(ratios, config.cap, config.floor)


class MetricAccumulator:
    """Sums the metrics of one rank's micro-batches on the device, without a copy to the host per micro-batch."""

    def __init__(self, device: torch.device) -> None:
        self._values = torch.zeros(len(METRIC_NAMES), dtype=torch.float64, device=device)
        self._first_bad = torch.zeros((), dtype=torch.float64, device=device)
        """Number of the first micro-batch whose loss is not finite, counted from 1; 0 for none."""
        self._count = 0

    @torch.no_grad()
    def add(self, outcome: LossOutput) -> None:
        """Adds the metrics of a micro-batch."""
        self._count += 1
        zero = torch.zeros((), dtype=torch.float64, device=self._values.device)
        values = torch.stack([outcome.metrics.get(name, zero).detach().double() for name in METRIC_NAMES])
        summed = len(METRIC_NAMES) - len(MAX_METRICS)
        self._values[:summed] += values[:summed]
        self._values[summed:] = torch.maximum(self._values[summed:], values[summed:])
        bad = ~torch.isfinite(outcome.loss.detach())
        self._first_bad = torch.where(bad & (self._first_bad == 0), float(self._count), self._first_bad)

    def vector(self, square_norm: Tensor) -> Tensor:
        """Returns the float64 `[2 + len(METRIC_NAMES)]` that the ranks exchange once per step."""
        head = torch.stack([square_norm.to(self._values.device, torch.float64), self._first_bad])
        return torch.cat([head, self._values])


class ReducedMetrics:
    """The metrics of a step, reduced from the vectors of all ranks. All ranks get the same result.

    Args:
        vectors: float64 `[ranks, 2 + len(METRIC_NAMES)]`.
    """

    def __init__(self, vectors: Tensor) -> None:
        norms, first_bad, values = vectors[:, 0], vectors[:, 1], vectors[:, 2:]
        self.square_norm = float(norms.sum())
        self.bad_microbatches = [(rank, int(bad) - 1) for rank, bad in enumerate(first_bad.tolist()) if bad > 0]
        """(rank, micro-batch) of each rank's first loss that is not finite."""
        self.bad_gradients = [rank for rank, norm in enumerate(norms.tolist()) if not norm < float("inf")]
        """Ranks with gradients that are not finite."""
        summed = len(METRIC_NAMES) - len(MAX_METRICS)
        reduced = torch.cat([values[:, :summed].sum(0), values[:, summed:].amax(0)])
        self._values = dict(zip(METRIC_NAMES, reduced.tolist(), strict=True))

    def metrics(self, loss: PolicyLoss | CrossEntropy) -> dict[str, float]:
        """Returns the metrics of this loss by name: losses as aggregated, everything else per token."""
        values = {name: self._values[name] for name in (*TOTAL_METRICS, *MAX_METRICS)}
        tokens = max(values["tokens"], 1.0)
        values |= {name: self._values[name] / tokens for name in MEAN_METRICS}
        if isinstance(loss, CrossEntropy):
            return {name: values[name] for name in ("loss", "tokens", "logprob")}
        values["clip_fraction"] = values["clip_low"] + values["clip_high"] + values["clip_dual"]
        return {name: values[name] for name in values if name not in _unused_metrics(loss)}


def _unused_metrics(loss: PolicyLoss) -> set[str]:
    """Returns the metrics that are always zero with this config."""
    unused = set()
    if loss.kl.coefficient == 0:
        unused |= {"kl"}
    if not has_kl_loss(loss):
        unused |= {"kl_loss"}
    if not loss.entropy_coefficient:
        unused |= {"entropy_loss"}
    if loss.importance.kind == "off":
        unused |= {"importance_weight", "importance_cut", "importance_weight_max"}
    if not isinstance(loss, PPOClip) or loss.dual_clip is None:
        unused |= {"clip_dual"}
    return unused


def _masked_sum(values: Tensor, live: Tensor) -> Tensor:
    """Returns the sum over the targets with a loss, without gradient."""
    return torch.where(live, values.detach().double(), 0.0).sum()
