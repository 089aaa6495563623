"""Choices of the algorithm, such as advantages, loss and KL penalty. The formulas are in `lockstep.algos`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from lockstep.config.section import FALSE_AS_OFF, Section, default_kind

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KLEstimator = Literal["k1", "k2", "k3"]
ModelOutput = Literal["logprobs", "entropy", "renyi_entropy", "scores"]
"""What a model computes for each target: its log-probability, and the entropy of the distribution it is from or that
distribution's Renyi entropy of order 2, -log sum_v p_v^2; with a score head, the score of the text before it."""
TrainerOutput = Literal["logprobs", "entropy", "renyi_entropy", "scores", "reference_logprobs"]
"""What a trainer's ranks can evaluate for each target."""


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


def _reject_gae(value: Any) -> Any:
    if isinstance(value, Mapping) and value.get("kind") == "gae":
        raise ValueError("gae needs a critic's values, and this recipe has no critic: use grpo or rloo, or recipe: ppo")
    return value


Advantage = Annotated[
    GRPOAdvantage | DrGRPOAdvantage | RLOOAdvantage | ReinforcePlusPlusAdvantage | ReinforcePlusPlusBaselineAdvantage,
    Field(discriminator="kind"),
    BeforeValidator(_reject_gae),
]


class KLPenalty(Section):
    """Penalty on the distance to the reference model (the policy as it was loaded)."""

    coefficient: float = Field(0.0, ge=0)
    """0 means no reference model is loaded."""
    estimator: KLEstimator = "k3"
    """The estimators k1, k2 and k3 of Schulman's note "Approximating KL divergence"."""
    where: Literal["loss", "reward"] = "loss"
    """In the loss per token, or subtracted from the sequence's reward before advantages."""


class ImportanceCorrection(Section):
    """Importance weights, from the engine's to the trainer's log-probabilities, that multiply each token's loss."""

    kind: Annotated[Literal["off", "truncate", "mask"], FALSE_AS_OFF] = "off"
    """`truncate` limits weights to `cap` (TIS); `mask` drops tokens with weights above it, or below `floor` (MIS)."""
    level: Literal["token", "sequence"] = "token"
    """One weight per token, or one per completion: the product of its tokens' weights."""
    cap: float = Field(2.0, gt=0)
    """Largest weight `exp(trainer - engine)`."""
    floor: float = Field(0.0, ge=0)
    """With `mask`, tokens with smaller weights are dropped as well."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.floor and self.kind != "mask":
            raise ValueError(f"floor {self.floor} applies to kind mask only; {self.kind} has no lower bound")
        if self.floor >= self.cap:
            raise ValueError(f"floor {self.floor} must be less than cap {self.cap}")
        return self


@dataclass(frozen=True, slots=True)
class ReferenceMixing:
    """The reference's weights are replaced by `(1 - share) * reference + share * policy` after every `steps` optimizer
    steps (TR-DPO, Gorbatovski et al. 2024, equation 6)."""

    share: float
    steps: int


class ObjectiveConfig(Section):
    """What a trained model learns from, as far as it is configured. `lockstep.train.objective` computes it."""

    kind: str
    aggregation: Aggregation = "token-mean"
    norm_length: int | None = Field(None, gt=0)
    """Divisor for `seq-mean-token-sum-norm`, in tokens; for completions `rollout.sampling.max_tokens` when absent."""

    @property
    def evaluated_fields(self) -> dict[str, TrainerOutput]:
        """Fields of the targets that are computed before the first update of a step, and from what."""
        return {}

    @property
    def needs_reference(self) -> bool:
        """Whether a field comes from a frozen copy of the model as it was loaded, or from another reference."""
        return "reference_logprobs" in self.evaluated_fields.values()

    @property
    def reference_mixing(self) -> "ReferenceMixing | None":
        """How the reference follows the policy; None if it never changes."""
        return None

    @property
    def uses_advantages(self) -> bool:
        """Whether targets have an advantage."""
        return False

    @property
    def zero_advantage_has_no_gradient(self) -> bool:
        """Whether a target whose advantage is zero changes no weight, so that it need not be computed."""
        return False


class PolicyLoss(ObjectiveConfig):
    """The fields of all policy losses."""

    mask_truncated: bool = False
    """Exclude completions that were cut at `max_tokens` from the loss (DAPO's overlong filtering). Their rewards still
    count in the advantages of the others."""
    entropy_coefficient: float = 0.0
    kl: KLPenalty = KLPenalty()
    importance: ImportanceCorrection = ImportanceCorrection()
    old_logprobs: Literal["engine", "trainer"] = "engine"
    """The source of the log-probabilities in the ratio's denominator; `trainer` costs a forward pass."""

    @property
    def has_kl_loss(self) -> bool:
        """Whether the KL to the reference is a term of the loss."""
        return self.kl.coefficient > 0 and self.kl.where == "loss"

    @property
    def evaluated_fields(self) -> dict[str, TrainerOutput]:
        """The log-probabilities of the policy (for the ratio, or for importance correction) and of the reference."""
        fields: dict[str, TrainerOutput] = {}
        if self.old_logprobs == "trainer" or self.importance.kind != "off":
            fields["old_logprob"] = "logprobs"
        if self.kl.coefficient > 0:
            fields["reference_logprob"] = "reference_logprobs"
        return fields

    @property
    def required_fields(self) -> tuple[str, ...]:
        """The fields of the targets from which the loss is computed."""
        evaluated = [name for name in self.evaluated_fields if name != "reference_logprob" or self.has_kl_loss]
        return ("weight", "advantage", "engine_logprob", *evaluated)

    @property
    def uses_advantages(self) -> bool:
        return True

    @property
    def zero_advantage_has_no_gradient(self) -> bool:
        """Policy losses are multiples of the advantage; a KL or an entropy in the loss is not."""
        return not self.has_kl_loss and not self.entropy_coefficient

    @model_validator(mode="after")
    def _check_old_logprobs(self) -> Self:
        if self.importance.kind != "off" and self.old_logprobs == "engine":
            raise ValueError(
                "importance correction goes from the engine's to the trainer's log-probabilities, so the ratio's "
                "denominator must be the trainer's: set loss.old_logprobs=trainer (a ratio to the "
                "engine's needs no correction)"
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
    """Clipped objective with one ratio per completion, the geometric mean of its tokens' ratios (Zheng et al. 2025)."""

    kind: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, ge=0, lt=1)
    clip_high: float = Field(4e-4, ge=0)
    """The paper's bounds: the mean over a completion varies far less than a token's ratio."""
    aggregation: Aggregation = "seq-mean-token-mean"


class CISPO(PolicyLoss):
    """Weights the log-probability by the clipped ratio, without a gradient through the ratio, so that no token loses
    its gradient (MiniMax-M1, 2025)."""

    kind: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, ge=0, le=1)
    """The weight is at least `1 - clip_low`; 1 means no lower bound, as in the paper."""
    clip_high: float = Field(4.0, ge=0)
    """The weight is at most `1 + clip_high`."""


AnyPolicyLoss = Annotated[PPOClip | GSPO | CISPO, Field(discriminator="kind"), default_kind("ppo_clip")]


class FilterGroups(Section):
    """Dynamic sampling (DAPO, Yu et al. 2025), with verl's field names: groups in which all completions have the same
    reward carry no signal and are replaced by groups of new prompts."""

    enable: bool = False
    metric: str = "reward"
    """What must differ within a group: `reward`, or the name of a reward term (a length penalty can make the rewards of
    wrong completions differ)."""
    max_num_gen_batches: int = Field(10, gt=0)
    """Largest number of rounds of prompts per step, including the first."""
    at_limit: Literal["fill", "error"] = "fill"
    """After the last round: `fill` the step with groups without signal, or end the run with an `error`."""


class CrossEntropy(ObjectiveConfig):
    """Mean negative log-likelihood of the target tokens (SFT)."""

    kind: Literal["cross_entropy"] = "cross_entropy"


class BradleyTerry(ObjectiveConfig):
    """The negative log-likelihood that the better completion of a pair wins (Bradley & Terry 1952; Ouyang et al. 2022),
    a mean over the pairs of the step. With z = score of the chosen - score of the rejected - margin and smoothing e:
    -(1 - e) log sigmoid(z) - e log sigmoid(-z)."""

    kind: Literal["bradley_terry"] = "bradley_terry"
    use_margin: bool = False
    """Subtract the column `margin` of each pair from the difference of the scores (Touvron et al. 2023, Llama 2)."""
    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of the mean of (sum of the two scores) squared, which keeps scores near zero (Eisenstein et al. 2023,
    eq. 2; they use 0.01)."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """The share of pairs whose labels are assumed to be wrong."""

    @model_validator(mode="after")
    def _check_aggregation(self) -> Self:
        if self.aggregation != "token-mean" or self.norm_length is not None:
            raise ValueError("aggregation and norm_length do not apply to a mean over pairs: leave them out")
        return self


PairLoss = Literal[
    "sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "nll", "cpo_sigmoid", "cpo_hinge", "cpo_ipo", "simpo",
    "alphapo", "odds_ratio",
]  # fmt: skip
"""The losses of pairs; `lockstep.algos.preference_losses` has their formulas."""
UnpairedLoss = Literal["kto", "apo_zero_unpaired"]
"""The losses of single completions with a label."""
PREFERENCE_MIXTURES: Mapping[str, Mapping[str, float]] = {
    "cpo": {"cpo_sigmoid": 1.0, "sft": 1.0},
    "cpo-simpo": {"simpo": 1.0, "sft": 1.0},
    "orpo": {"odds_ratio": 1.0, "nll": 1.0},
    "rpo": {"sigmoid": 1.0, "sft": 1.0},
    "mpo": {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0},
}
"""Algorithms that are sums of several losses, with the weights of their papers."""
_REFERENCE_FREE = {"sft", "nll", "cpo_sigmoid", "cpo_hinge", "cpo_ipo", "simpo", "alphapo", "odds_ratio"}


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str | int | float) else value


class PreferenceLoss(ObjectiveConfig):
    """A weighted sum of losses of pairs of completions, or a loss of single completions with a label, each a mean over
    the whole step, with TRL's names and defaults."""

    kind: Literal["preference"] = "preference"
    type: Annotated[tuple[str, ...], BeforeValidator(_one_or_more)] = ("sigmoid",)
    """One loss or several: `sigmoid` (DPO), `hinge`, `ipo`, `sigmoid_norm`, `robust`, `exo_pair`, `nca_pair`,
    `bco_pair`, `sppo_hard`, `aot`, `aot_unpaired`, `apo_zero`, `apo_down`, `discopop`; without a reference `sft`,
    `nll`, `cpo_sigmoid`, `cpo_hinge`, `cpo_ipo`, `simpo`, `alphapo`, `odds_ratio`; or a mixture: `cpo`, `cpo-simpo`,
    `orpo`, `rpo`, `mpo`. Alone, and on data with a column `label`: `kto`, `apo_zero_unpaired`."""
    weights: Annotated[tuple[float, ...], BeforeValidator(_one_or_more)] = ()
    """The weight of each entry of `type`; 1 when absent."""
    beta: float = Field(0.1, gt=0)
    """How much the policy is held to the reference: higher is closer. For `orpo` the weight of the odds ratio."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """The share of pairs whose labels are assumed to be wrong (cDPO with `sigmoid`)."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """The divergence from the reference; `reverse_kl` is DPO's."""
    f_alpha_divergence_coef: float = 0.5
    """The alpha of `alpha_divergence`."""
    ld_alpha: float | None = Field(None, ge=0, le=1)
    """LD-DPO: the weight of a completion's tokens beyond the length of the shorter one of its pair; 1 when absent."""
    discopop_tau: float = Field(0.05, gt=0)
    simpo_gamma: float = Field(0.5, ge=0)
    """The margin of `simpo` and `alphapo`."""
    alphapo_alpha: float = 0.25
    desirable_weight: float = Field(1.0, ge=0)
    """The weight of desirable completions (`kto`, `apo_zero_unpaired`). Its authors want the total weight of desirable
    completions to be 1 to 4/3 times that of the others."""
    undesirable_weight: float = Field(1.0, ge=0)
    use_weighting: bool = False
    """WPO: weigh each pair by the probability of its completions under the policy."""
    sync_ref_model: bool = False
    """TR-DPO: move the reference towards the policy from time to time."""
    ref_model_mixup_alpha: float = Field(0.6, gt=0, le=1)
    """The share of the policy in the weights of a moved reference; 1 replaces the reference."""
    ref_model_sync_steps: int = Field(512, gt=0)
    """Optimizer steps between two moves."""

    @property
    def unpaired(self) -> bool:
        """Whether the data are single completions with a label."""
        return not set(get_args(UnpairedLoss)).isdisjoint(self.type)

    @property
    def terms(self) -> dict[str, float]:
        """The weight of each loss of `lockstep.algos.preference_losses`."""
        found: dict[str, float] = {}
        for name, factor in zip(self.type, self.weights or (1.0,) * len(self.type), strict=True):
            for term, share in PREFERENCE_MIXTURES.get(name, {name: 1.0}).items():
                found[term] = found.get(term, 0.0) + factor * share
        return found

    @property
    def evaluated_fields(self) -> dict[str, TrainerOutput]:
        """The log-probabilities of the policy before the update, and of the reference."""
        fields: dict[str, TrainerOutput] = {"policy_logprob": "logprobs"}
        if not _REFERENCE_FREE.issuperset(self.terms):
            fields["reference_logprob"] = "reference_logprobs"
        if self.use_weighting:
            fields["renyi_entropy"] = "renyi_entropy"
        return fields

    @property
    def reference_mixing(self) -> ReferenceMixing | None:
        return ReferenceMixing(self.ref_model_mixup_alpha, self.ref_model_sync_steps) if self.sync_ref_model else None

    @property
    def evaluates_policy(self) -> bool:
        """Whether the loss needs the policy's log-probabilities before the update even of pairs that are in one row."""
        return self.use_weighting or not self.terms.keys().isdisjoint(_UNWEIGHTED)

    @property
    def learns_prompts(self) -> bool:
        """Whether tokens of prompts are targets as well."""
        return "nll" in self.terms

    @model_validator(mode="after")
    def _check_terms(self) -> Self:
        known = {*get_args(PairLoss), *PREFERENCE_MIXTURES, *get_args(UnpairedLoss)}
        for name in self.type:
            if name not in known:
                raise ValueError(f"type {name!r} is no loss of preferences: use {', '.join(sorted(known))}")
        if not self.type:
            raise ValueError("type is empty: name one loss at least, such as sigmoid")
        if self.weights and len(self.weights) != len(self.type):
            raise ValueError(f"weights has {len(self.weights)} entries for {len(self.type)} losses of type")
        if self.unpaired and len(self.type) > 1:
            raise ValueError(f"type {', '.join(self.type)}: losses of single completions are not mixed with others")
        if any(weight <= 0 for weight in self.weights):
            raise ValueError(f"weights {list(self.weights)}: each must be above 0; leave out what is not to count")
        if self.aggregation != "token-mean" or self.norm_length is not None:
            raise ValueError("aggregation and norm_length do not apply to means over the step: leave them out")
        if self.ld_alpha is not None and (without := sorted(self.terms.keys() & _WITHOUT_LD)):
            raise ValueError(f"ld_alpha does not apply to type {', '.join(without)}: leave it out")
        if self.label_smoothing and not self.terms.keys() & _SMOOTHED:
            raise ValueError(f"label_smoothing has no effect on type {', '.join(self.type)}: leave it out")
        if "exo_pair" in self.terms and not self.label_smoothing:
            raise ValueError("type exo_pair needs label_smoothing above 0 (its paper uses 1e-3)")
        if self.f_divergence_type != "reverse_kl" and (without := sorted(self.terms.keys() - _OF_DIVERGENCES)):
            raise ValueError(
                f"f_divergence_type {self.f_divergence_type} has no effect on type {', '.join(without)}: leave it out"
            )
        if self.sync_ref_model and not self.needs_reference:
            raise ValueError(f"sync_ref_model with type {', '.join(self.type)}, which has no reference: leave it out")
        if self.use_weighting and (without := sorted(self.terms.keys() & _UNWEIGHTED)):
            raise ValueError(
                f"use_weighting does not apply to type {', '.join(without)}, whose values are not those of single "
                "pairs: leave it out"
            )
        return self


_SMOOTHED = {
    "sigmoid", "sigmoid_norm", "robust", "exo_pair", "aot", "aot_unpaired", "cpo_sigmoid", "simpo", "alphapo",
}  # fmt: skip
_UNWEIGHTED = {"aot", "aot_unpaired", *get_args(UnpairedLoss)}
_WITHOUT_LD = {*_REFERENCE_FREE, *get_args(UnpairedLoss)}
_OF_DIVERGENCES = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
"""The losses that are defined by a divergence, or not affected by it."""
