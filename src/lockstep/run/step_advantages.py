"""Computes the advantages of a step from its rewards, with the formula that the config names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.algos import advantages as formulas
from lockstep.algos import critic
from lockstep.algos.losses import kl_divergence
from lockstep.config.actor_critic import GAEAdvantage
from lockstep.config.algorithm import Advantage, KLPenalty
from lockstep.config.recipes import PPOConfig
from lockstep.data.mini_batches import TrainingBatch


def compute_advantages(rewards: np.ndarray, batch: TrainingBatch, config: Advantage, kl: KLPenalty) -> np.ndarray:
    """Returns the advantage of every target of the batch, float32 `[targets]`.

    If the config puts the KL penalty into the reward, group advantages use each completion's reward minus its total
    penalty (Ouyang et al. 2022, eq. 2); REINFORCE++ subtracts it token by token.

    Args:
        rewards: float `[groups, group size]`; completion k of group g is the batch's sequence `g * group size + k`.
        batch: contains `engine_logprob` or `old_logprob`, and `reference_logprob` for a penalty, see
            `Run.annotate`.
    """
    penalties = kl_penalties(batch, kl)
    if config.kind == "reinforce_plus_plus" or config.kind == "reinforce_plus_plus_baseline":
        formula = {
            "reinforce_plus_plus": formulas.reinforce_plus_plus_advantages,
            "reinforce_plus_plus_baseline": formulas.reinforce_plus_plus_baseline_advantages,
        }[config.kind]
        sequences = torch.from_numpy(batch.sequences.astype(np.int64))
        token_penalties = None if penalties is None else torch.from_numpy(penalties)
        return formula(_to_float_tensor(rewards), sequences, token_penalties, config.epsilon).numpy()
    if penalties is not None:
        per_sequence = np.bincount(batch.sequences, weights=penalties, minlength=rewards.size)
        rewards = np.asarray(rewards - per_sequence.reshape(rewards.shape), np.float32)
    values = _to_float_tensor(rewards)
    match config.kind:
        case "grpo":
            advantages = formulas.grpo_advantages(values, config.epsilon)
        case "dr_grpo":
            advantages = formulas.dr_grpo_advantages(values)
        case "rloo":
            advantages = formulas.rloo_advantages(values)
    return np.asarray(advantages.numpy().ravel()[batch.sequences])


def kl_penalties(batch: TrainingBatch, kl: KLPenalty) -> np.ndarray | None:
    """Returns `coefficient` times each token's estimated KL to the reference, float32 `[targets]`; None unless the
    config subtracts it from the reward."""
    if kl.where != "reward" or kl.coefficient == 0:
        return None
    policy = torch.from_numpy(batch.fields["old_logprob" if "old_logprob" in batch.fields else "engine_logprob"])
    reference = torch.from_numpy(batch.fields["reference_logprob"])
    return (kl.coefficient * kl_divergence(policy, reference, kl.estimator)).numpy()


@dataclass(frozen=True, slots=True)
class ActorCriticTargets:
    """What policy and critic learn from a step."""

    advantages: np.ndarray
    """float32 `[targets]`."""
    returns: np.ndarray
    """float32 `[targets]`, what the critic learns."""
    old_values: np.ndarray
    """float32 `[targets]`, from which its values may move as far as the clip of its loss allows."""
    metrics: dict[str, float]


def actor_critic_targets(
    rewards: np.ndarray,
    batch: TrainingBatch,
    values: np.ndarray,
    last: np.ndarray,
    kl: float,
    config: PPOConfig,
    warmup: bool = False,
) -> ActorCriticTargets:
    """Computes advantages and returns from rewards and the critic's values.

    Args:
        rewards: float `[groups, group size]`; completion k of group g is the batch's sequence `g * group size + k`.
        batch: the policy's, as in `compute_advantages`.
        values: float `[targets]`, of the state before each target.
        last: float `[sequences]`, of the state after the last target of each sequence.
        kl: the coefficient of the KL penalty in this step.
        warmup: whether only the critic is trained in this step. No advantage is used, so its values may move freely.
    """
    sequences = torch.from_numpy(batch.sequences.astype(np.int64))
    penalties = kl_penalties(batch, config.loss.kl.model_copy(update={"coefficient": kl}))
    shaped = _shape_rewards(torch.from_numpy(rewards.astype(np.float64).ravel()), config)
    per_token = critic.token_rewards(shaped, sequences, None if penalties is None else torch.from_numpy(penalties))
    known = torch.from_numpy(values.astype(np.float64))
    after = torch.from_numpy(last.astype(np.float64))
    lam_critic = config.critic.warmup_lam if warmup else config.advantage.lam_critic
    advantages, returns = _estimate_advantages(per_token, known, sequences, config.advantage, after, lam_critic)
    metrics = {"reward/kl_coefficient": kl} if penalties is not None else {}
    metrics |= {"critic/warmup": float(warmup)} if config.critic.warmup_steps else {}
    if sequences.numel():
        metrics |= {"critic/value_mean": known.mean().item(), "critic/return_mean": returns.mean().item()}
        explained = critic.explained_variance(known, returns)
        metrics |= {} if explained is None else {"critic/explained_variance": explained}
        if penalties is not None:
            metrics["reward/kl"] = _mean_over_sequences(torch.from_numpy(penalties).double() / kl, sequences)
    learned = returns.float().numpy()
    # The clip compares the error of a value with that of the value clipped to near its old one. With the return as the
    # old value, the clipped error is never the larger one.
    return ActorCriticTargets(advantages.float().numpy(), learned, learned if warmup else values, metrics)


def _shape_rewards(rewards: Tensor, config: PPOConfig) -> Tensor:
    """Normalises and clips the rewards of completions as the config says."""
    if config.normalize_reward:
        rewards = formulas.normalize_values(rewards)
    return rewards if config.reward_clip is None else rewards.clamp(*config.reward_clip)


def _estimate_advantages(
    rewards: Tensor, values: Tensor, sequences: Tensor, config: GAEAdvantage, last: Tensor, lam_critic: float | None
) -> tuple[Tensor, Tensor]:
    """Advantages, whitened as the config says, and returns, which never are: both float64 `[targets]`.

    Args:
        lam_critic: lambda of the returns; None for that of the advantages.
    """
    lam: float | Tensor = config.lam
    if config.length_adaptive_alpha is not None:
        lam = critic.length_adaptive_lambda(sequences, config.length_adaptive_alpha)
    advantages, returns = critic.gae_of_targets(rewards, values, sequences, config.gamma, lam, last)
    if lam_critic is not None:
        _, returns = critic.gae_of_targets(rewards, values, sequences, config.gamma, lam_critic, last)
    if config.whiten == "mean_std":
        advantages = formulas.normalize_values(advantages)
    elif config.whiten == "mean" and advantages.numel():
        advantages = advantages - advantages.mean()
    return advantages, returns


def is_warmup(config: PPOConfig, step: int, previous: Mapping[str, Any] | None) -> bool:
    """Whether only the critic is trained in a step.

    Args:
        previous: what the commit of the step before recorded; None before the first step.
    """
    if step >= config.critic.warmup_steps:
        return False
    least = config.critic.warmup_explained_variance
    if previous is None or least is None:
        return True
    explained = previous.get("critic/explained_variance")  # None: all returns were equal
    return bool(previous["critic/warmup"]) and (explained is None or explained < least)


def kl_coefficient(config: PPOConfig, previous: Mapping[str, Any] | None) -> float:
    """The coefficient of the KL penalty in a step. It is not adapted to steps in which the policy was not trained.

    Args:
        previous: what the commit of the step before recorded; None before the first step.
    """
    controller, kl = config.kl_controller, config.loss.kl
    if controller is None or previous is None:
        return kl.coefficient
    if previous.get("critic/warmup") or "reward/kl" not in previous:  # all of its completions were masked
        return float(previous["reward/kl_coefficient"])
    return critic.adapt_kl_coefficient(
        previous["reward/kl_coefficient"],
        previous["reward/kl"],
        controller.target,
        config.sequences_per_step,
        controller.horizon,
    )


def values_of_states(states: TrainingBatch, batch: TrainingBatch) -> tuple[np.ndarray, np.ndarray]:
    """Separates the critic's values before the targets of a batch from those after the last target of a sequence.

    Args:
        states: a batch with the field `old_value`: the same one, or that of `forest_of_states`.

    Returns:
        Values `[targets]`, and values `[sequences]` of the states after the last targets, 0 where there is none.
    """
    values, sequences = states.fields["old_value"], states.sequences
    count = int(sequences.max(initial=-1)) + 1
    order, own = np.argsort(sequences, kind="stable"), np.argsort(batch.sequences, kind="stable")
    sizes = np.bincount(sequences, minlength=count)
    is_longer = sizes > np.bincount(batch.sequences, minlength=count)
    is_last = np.zeros(sequences.size, np.bool_)
    is_last[np.cumsum(sizes)[is_longer] - 1] = True
    found, last = np.empty(batch.targets, np.float32), np.zeros(count, np.float32)
    found[own], last[is_longer] = values[order][~is_last], values[order][is_last]
    return found, last


def _mean_over_sequences(values: Tensor, sequences: Tensor) -> float:
    """The mean over sequences of the mean over their targets; sequences without targets do not count."""
    present, number, counts = torch.unique(sequences, return_inverse=True, return_counts=True)
    sums = torch.zeros(present.numel(), dtype=values.dtype).index_add(0, number, values)
    return float((sums / counts).mean())


def _to_float_tensor(rewards: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rewards, dtype=np.float32))
