"""From rewards to advantages, as the config asks. Pure."""

import numpy as np
import torch

from lockstep.algos import advantages as formulas
from lockstep.algos.kl import kl_divergence
from lockstep.config.algorithm import KL, Advantage
from lockstep.data.packing import Batch


def group_advantages(rewards: np.ndarray, config: Advantage) -> np.ndarray:
    """float32 `[groups, group size]` of the same shape as the rewards; all zero in a group without signal."""
    values = torch.from_numpy(np.ascontiguousarray(rewards, dtype=np.float32))
    match config.kind:
        case "grpo":
            return formulas.grpo(values, config.epsilon).numpy()
        case "dr_grpo":
            return formulas.dr_grpo(values).numpy()
        case "rloo":
            return formulas.rloo(values).numpy()


def penalised(rewards: np.ndarray, batch: Batch, kl: KL) -> np.ndarray:
    """Rewards minus `coefficient` times each completion's estimated KL to the reference, where the config puts the
    penalty into the reward (Ouyang et al. 2022, eq. 2); unchanged otherwise.

    The batch must have `engine_logprob` or `old_logprob` and `reference_logprob` (`Policy.annotate`).
    """
    if kl.where != "reward" or kl.coefficient == 0:
        return rewards
    policy = torch.from_numpy(batch.fields.get("old_logprob", batch.fields["engine_logprob"]))
    reference = torch.from_numpy(batch.fields["reference_logprob"])
    per_token = kl_divergence(policy, reference, kl.estimator).numpy()
    per_sequence = np.bincount(batch.sequences, weights=per_token, minlength=rewards.size)
    return np.asarray(rewards - kl.coefficient * per_sequence.reshape(rewards.shape), np.float32)
