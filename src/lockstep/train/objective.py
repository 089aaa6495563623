"""Objectives: what a trained model learns from.

An objective names the fields and model outputs that it needs, computes the loss of a micro-batch with the formulas in
`lockstep.algos`, and says how each of its metrics is reduced. It never communicates: denominators and statistics of the
batch arrive as fields, and the shape of the metric vector does not depend on the data.

To add one: a config class in `lockstep.config` (an `ObjectiveConfig`, added to `AnyObjective`), and a class
here, added to `_OBJECTIVES`. `CrossEntropyObjective` is the shortest example.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from lockstep.algos import importance_sampling, losses
from lockstep.algos.critic import value_loss
from lockstep.algos.importance_sampling import ImportanceWeights, logprob_gap
from lockstep.algos.losses import PolicyTerms, cross_entropy, entropy_loss, kl_divergence, sum_weighted_losses
from lockstep.algos.preference_losses import (
    PAIR_METRICS,
    PreferenceSettings,
    pair_logprobs,
    pair_metrics,
    preference_loss,
)
from lockstep.config.actor_critic import ValueLoss
from lockstep.config.algorithm import (
    CISPO,
    GSPO,
    BradleyTerry,
    CrossEntropy,
    ModelOutput,
    ObjectiveConfig,
    PolicyLoss,
    PPOClip,
    PreferenceLoss,
)
from lockstep.data.micro_batch import MicroBatch

Reduction = Literal["sum", "mean", "max"]
"""How a metric becomes one number per step: summed over targets, micro-batches and ranks (losses are weighted, so their
sum is the aggregated loss); summed and divided by the number of targets with a loss; or the maximum."""

COMMON_METRICS: Mapping[str, Reduction] = {"loss": "sum", "tokens": "sum", "logprob": "mean"}
"""Metrics of every objective on log-probabilities. `tokens` is the number of targets with a loss, the divisor of
means."""


@dataclass(slots=True)
class LossOutput:
    """The loss of one micro-batch (a scalar with gradient) and its metrics, by name; those left out are 0."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """What a trained model learns from."""

    @property
    def name(self) -> str:
        """The objective's `kind` in the config, for errors."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that a `MicroBatch` must have."""

    @property
    def outputs(self) -> tuple[ModelOutput, ...]:
        """The outputs of the model that the loss needs."""

    @property
    def needs_sequences(self) -> bool:
        """Whether a target's loss depends on the other targets of its sequence; these must then be in the same row."""

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """Every metric that a step reports, in the order of the metric vector; `tokens` and `loss` among them."""

    def compute(
        self, fields: Mapping[str, Tensor], outputs: Mapping[ModelOutput, Tensor], sequences: Tensor | None
    ) -> LossOutput:
        """Computes the loss of a micro-batch: a sum over its targets, whose weights include the denominators.

        Args:
            fields: as in `MicroBatch`, float32 `[targets]`.
            outputs: `[targets]` each, with gradient.
            sequences: int64 `[targets]`, as in `MicroBatch`; required if `needs_sequences`.
        """


class CrossEntropyObjective:
    """The negative log-likelihood of the targets."""

    fields: tuple[str, ...] = ("weight",)
    outputs: tuple[ModelOutput, ...] = ("logprobs",)
    needs_sequences = False
    metrics = COMMON_METRICS

    def __init__(self, config: CrossEntropy) -> None:
        self.name = config.kind

    def compute(
        self, fields: Mapping[str, Tensor], outputs: Mapping[ModelOutput, Tensor], sequences: Tensor | None = None
    ) -> LossOutput:
        """See `Objective`."""
        weights, logprobs = fields["weight"], outputs["logprobs"]
        total = sum_weighted_losses(cross_entropy(logprobs), weights)
        return LossOutput(total, _common_metrics(logprobs, weights) | {"loss": total.detach()})


class PreferenceObjective:
    """Losses of pairs of completions, from the log-probabilities of their tokens.

    Sequence 2i is the better completion of pair i and 2i + 1 the worse one. With the field `coefficient` the loss is
    the linear function of the log-probabilities that has its gradient, for pairs whose completions are in different
    rows, and for losses that compare the completions of different pairs. The controller then computes it from
    log-probabilities that were evaluated before the update; with the same weights and without dropout, both are equal.
    """

    outputs: tuple[ModelOutput, ...] = ("logprobs",)
    needs_sequences = True

    def __init__(self, config: PreferenceLoss) -> None:
        self.config, self.name = config, config.kind
        self.fields: tuple[str, ...] = ("weight", "coefficient" if config.evaluates_policy else "pair_weight")
        self.settings = preference_settings(config)
        parts = config.terms if len(config.terms) > 1 else ()
        names = (*PAIR_METRICS, *(f"loss/{name}" for name in parts)) if not config.evaluates_policy else ()
        self.metrics: Mapping[str, Reduction] = {**COMMON_METRICS, **dict.fromkeys(names, "sum")}

    def compute(
        self, fields: Mapping[str, Tensor], outputs: Mapping[ModelOutput, Tensor], sequences: Tensor | None = None
    ) -> LossOutput:
        """See `Objective`. With coefficients, the metrics of pairs are those that the recipe adds."""
        if sequences is None:
            raise ValueError(f"the configured loss {self.name} needs the sequences of the targets, got None")
        logprobs = outputs["logprobs"]
        metrics = _common_metrics(logprobs, fields["weight"])
        if "coefficient" in fields:
            total = sum_weighted_losses(logprobs, fields["coefficient"])
            return LossOutput(total, metrics | {"loss": total.detach()})
        pairs = pair_logprobs(logprobs.double(), sequences, fields)
        weights = fields["pair_weight"][:1].double().expand(len(pairs.chosen))  # the same for all of a step
        total, each = preference_loss(pairs, self.config.terms, self.settings, weights)
        metrics |= {f"loss/{name}": value.detach() for name, value in each.items()}
        metrics |= {name: (values * weights).sum() for name, values in pair_metrics(pairs, self.config.beta).items()}
        return LossOutput(total, metrics | {"loss": total.detach()})


def preference_settings(config: PreferenceLoss) -> PreferenceSettings:
    """The constants of the losses."""
    return PreferenceSettings(
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        divergence=config.f_divergence_type,
        divergence_alpha=config.f_alpha_divergence_coef,
        discopop_tau=config.discopop_tau,
        simpo_gamma=config.simpo_gamma,
        alphapo_alpha=config.alphapo_alpha,
    )


class BradleyTerryObjective:
    """The likelihood of the better completions of pairs, from a score of each completion.

    Sequence 2i is the better completion of pair i and 2i + 1 the worse one. With the field `coefficient` the loss is
    the linear function of the scores that has its gradient, for pairs whose completions are in different rows.
    """

    fields: tuple[str, ...] = ("weight", "margin")
    outputs: tuple[ModelOutput, ...] = ("scores",)
    needs_sequences = True
    metrics: Mapping[str, Reduction] = {
        "loss": "sum", "tokens": "sum", "accuracy": "mean", "margin": "mean", "chosen_reward": "mean",
        "rejected_reward": "mean", "mean_reward": "mean", "mean_square_reward": "mean",
    }  # fmt: skip

    def __init__(self, config: BradleyTerry) -> None:
        self.config, self.name = config, config.kind

    def compute(
        self, fields: Mapping[str, Tensor], outputs: Mapping[ModelOutput, Tensor], sequences: Tensor | None = None
    ) -> LossOutput:
        """See `Objective`. With coefficients, the metrics are those that the recipe adds."""
        if sequences is None:
            raise ValueError(f"the configured loss {self.name} needs the sequences of the targets, got None")
        scores, weights = outputs["scores"], fields["weight"]
        if "coefficient" in fields:
            total = sum_weighted_losses(scores, fields["coefficient"])
            return LossOutput(total, {"tokens": (weights != 0).sum(), "loss": total.detach()})
        pair, sign = sequences // 2, 1.0 - 2.0 * (sequences % 2)

        def by_pair(values: Tensor) -> Tensor:
            return values.new_zeros(int(pair.max()) + 1).index_add(0, pair, values)

        gaps, of_pairs = by_pair(scores * sign), by_pair(weights)
        losses_of_pairs = bradley_terry_loss(gaps, by_pair(scores), by_pair(fields["margin"]) / 2, self.config)
        total = sum_weighted_losses(losses_of_pairs, of_pairs)
        return LossOutput(total, self._metrics(scores.detach(), gaps.detach(), pair, sign, weights != 0, total))

    def _metrics(
        self, scores: Tensor, gaps: Tensor, pair: Tensor, sign: Tensor, live: Tensor, total: Tensor
    ) -> dict[str, Tensor]:
        """Sums over the completions. What concerns a pair counts once for each of its two completions."""
        return {
            "loss": total.detach(), "tokens": live.sum(),
            "accuracy": _masked_sum((gaps > 0).double()[pair], live), "margin": _masked_sum(gaps[pair], live),
            "chosen_reward": _masked_sum(scores * (1 + sign), live),
            "rejected_reward": _masked_sum(scores * (1 - sign), live),
            "mean_reward": _masked_sum(scores, live), "mean_square_reward": _masked_sum(scores.square(), live),
        }  # fmt: skip


def bradley_terry_loss(gaps: Tensor, sums: Tensor, margins: Tensor, config: BradleyTerry) -> Tensor:
    """The loss of each pair, `[pairs]`.

    Args:
        gaps: score of the better completion less that of the worse one, `[pairs]`.
        sums: of the two scores, `[pairs]`.
        margins: `[pairs]`.
    """
    values = losses.bradley_terry(gaps, margins, config.label_smoothing)
    return values + config.center_rewards_coefficient * sums.square() if config.center_rewards_coefficient else values


class ValueObjective:
    """The squared error of a critic's values of the states before the targets."""

    fields: tuple[str, ...] = ("weight", "return", "old_value")
    outputs: tuple[ModelOutput, ...] = ("scores",)
    needs_sequences = False
    metrics: Mapping[str, Reduction] = {
        "loss": "sum", "tokens": "sum", "value": "mean", "clip_fraction": "mean",
    }  # fmt: skip

    def __init__(self, config: ValueLoss) -> None:
        self.config, self.name = config, config.kind

    def compute(
        self, fields: Mapping[str, Tensor], outputs: Mapping[ModelOutput, Tensor], sequences: Tensor | None = None
    ) -> LossOutput:
        """See `Objective`."""
        weights, values = fields["weight"], outputs["scores"]
        per_target, clipped = value_loss(values, fields["return"], fields["old_value"], self.config.clip)
        total, live = sum_weighted_losses(per_target, weights), weights != 0
        sums = {"value": _masked_sum(values, live), "clip_fraction": _masked_sum(clipped, live)}
        return LossOutput(total, {"loss": total.detach(), "tokens": live.sum(), **sums})


class PolicyObjective:
    """A policy loss with its importance correction, KL penalty and entropy bonus."""

    outputs: tuple[ModelOutput, ...] = ("logprobs", "entropy")

    def __init__(self, config: PolicyLoss) -> None:
        self.config = config
        self.name = config.kind
        self.fields = config.required_fields
        self.needs_sequences = isinstance(config, GSPO) or config.importance.level == "sequence"
        self.metrics = _policy_metrics(config)

    def compute(
        self, fields: Mapping[str, Tensor], outputs: Mapping[ModelOutput, Tensor], sequences: Tensor | None = None
    ) -> LossOutput:
        """See `Objective`. Raises ValueError if the sequences are needed and missing."""
        if sequences is None and self.needs_sequences:
            raise ValueError(f"the configured loss {self.name} needs the sequences of the targets, got None")
        config, logprobs, entropies = self.config, outputs["logprobs"], outputs["entropy"]
        weights, engine = fields["weight"], fields["engine_logprob"]
        live = weights != 0
        metrics = _common_metrics(logprobs, weights)
        terms = self._policy_terms(fields, logprobs, sequences, live)
        per_token = terms.loss
        correction = self._importance_correction(fields, sequences, live)
        if correction is not None:
            per_token = per_token * correction.weights
            metrics["importance_weight"] = _masked_sum(correction.weights, live)
            metrics["importance_cut"] = _masked_sum(correction.cut, live)
            raw = torch.where(live, correction.raw, torch.zeros_like(correction.raw))
            metrics["importance_weight_max"] = raw.amax()
        total = term = sum_weighted_losses(per_token, weights)
        metrics["policy_loss"] = term.detach()
        if "reference_logprob" in fields and config.kl.coefficient > 0:
            divergence = kl_divergence(logprobs, fields["reference_logprob"], config.kl.estimator)
            metrics["kl"] = _masked_sum(divergence, live)
            if config.has_kl_loss:
                term = config.kl.coefficient * sum_weighted_losses(divergence, weights)
                total, metrics["kl_loss"] = total + term, term.detach()
        if config.entropy_coefficient:
            term = sum_weighted_losses(entropy_loss(entropies, config.entropy_coefficient), weights)
            total, metrics["entropy_loss"] = total + term, term.detach()
        # If the trainer's old log-probabilities are known, use them, so that the gap excludes the updates since then.
        metrics["engine_gap_mean"], metrics["engine_gap_max"] = logprob_gap(
            fields.get("old_logprob", logprobs), engine, weights
        )
        metrics |= {"loss": total.detach(), "entropy": _masked_sum(entropies, live)}
        metrics |= dict(zip(losses.POLICY_STATS, terms.sums(weights).unbind(), strict=True))
        metrics["clip_fraction"] = metrics["clip_low"] + metrics["clip_high"] + metrics["clip_dual"]
        return LossOutput(total, metrics)

    def _policy_terms(
        self, fields: Mapping[str, Tensor], logprobs: Tensor, sequences: Tensor | None, live: Tensor
    ) -> PolicyTerms:
        """Computes the policy loss per token."""
        config, advantages = self.config, fields["advantage"]
        old = fields["old_logprob" if config.old_logprobs == "trainer" else "engine_logprob"]
        if isinstance(config, PPOClip):
            return losses.ppo_clip(logprobs, old, advantages, config.clip_low, config.clip_high, config.dual_clip)
        if isinstance(config, CISPO):
            return losses.cispo(logprobs, old, advantages, config.clip_low, config.clip_high)
        if isinstance(config, GSPO) and sequences is not None:
            return losses.gspo(logprobs, old, advantages, sequences, live, config.clip_low, config.clip_high)
        raise TypeError(f"there is no policy loss {type(config).__name__}")

    def _importance_correction(
        self, fields: Mapping[str, Tensor], sequences: Tensor | None, live: Tensor
    ) -> ImportanceWeights | None:
        """Computes the importance weights of the trainer's over the engine's probabilities; None if they are off."""
        config = self.config.importance
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


_OBJECTIVES: tuple[tuple[type[ObjectiveConfig], Callable[[Any], Objective]], ...] = (
    (CrossEntropy, CrossEntropyObjective),
    (PreferenceLoss, PreferenceObjective),
    (BradleyTerry, BradleyTerryObjective),
    (ValueLoss, ValueObjective),
    (PolicyLoss, PolicyObjective),
)
"""The objective of each config class."""


def make_objective(config: ObjectiveConfig) -> Objective:
    """Returns the objective of a config. Raises TypeError if its class has none."""
    for kind, objective in _OBJECTIVES:
        if isinstance(config, kind):
            return objective(config)
    raise TypeError(f"there is no objective for {type(config).__name__}")


def check_fields(microbatches: Sequence[MicroBatch[np.ndarray]], objective: Objective) -> None:
    """Raises ValueError if there is no micro-batch, or a field is missing."""
    if not microbatches:
        raise ValueError("a step needs at least one micro-batch, got none; an idle rank gets an empty one")
    for number, microbatch in enumerate(microbatches):
        missing = [name for name in objective.fields if name not in microbatch.fields]
        if missing:
            raise ValueError(
                f"micro-batch {number} has no field {missing[0]!r}, which the configured loss {objective.name} needs "
                f"(it has {', '.join(sorted(microbatch.fields))}); set it with TrainingBatch.set_field"
            )
        if objective.needs_sequences and microbatch.sequences is None:
            raise ValueError(f"micro-batch {number} has no sequences of its targets; create it with pack()")


def _policy_metrics(config: PolicyLoss) -> dict[str, Reduction]:
    """Returns the metrics of a policy loss, without those that are always zero with this config."""
    metrics: dict[str, Reduction] = {"tokens": "sum", "loss": "sum", "policy_loss": "sum"}
    if config.has_kl_loss:
        metrics["kl_loss"] = "sum"
    if config.entropy_coefficient:
        metrics["entropy_loss"] = "sum"
    metrics |= {"engine_gap_max": "max"}
    if config.importance.kind != "off":
        metrics["importance_weight_max"] = "max"
    metrics |= {"logprob": "mean", "entropy": "mean"}
    clips_dual = isinstance(config, PPOClip) and config.dual_clip is not None
    metrics |= {name: "mean" for name in losses.POLICY_STATS if name != "clip_dual" or clips_dual}
    if config.kl.coefficient > 0:
        metrics["kl"] = "mean"
    metrics["engine_gap_mean"] = "mean"
    if config.importance.kind != "off":
        metrics |= {"importance_weight": "mean", "importance_cut": "mean"}
    return metrics | {"clip_fraction": "mean"}


def _common_metrics(logprobs: Tensor, weights: Tensor) -> dict[str, Tensor]:
    live = weights != 0
    return {"tokens": live.sum(), "logprob": _masked_sum(logprobs, live)}


def _masked_sum(values: Tensor, live: Tensor) -> Tensor:
    """Returns the sum over the targets with a loss, without gradient."""
    return torch.where(live, values.detach().double(), 0.0).sum()
