"""The loss of a step's pairs, and its derivative by each target's log-probability."""

from dataclasses import dataclass

import numpy as np
import torch

from lockstep.algos.losses import places_in_sequences
from lockstep.algos.preference_losses import (
    MEANS_OVER_TOKENS,
    apo_zero_unpaired,
    kto,
    kto_baseline,
    pair_logprobs,
    pair_metrics,
    preference_loss,
)
from lockstep.config.algorithm import PreferenceLoss
from lockstep.data.mini_batches import TrainingBatch
from lockstep.train.objective import preference_settings


@dataclass(frozen=True, slots=True)
class PreferenceUpdate:
    """What a step's pairs teach."""

    coefficients: np.ndarray
    """float32 `[targets]`: the derivative of the loss by the target's log-probability."""
    metrics: dict[str, float]
    """`loss`, and TRL's metrics, see `pair_metrics`; with several losses `loss/NAME` of each; with WPO `pair_weight`,
    the mean weight."""


def prepare_pairs(batch: TrainingBatch, config: PreferenceLoss) -> None:
    """Adds to the targets of pairs what their losses need to know of the whole step, apart from log-probabilities:
    `pair_weight`, `token_share` with LD-DPO, and the numbers of tokens by which likelihoods are divided.

    Args:
        batch: of `forest_from_pairs`.
    """
    counts = np.bincount(batch.sequences[_of_completions(batch)])
    pairs, in_prompts = len(counts) // 2, batch.targets - counts.sum()
    constants = {"pair_weight": 1 / pairs}
    if not config.terms.keys().isdisjoint(MEANS_OVER_TOKENS):
        constants |= {"mean_chosen_tokens": counts[0::2].mean(), "mean_prompt_tokens": in_prompts / pairs}
    for name, value in constants.items():
        batch.set_per_target(name, np.full(batch.targets, value))
    if config.ld_alpha is not None:
        batch.set_per_target("token_share", _token_shares(batch.sequences, counts, config.ld_alpha))


def preference_update(batch: TrainingBatch, config: PreferenceLoss) -> PreferenceUpdate:
    """Computes the loss of all pairs of a step from the batch's fields `policy_logprob` and, unless no loss needs it,
    `reference_logprob`. The result depends neither on the ranks nor on how the batch is split.

    Args:
        batch: of `forest_from_pairs`, after `prepare_pairs`.
    """
    fields = {name: torch.from_numpy(values).double() for name, values in batch.fields.items()}
    logprobs, sequences = fields["policy_logprob"].requires_grad_(), torch.from_numpy(batch.sequences).long()
    pairs, settings = pair_logprobs(logprobs, sequences, fields), preference_settings(config)
    metrics = {name: values.mean().item() for name, values in pair_metrics(pairs, config.beta).items()}
    weights = None
    if config.use_weighting:
        weights = _pair_weights(batch)
        metrics["pair_weight"] = weights.mean().item()
        weights = weights / len(weights)
    loss, each = preference_loss(pairs, config.terms, settings, weights)
    (coefficients,) = torch.autograd.grad(loss, logprobs)
    metrics["loss"] = loss.item()
    if len(each) > 1:
        metrics |= {f"loss/{name}": value.item() for name, value in each.items()}
    return PreferenceUpdate(coefficients.numpy().astype(np.float32), metrics)


def labelled_update(batch: TrainingBatch, desirable: np.ndarray, config: PreferenceLoss) -> PreferenceUpdate:
    """Computes the loss of all labelled completions of a step, as `preference_update` does of pairs.

    Args:
        batch: of `forest_from_labelled`, with mismatched completions for `kto`.
        desirable: bool `[completions]`.

    Returns:
        The derivatives by the targets of the completions alone, in the order of a batch without mismatched ones; TRL's
        metrics, where `rewards/chosen` and `rewards/rejected` are means over the completions of one label and absent
        without any, and `kl` is KTO's baseline.
    """
    count, own = len(desirable), batch.sequences < len(desirable)

    def ratios(part: np.ndarray) -> np.ndarray:
        values = batch.fields["policy_logprob"].astype(np.float64) - batch.fields["reference_logprob"]
        return np.bincount(batch.sequences[part] % count, values[part], count)

    of_own = torch.from_numpy(ratios(own)).requires_grad_()
    labels, weights = torch.from_numpy(desirable), (config.desirable_weight, config.undesirable_weight)
    metrics: dict[str, float] = {}
    if "kto" in config.type:
        baseline = kto_baseline(torch.from_numpy(ratios(~own)))
        metrics["kl"] = baseline.item()
        loss = kto(of_own, labels, baseline, config.beta, *weights).mean()
    else:
        loss = apo_zero_unpaired(of_own, labels, config.beta, *weights).mean()
    (gradient,) = torch.autograd.grad(loss, of_own)
    rewards = config.beta * of_own.detach()
    chosen, rejected = rewards[labels], rewards[~labels]
    for name, values in (("rewards/chosen", chosen), ("rewards/rejected", rejected)):
        if len(values):
            metrics[name] = values.mean().item()
    if len(chosen) and len(rejected):
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    coefficients = gradient.numpy()[batch.sequences[own]].astype(np.float32)
    return PreferenceUpdate(coefficients, {"loss": loss.item(), **metrics})


def _of_completions(batch: TrainingBatch) -> np.ndarray:
    """Whether each target is of a completion, and not of a prompt: bool `[targets]`."""
    return np.asarray(batch.fields.get("in_prompt", np.zeros(batch.targets)) == 0)


def _pair_weights(batch: TrainingBatch) -> torch.Tensor:
    """The weight of each pair in WPO (Zhou et al. 2024, equation 2), float64 `[pairs]`: the product of exp(mean over
    tokens of log p - log sum_v p_v^2) over both completions, which is about 1 if the policy would sample them."""
    part = _of_completions(batch)
    values = batch.fields["policy_logprob"].astype(np.float64) + batch.fields["renyi_entropy"]
    means = np.bincount(batch.sequences[part], values[part]) / np.bincount(batch.sequences[part])
    return torch.from_numpy(np.exp(means[0::2] + means[1::2]))


def _token_shares(sequences: np.ndarray, counts: np.ndarray, ld_alpha: float) -> np.ndarray:
    """The factor of each target's log-probability in its completion's sum, float64 `[targets]`: with LD-DPO (Liu et al.
    2024) `ld_alpha` beyond the length of the shorter completion of the pair, else 1.

    Args:
        counts: int `[sequences]`, the number of tokens of each completion.
    """
    shorter = np.minimum(counts[0::2], counts[1::2])
    place = places_in_sequences(torch.from_numpy(sequences).long()).numpy()
    return np.where(place < shorter[sequences // 2], 1.0, ld_alpha)
