"""The choices of the algorithm: advantages, policy loss, aggregation, KL.

The formulas behind the names are in `lockstep.algos`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lockstep.config.section import FALSE_AS_OFF, Section, default_kind

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


class ReinforcePlusPlusAdvantage(Section):
    """REINFORCE++ (Hu 2025): each token's return, normalised over all tokens of the step. Allows `group_size: 1`."""

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    epsilon: float = Field(1e-8, ge=0)
    """Added to the standard deviation."""


class ReinforcePlusPlusBaselineAdvantage(Section):
    """REINFORCE++ with the group's mean subtracted from the reward first (Hu 2025)."""

    kind: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    epsilon: float = Field(1e-8, ge=0)
    """Added to the standard deviation."""


def _without_critic(value: Any) -> Any:
    if isinstance(value, Mapping) and value.get("kind") == "gae":
        raise ValueError("gae needs the values of a critic, which this recipe does not train; grpo or rloo need none")
    return value


Advantage = Annotated[
    GRPOAdvantage | DrGRPOAdvantage | RLOOAdvantage | ReinforcePlusPlusAdvantage | ReinforcePlusPlusBaselineAdvantage,
    Field(discriminator="kind"),
    BeforeValidator(_without_critic),
]


class KLPenalty(Section):
    """Penalty on the distance to the reference model (the policy as it was loaded)."""

    coefficient: float = Field(0.0, ge=0)
    """0 means no reference model is loaded."""
    estimator: KLEstimator = "k3"
    """k1, k2 and k3 of Schulman's note "Approximating KL divergence"."""
    where: Literal["loss", "reward"] = "loss"
    """In the loss per token, or subtracted from the sequence's reward before advantages."""


class ImportanceCorrection(Section):
    """Importance weights from the engine's to the trainer's log-probabilities, which multiply a token's loss."""

    kind: Annotated[Literal["off", "truncate", "mask"], FALSE_AS_OFF] = "off"
    """`truncate` cuts weights at `cap` (TIS); `mask` drops what is above it, or below `floor` (MIS)."""
    level: Literal["token", "sequence"] = "token"
    """A weight per token, or one per completion: the product of its tokens'."""
    cap: float = Field(2.0, gt=0)
    """Largest weight `exp(trainer - engine)`."""
    floor: float = Field(0.0, ge=0)
    """With `mask`, weights below it are dropped as well."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.floor and self.kind != "mask":
            raise ValueError(f"floor {self.floor} is for kind mask; {self.kind} has no lower bound")
        if self.floor >= self.cap:
            raise ValueError(f"floor {self.floor} must be less than cap {self.cap}")
        return self


class PolicyLoss(Section):
    """What all policy losses have in common."""

    kind: str
    aggregation: Aggregation = "token-mean"
    norm_length: int | None = Field(None, gt=0)
    """Divisor of `seq-mean-token-sum-norm`; the maximum of new tokens when absent."""
    mask_truncated: bool = False
    """Completions that were cut at `max_tokens` are not learned from (DAPO's overlong filtering). Their rewards still
    count in the advantages of the others."""
    entropy_coefficient: float = 0.0
    kl: KLPenalty = KLPenalty()
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


class PPOClip(PolicyLoss):
    """PPO's clipped objective (Schulman et al. 2017) with separate bounds and dual clip."""

    kind: Literal["ppo_clip"] = "ppo_clip"
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.2, ge=0)
    """Higher than `clip_low` is DAPO's clip-higher."""
    dual_clip: float | None = Field(None, gt=1)
    """Lower bound `c` on the objective for negative advantages (Ye et al. 2020); off by default."""


class GSPO(PolicyLoss):
    """Clipped objective whose ratio is that of the whole completion, the geometric mean of its tokens' (Zheng et al.
    2025)."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, ge=0, lt=1)
    clip_high: float = Field(4e-4, ge=0)
    """The paper's bounds: a mean over a completion moves far less than a token's ratio."""
    aggregation: Aggregation = "seq-mean-token-mean"


class CISPO(PolicyLoss):
    """The clipped ratio as a weight without gradient on the log-probability, so that no token loses its gradient
    (MiniMax-M1, 2025)."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, ge=0, le=1)
    """The weight is at least `1 - clip_low`; 1 is no lower bound, as in the paper."""
    clip_high: float = Field(4.0, ge=0)
    """The weight is at most `1 + clip_high`."""


AnyPolicyLoss = Annotated[PPOClip | GSPO | CISPO, Field(discriminator="kind"), default_kind("ppo_clip")]


class FilterGroups(Section):
    """Dynamic sampling (DAPO, Yu et al. 2025), named as in verl: groups whose completions all have the same reward
    teach nothing, and fresh prompts take their place."""

    enable: bool = False
    metric: str = "reward"
    """What must differ within a group: `check_reward`, or the name of a reward term (a length penalty makes rewards
    differ that are all wrong)."""
    max_num_gen_batches: int = Field(10, gt=0)
    """Rounds of prompts of one step, the first included."""
    at_limit: Literal["fill", "error"] = "fill"
    """What happens after the last round: `fill` the step with groups without signal, or end the run with an `error`."""


class CrossEntropy(Section):
    """Mean negative log-likelihood of the target tokens (SFT)."""

    kind: Literal["cross_entropy"] = "cross_entropy"
    aggregation: Aggregation = "token-mean"
    norm_length: int | None = Field(None, gt=0)


Loss = Annotated[PPOClip | GSPO | CISPO | CrossEntropy, Field(discriminator="kind")]
