"""Computes the advantages of a step from its rewards, with the formula that the config names."""

import numpy as np
import torch

from lockstep.algos import advantages as formulas
from lockstep.algos.losses import kl_divergence
from lockstep.config.algorithm import Advantage, KLPenalty
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
    policy = torch.from_numpy(batch.fields.get("old_logprob", batch.fields["engine_logprob"]))
    reference = torch.from_numpy(batch.fields["reference_logprob"])
    return (kl.coefficient * kl_divergence(policy, reference, kl.estimator)).numpy()


def _to_float_tensor(rewards: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(rewards, dtype=np.float32))
