"""The choices of the algorithm: advantages, policy loss, aggregation, KL.

The formulas behind the names are in `lockstep.algos`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lockstep.config.base import Section

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3"]


class GRPOAdvantage(Section):
    """Reward minus the group's mean, over the group's standard deviation (Shao et al. 2024)."""

    kind: Literal["grpo"] = "grpo"
    epsilon: float = Field(1e-4, ge=0)
    """Added to the standard deviation."""


class DrGRPOAdvantage(Section):
    """Reward minus the group's mean, not divided (Liu et al. 2025, "Dr. GRPO")."""

    kind: Literal["dr_grpo"] = "dr_grpo"


class RLOOAdvantage(Section):
    """Reward minus the mean of the *other* completions of the group (Ahmadian et al. 2024)."""

    kind: Literal["rloo"] = "rloo"


Advantage = Annotated[GRPOAdvantage | DrGRPOAdvantage | RLOOAdvantage, Field(discriminator="kind")]


class KL(Section):
    """Penalty on the distance to the reference model (the policy as it was loaded)."""

    coefficient: float = Field(0.0, ge=0)
    """0 means no reference model is loaded."""
    estimator: KLEstimator = "k3"
    """k1, k2 and k3 of Schulman's note "Approximating KL divergence"."""
    where: Literal["loss", "reward"] = "loss"
    """In the loss per token, or subtracted from the sequence's reward before advantages."""


class ImportanceCorrection(Section):
    """Truncated importance sampling between the engine's and the trainer's log-probabilities."""

    kind: Literal["off", "truncate"] = "off"
    cap: float = Field(2.0, gt=0)
    """Weights `exp(trainer - engine)` are cut at this value, per token."""


class PolicyLoss(Section):
    """PPO's clipped objective with separate bounds and dual clip."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.2, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    """Lower bound `c` on the objective for negative advantages (Ye et al. 2020); off by default."""
    aggregation: Aggregation = "token-mean"
    norm_length: int | None = Field(None, gt=0)
    """Divisor of `seq-mean-token-sum-norm`; the maximum of new tokens when absent."""
    entropy_coefficient: float = 0.0
    kl: KL = KL()
    importance: ImportanceCorrection = ImportanceCorrection()
    old_logprobs: Literal["engine", "trainer"] = "engine"
    """Whose log-probabilities are the denominator of the ratio; `trainer` costs a forward pass."""

    @model_validator(mode="after")
    def _corrected_once(self) -> Self:
        if self.importance.kind != "off" and self.old_logprobs == "engine":
            raise ValueError(
                "importance correction goes from the engine's to the trainer's log-probabilities, so the ratio must "
                "start from the trainer's: set loss.old_logprobs=trainer (the ratio to the engine's corrects already)"
            )
        return self


class CrossEntropy(Section):
    """Mean negative log-likelihood of the target tokens (SFT)."""

    kind: Literal["cross_entropy"] = "cross_entropy"
    aggregation: Aggregation = "token-mean"
    norm_length: int | None = Field(None, gt=0)


Loss = Annotated[PolicyLoss | CrossEntropy, Field(discriminator="kind")]
