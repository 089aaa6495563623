"""Losses on preferences: pairs of a chosen and a rejected completion of the same prompt, or single completions with a
label.

Every loss is a function of sums of log-probabilities over whole completions, and its mean is taken over all pairs of an
optimizer step, of all ranks. The statistics of some (the order of `aot`, the baseline of `kto`, the number of tokens of
`sft`) are over them too, so that the result does not depend on how pairs are split among rows and ranks.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]
"""The f-divergences of Wang et al. 2023, by TRL's names."""
_MAX_EXPONENT = 80.0
_LN_2 = math.log(2)
_LEAST_SURPRISE = 1e-7


@dataclass(frozen=True, slots=True)
class PairLogprobs:
    """Log-probabilities of pairs, each summed over the tokens of a completion; all `[pairs]`."""

    chosen: Tensor
    """Of the policy, with gradient."""
    rejected: Tensor
    chosen_tokens: Tensor
    """Number of tokens; above 0."""
    rejected_tokens: Tensor
    reference_chosen: Tensor | None = None
    """Of the reference model; None for losses without one."""
    reference_rejected: Tensor | None = None
    chosen_prompt: Tensor | None = None
    """Of the policy, summed over the tokens of the prompt, with gradient; `nll` needs it."""
    prompt_tokens: Tensor | None = None
    """Number of prompt tokens that are targets."""
    mean_chosen_tokens: Tensor | None = None
    """The mean of `chosen_tokens` over all pairs of the step, if these are not all; any shape that broadcasts."""
    mean_prompt_tokens: Tensor | None = None
    """The mean of `prompt_tokens` over all pairs of the step, if these are not all."""

    @property
    def chosen_ratio(self) -> Tensor:
        """log(policy / reference) of the chosen completion. Raises ValueError without a reference."""
        return self.chosen - _given(self.reference_chosen)

    @property
    def rejected_ratio(self) -> Tensor:
        """log(policy / reference) of the rejected completion. Raises ValueError without a reference."""
        return self.rejected - _given(self.reference_rejected)

    @property
    def chosen_mean(self) -> Tensor:
        """Mean over the tokens."""
        return self.chosen / self.chosen_tokens

    @property
    def rejected_mean(self) -> Tensor:
        """Mean over the tokens."""
        return self.rejected / self.rejected_tokens


@dataclass(frozen=True, slots=True)
class PreferenceSettings:
    """The constants of the losses, with TRL's names and defaults."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    """The share of pairs whose labels are assumed to be wrong; below 0.5."""
    divergence: Divergence = "reverse_kl"
    divergence_alpha: float = 0.5
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5
    """The margin of SimPO, not divided by beta."""
    alphapo_alpha: float = 0.25


def pair_logprobs(logprobs: Tensor, sequences: Tensor, fields: Mapping[str, Tensor]) -> PairLogprobs:
    """Sums the log-probabilities of targets over the completions of their pairs.

    Args:
        logprobs: of the policy, `[targets]`, with gradient.
        sequences: int64 `[targets]`; 2i is the better completion of pair i, 2i + 1 the worse one. A pair may lack them.
        fields: what is known of each target, `[targets]`: `reference_logprob`, if a loss needs it; `in_prompt`, not 0
            for tokens of prompts; `token_share`, the factor of its log-probability; `mean_chosen_tokens` and
            `mean_prompt_tokens` of the step.
    """
    count = 2 * (int(sequences.max()) // 2 + 1)
    in_prompt = fields["in_prompt"] != 0 if "in_prompt" in fields else torch.zeros_like(sequences, dtype=torch.bool)
    share = fields["token_share"].to(logprobs.dtype) if "token_share" in fields else torch.ones_like(logprobs)

    def sums(values: Tensor, kept: Tensor) -> Tensor:
        kept_values = torch.where(kept, values, torch.zeros_like(values))
        return values.new_zeros(count).index_add(0, sequences, kept_values)

    ones, own = torch.ones_like(share), ~in_prompt
    policy, tokens = sums(logprobs * share, own), sums(ones, own).clamp(min=1)
    reference = None
    if "reference_logprob" in fields:
        reference = sums(fields["reference_logprob"].to(share.dtype) * share, own)
    learns_prompts = "in_prompt" in fields
    chosen_tokens, prompt_tokens = fields.get("mean_chosen_tokens"), fields.get("mean_prompt_tokens")
    return PairLogprobs(
        policy[0::2],
        policy[1::2],
        tokens[0::2],
        tokens[1::2],
        None if reference is None else reference[0::2],
        None if reference is None else reference[1::2],
        sums(logprobs, in_prompt)[0::2] if learns_prompts else None,
        sums(ones, in_prompt)[0::2] if learns_prompts else None,
        None if chosen_tokens is None else chosen_tokens[:1].clamp(min=1),  # at least 1 but in a row without pairs
        None if prompt_tokens is None else prompt_tokens[:1],
    )


def preference_loss(
    pairs: PairLogprobs, losses: Mapping[str, float], settings: PreferenceSettings, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the weighted sum of several losses, each summed over the pairs, and each of them without its weight:
    scalars with gradient.

    Args:
        losses: the weight of each loss of `PAIR_LOSSES`, by name.
        weights: the weight of each pair, detached, with the number of the step's pairs as divisor; None: these are all
            pairs, and count the same.

    Raises:
        ValueError: there is no loss of this name, or it needs what the pairs lack, or it sorts and has no weights.
    """
    total, each = pairs.chosen.new_zeros(()), {}
    for name, factor in losses.items():
        if name not in PAIR_LOSSES:
            raise ValueError(f"there is no preference loss {name!r}; known are {', '.join(PAIR_LOSSES)}")
        if weights is not None and name in SORTED:
            raise ValueError(f"{name} sorts the pairs, so that a weight would belong to none of them")
        per_pair = PAIR_LOSSES[name](pairs, settings)
        each[name] = per_pair.mean() if weights is None else (per_pair * weights.detach()).sum()
        total = total + factor * each[name]
    return total, each


@torch.no_grad()
def pair_metrics(pairs: PairLogprobs, beta: float) -> dict[str, Tensor]:
    """TRL's metrics of each pair, `[pairs]`, by name. Rewards are beta times the log-ratio to the reference, or without
    one the log-probability; `rewards/accuracies` is 1 where the better completion has the higher one."""
    has_reference = pairs.reference_chosen is not None
    chosen = beta * (pairs.chosen_ratio if has_reference else pairs.chosen)
    rejected = beta * (pairs.rejected_ratio if has_reference else pairs.rejected)
    values = chosen, rejected, (chosen > rejected).to(chosen.dtype), chosen - rejected, pairs.chosen, pairs.rejected
    return dict(zip(PAIR_METRICS, values, strict=True))


def divergence_score(ratio: Tensor, settings: PreferenceSettings) -> Tensor:
    """f'(u) of the divergence at u = exp(ratio), without the constant that cancels in a pair (Wang et al. 2023, "Beyond
    Reverse KL"): log u for the reverse KL of DPO."""
    if settings.divergence == "forward_kl":
        return 1 - torch.exp((-ratio).clamp(max=_MAX_EXPONENT))
    if settings.divergence == "js_divergence":
        return _LN_2 + logsigmoid(ratio)
    if settings.divergence == "alpha_divergence" and settings.divergence_alpha != 1:
        power = settings.divergence_alpha - 1
        return torch.expm1((power * ratio).clamp(max=_MAX_EXPONENT)) / power
    return ratio


def smoothed_logistic(logits: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log sigmoid(x) - e log sigmoid(-x): the logistic loss if a share e of labels is wrong (cDPO, Mitchell
    2023)."""
    return (1 - label_smoothing) * softplus(-logits) + label_smoothing * softplus(logits)


def sigmoid(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """DPO (Rafailov et al. 2023, equation 7); with label smoothing cDPO."""
    return smoothed_logistic(settings.beta * _score_gap(pairs, settings), settings.label_smoothing)


def hinge(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """SLiC's hinge on DPO's scores (Zhao et al. 2023; Liu et al. 2023, RSO)."""
    return torch.relu(1 - settings.beta * _score_gap(pairs, settings))


def ipo(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """IPO (Azar et al. 2023, equation 17) on means over tokens, as its authors confirmed to TRL."""
    return (_mean_score_gap(pairs, settings) - 1 / (2 * settings.beta)) ** 2


def sigmoid_norm(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """DPO on means over tokens (Lambert et al. 2024, Tulu 3)."""
    return smoothed_logistic(settings.beta * _mean_score_gap(pairs, settings), settings.label_smoothing)


def robust(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Robust DPO (Chowdhury et al. 2024): unbiased if a share e of labels is wrong."""
    logits, e = settings.beta * _score_gap(pairs, settings), settings.label_smoothing
    return ((1 - e) * softplus(-logits) - e * softplus(logits)) / (1 - 2 * e)


def exo_pair(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """EXO for pairs (Ji et al. 2024, equation 16): the reverse KL to the smoothed labels. Raises ValueError without
    label smoothing, as the KL is infinite then."""
    if settings.label_smoothing <= 0:
        raise ValueError("exo_pair needs label_smoothing above 0 (the paper uses 1e-3)")
    logits, e = settings.beta * _score_gap(pairs, settings), settings.label_smoothing
    better, worse = logsigmoid(logits), logsigmoid(-logits)
    return better.exp() * (better - math.log1p(-e)) + worse.exp() * (worse - math.log(e))


def nca_pair(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Noise contrastive alignment for pairs (Chen et al. 2024)."""
    chosen, rejected = settings.beta * pairs.chosen_ratio, settings.beta * pairs.rejected_ratio
    return softplus(-chosen) + 0.5 * softplus(chosen) + 0.5 * softplus(rejected)


def bco_pair(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Binary classifier optimisation on pairs (Jung et al. 2024), without its reward shift, as in TRL."""
    return softplus(-settings.beta * pairs.chosen_ratio) + softplus(settings.beta * pairs.rejected_ratio)


def sppo_hard(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """SPPO with win probabilities of 1 and 0 (Wu et al. 2024, equation 4.7)."""
    half = 0.5 / settings.beta
    return (pairs.chosen_ratio - half) ** 2 + (pairs.rejected_ratio + half) ** 2


def aot(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Alignment via optimal transport, paired (Melnyk et al. 2024): the sorted gaps of the policy against the
    sorted gaps of the reference."""
    policy = (pairs.chosen - pairs.rejected).sort().values
    reference = (_given(pairs.reference_chosen) - _given(pairs.reference_rejected)).sort().values
    return smoothed_logistic(settings.beta * (policy - reference), settings.label_smoothing)


def aot_unpaired(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """Alignment via optimal transport, unpaired (Melnyk et al. 2024): the sorted log-ratios of the chosen
    against those of the rejected completions."""
    gap = pairs.chosen_ratio.sort().values - pairs.rejected_ratio.sort().values
    return smoothed_logistic(settings.beta * gap, settings.label_smoothing)


def apo_zero(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """APO-zero (D'Oosterlinck et al. 2024, equation 7): chosen completions are better than the model's own."""
    chosen, rejected = settings.beta * pairs.chosen_ratio, settings.beta * pairs.rejected_ratio
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def apo_down(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """APO-down (D'Oosterlinck et al. 2024, equation 8): chosen completions are worse than the model's own."""
    gap = pairs.chosen_ratio - pairs.rejected_ratio
    return torch.sigmoid(settings.beta * pairs.chosen_ratio) + torch.sigmoid(-settings.beta * gap)


def discopop(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """DiscoPOP (Lu et al. 2024, equation 5): a mixture of the logistic and the exponential loss."""
    logits = settings.beta * _score_gap(pairs, settings)
    share = torch.sigmoid(logits / settings.discopop_tau)
    return (1 - share) * softplus(-logits) + share * torch.exp((-logits).clamp(max=_MAX_EXPONENT))


def sft(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """The negative log-likelihood of the chosen completions. Its mean over pairs is the mean over their tokens."""
    return -pairs.chosen / _mean_tokens(pairs.chosen_tokens, pairs.mean_chosen_tokens)


def nll(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """As `sft`, of prompt and completion: ORPO's first term in TRL."""
    of_prompts = _mean_tokens(_given(pairs.prompt_tokens), pairs.mean_prompt_tokens)
    tokens = _mean_tokens(pairs.chosen_tokens, pairs.mean_chosen_tokens) + of_prompts
    return -(pairs.chosen + _given(pairs.chosen_prompt)) / tokens


def cpo_sigmoid(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """CPO (Xu et al. 2024, equation 3), without its likelihood term, which is `sft`: DPO without a reference."""
    return smoothed_logistic(settings.beta * (pairs.chosen - pairs.rejected), settings.label_smoothing)


def cpo_hinge(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """SLiC's hinge without a reference."""
    return torch.relu(1 - settings.beta * (pairs.chosen - pairs.rejected))


def cpo_ipo(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """IPO's square on means over tokens, without a reference."""
    return (pairs.chosen_mean - pairs.rejected_mean - 1 / (2 * settings.beta)) ** 2


def simpo(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """SimPO (Meng et al. 2024, equation 6): means over tokens, and a margin."""
    logits = settings.beta * (pairs.chosen_mean - pairs.rejected_mean) - settings.simpo_gamma
    return smoothed_logistic(logits, settings.label_smoothing)


def alphapo(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """AlphaPO (Gupta et al. 2025): SimPO with the reward (1 - p^-alpha) / alpha, p the geometric mean of the
    tokens' probabilities. An alpha of 0 is SimPO."""
    chosen, rejected = (
        _alpha_reward(mean, settings.alphapo_alpha) for mean in (pairs.chosen_mean, pairs.rejected_mean)
    )
    return smoothed_logistic(settings.beta * (chosen - rejected) - settings.simpo_gamma, settings.label_smoothing)


def odds_ratio(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    """ORPO's odds ratio (Hong et al. 2024, equations 4 and 7), times its lambda, which TRL calls beta. ORPO adds
    `nll`."""
    # A completion of probability 1 has infinite odds.
    chosen, rejected = (mean.clamp(max=-_LEAST_SURPRISE) for mean in (pairs.chosen_mean, pairs.rejected_mean))
    return settings.beta * softplus(-(chosen - rejected - log1mexp(chosen) + log1mexp(rejected)))


def kto(ratios: Tensor, labels: Tensor, baseline: Tensor, beta: float, desirable: float, undesirable: float) -> Tensor:
    """KTO (Ethayarajh et al. 2024, equation 7) of completions that are desirable or not; `[completions]`.

    Args:
        ratios: `[completions]`, log(policy / reference) of each completion, with gradient.
        labels: bool `[completions]`, whether it is desirable.
        baseline: the KL of `kto_baseline`.
    """
    gain = beta * (ratios - baseline.detach())
    return torch.where(labels, desirable * torch.sigmoid(-gain), undesirable * torch.sigmoid(gain))


def kto_baseline(mismatched_ratios: Tensor) -> Tensor:
    """KTO's estimate of the KL from the reference (Ethayarajh et al. 2024): the mean of log(policy /
    reference) of completions of other prompts, at least 0."""
    return mismatched_ratios.detach().mean().clamp(min=0)


def apo_zero_unpaired(ratios: Tensor, labels: Tensor, beta: float, desirable: float, undesirable: float) -> Tensor:
    """APO-zero of completions that are desirable or not (D'Oosterlinck et al. 2024, equation 7)."""
    return kto(ratios, labels, ratios.new_zeros(()), beta, desirable, undesirable)


def log1mexp(value: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, without cancellation (Maechler 2012)."""
    near = torch.log(-torch.expm1(torch.where(value > -_LN_2, value, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(value > -_LN_2, -1.0, value)))
    return torch.where(value > -_LN_2, near, far)


def _score_gap(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    return divergence_score(pairs.chosen_ratio, settings) - divergence_score(pairs.rejected_ratio, settings)


def _mean_score_gap(pairs: PairLogprobs, settings: PreferenceSettings) -> Tensor:
    chosen = divergence_score(pairs.chosen_ratio, settings) / pairs.chosen_tokens
    return chosen - divergence_score(pairs.rejected_ratio, settings) / pairs.rejected_tokens


def _alpha_reward(mean: Tensor, alpha: float) -> Tensor:
    return -torch.expm1((-alpha * mean).clamp(max=_MAX_EXPONENT)) / alpha if alpha else mean


def _mean_tokens(tokens: Tensor, of_step: Tensor | None) -> Tensor:
    return tokens.double().mean() if of_step is None else of_step


def _given(value: Tensor | None) -> Tensor:
    if value is None:
        raise ValueError("this loss needs log-probabilities of a reference or of prompts, which were not computed")
    return value


PAIR_LOSSES: Mapping[str, Callable[[PairLogprobs, PreferenceSettings], Tensor]] = {
    each.__name__: each
    for each in (
        sigmoid, hinge, ipo, sigmoid_norm, robust, exo_pair, nca_pair, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero,
        apo_down, discopop, sft, nll, cpo_sigmoid, cpo_hinge, cpo_ipo, simpo, alphapo, odds_ratio,
    )
}  # fmt: skip
"""Losses of pairs `[pairs]`, by TRL's names where TRL has them. `PreferenceLoss` names the mixtures, such as ORPO."""
PAIR_METRICS = (
    "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected",
)  # fmt: skip
"""The metrics of pairs, by TRL's names."""
REFERENCE_FREE = frozenset({"sft", "nll", "cpo_sigmoid", "cpo_hinge", "cpo_ipo", "simpo", "alphapo", "odds_ratio"})
"""Losses that need no reference model."""
MEANS_OVER_TOKENS = frozenset({"sft", "nll"})
"""Losses that are divided by the number of tokens of the whole step."""
SORTED = frozenset({"aot", "aot_unpaired"})
"""Losses that compare sorted values, and so have no value of a single pair."""
