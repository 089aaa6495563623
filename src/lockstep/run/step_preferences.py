"""The loss of a step's pairs, and its derivative by each target's log-probability."""

from dataclasses import dataclass

import numpy as np
import torch

from lockstep.algos.preference_losses import (
    PairLogprobs,
    PreferenceSettings,
    apo_zero_unpaired,
    kto,
    kto_baseline,
    preference_loss,
)
from lockstep.config.algorithm import PreferenceLoss
from lockstep.data.mini_batches import TrainingBatch


@dataclass(frozen=True, slots=True)
class PreferenceUpdate:
    """What a step's pairs teach."""

    coefficients: np.ndarray
    """float32 `[targets]`: the derivative of the loss by the target's log-probability."""
    metrics: dict[str, float]
    """`loss`, and TRL's metrics: `rewards/chosen`, `rewards/rejected` (beta times the log-ratio to the reference),
    `rewards/accuracies`, `rewards/margins`, `logps/chosen`, `logps/rejected`; with WPO `pair_weight`, their mean."""


def preference_update(batch: TrainingBatch, config: PreferenceLoss) -> PreferenceUpdate:
    """Computes the loss of all pairs of a step from the batch's fields `policy_logprob` and, unless no loss needs it,
    `reference_logprob`. The result depends neither on the ranks nor on how the batch is split.

    Args:
        batch: of `forest_from_pairs`.
    """
    in_prompt = batch.fields["in_prompt"] > 0 if config.learns_prompts else np.zeros(batch.targets, np.bool_)
    counts = np.bincount(batch.sequences[~in_prompt])
    shares = _token_shares(batch.sequences, in_prompt, counts, config.ld_alpha)

    def sums(name: str, part: np.ndarray) -> torch.Tensor:
        """Sums over each sequence, float64 `[sequences]`."""
        values = batch.fields[name].astype(np.float64) * shares
        return torch.from_numpy(np.bincount(batch.sequences[part], values[part], len(counts)).astype(np.float64))

    policy = sums("policy_logprob", ~in_prompt).requires_grad_()
    prompts = sums("policy_logprob", in_prompt)[0::2].requires_grad_()
    reference = sums("reference_logprob", ~in_prompt) if config.needs_reference else None
    tokens = torch.from_numpy(counts).double()
    pairs = PairLogprobs(
        chosen=policy[0::2],
        rejected=policy[1::2],
        chosen_tokens=tokens[0::2],
        rejected_tokens=tokens[1::2],
        reference_chosen=None if reference is None else reference[0::2],
        reference_rejected=None if reference is None else reference[1::2],
        chosen_prompt=prompts if config.learns_prompts else None,
        prompt_tokens=torch.from_numpy(np.bincount(batch.sequences[in_prompt], minlength=len(counts))[0::2]),
    )
    settings, metrics = preference_settings(config), _metrics(pairs, config)
    weights = _pair_weights(batch, ~in_prompt, counts) if config.use_weighting else None
    if weights is not None:
        metrics["pair_weight"] = weights.mean().item()
    loss = preference_loss(pairs, config.terms, settings, weights)
    of_policy, of_prompts = torch.autograd.grad(loss, (policy, prompts), materialize_grads=True)
    by_sequence = np.where(in_prompt, of_prompts.numpy()[batch.sequences // 2], of_policy.numpy()[batch.sequences])
    metrics["loss"] = loss.item()
    if len(config.terms) > 1:
        with torch.no_grad():
            each = {name: preference_loss(pairs, {name: 1.0}, settings, weights).item() for name in config.terms}
            metrics |= {f"loss/{name}": value for name, value in each.items()}
    return PreferenceUpdate((by_sequence * shares).astype(np.float32), metrics)


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


def _pair_weights(batch: TrainingBatch, part: np.ndarray, counts: np.ndarray) -> torch.Tensor:
    """The weight of each pair in WPO (Zhou et al. 2024, equation 2), float64 `[pairs]`: the product of exp(mean over
    tokens of log p - log sum_v p_v^2) over both completions, which is about 1 if the policy would sample them.

    Args:
        part: bool `[targets]`, those of completions.
        counts: int `[sequences]`, the number of tokens of each completion.
    """
    values = batch.fields["policy_logprob"].astype(np.float64) + batch.fields["renyi_entropy"]
    means = np.bincount(batch.sequences[part], values[part], len(counts)) / counts
    return torch.from_numpy(np.exp(means[0::2] + means[1::2]))


def _token_shares(
    sequences: np.ndarray, in_prompt: np.ndarray, counts: np.ndarray, ld_alpha: float | None
) -> np.ndarray:
    """The factor of each target's log-probability in its completion's sum, float64 `[targets]`: with LD-DPO (Liu et al.
    2024) `ld_alpha` beyond the length of the shorter completion of the pair, else 1."""
    shares = np.ones(len(sequences), np.float64)
    if ld_alpha is None:
        return shares
    shorter = np.minimum(counts[0::2], counts[1::2])
    order = np.argsort(sequences, kind="stable")
    order = order[~in_prompt[order]]
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    position = np.arange(len(order)) - first[sequences[order]]
    shares[order] = np.where(position < shorter[sequences[order] // 2], 1.0, ld_alpha)
    return shares


@torch.no_grad()
def _metrics(pairs: PairLogprobs, config: PreferenceLoss) -> dict[str, float]:
    has_reference = pairs.reference_chosen is not None
    chosen = config.beta * (pairs.chosen_ratio if has_reference else pairs.chosen)
    rejected = config.beta * (pairs.rejected_ratio if has_reference else pairs.rejected)
    return {
        "rewards/chosen": chosen.mean().item(),
        "rewards/rejected": rejected.mean().item(),
        "rewards/accuracies": (chosen > rejected).double().mean().item(),
        "rewards/margins": (chosen - rejected).mean().item(),
        "logps/chosen": pairs.chosen.mean().item(),
        "logps/rejected": pairs.rejected.mean().item(),
    }
