"""From rewards to the advantages of targets, with the KL penalty."""

import numpy as np
import pytest
import torch

from lockstep.config.algorithm import (
    DrGRPOAdvantage,
    GRPOAdvantage,
    KLPenalty,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    RLOOAdvantage,
)
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.mini_batches import TrainingBatch, pack
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.run.step_advantages import compute_advantages

REWARDS = np.array([[1.0, 0.0], [2.0, 2.0]], np.float32)
LENGTHS = [[2, 1], [1, 3]]


def batch() -> TrainingBatch:
    def completion(length: int) -> Completion:
        return Completion(
            "r", np.arange(length, dtype=np.int32), np.full(length, -1.0, np.float32), np.zeros(length, np.int32),
            "stop", "",
        )  # fmt: skip

    groups = [
        Group(Prompt(f"0:{g}", g, np.array([1], np.int32), ""), [completion(length) for length in lengths])
        for g, lengths in enumerate(LENGTHS)
    ]
    return pack(forest_from_rollouts(Rollouts(0, 0, groups)), 1, 64)


def test_every_target_has_the_advantage_of_its_completion() -> None:
    made = batch()
    assert made.sequences.tolist() == [0, 0, 1, 2, 3, 3, 3]
    found = compute_advantages(REWARDS, made, DrGRPOAdvantage(), KLPenalty())
    assert found.dtype == np.float32
    assert found.tolist() == [0.5, 0.5, -0.5, 0, 0, 0, 0]
    assert compute_advantages(REWARDS, made, RLOOAdvantage(), KLPenalty()).tolist() == [1, 1, -1, 0, 0, 0, 0]
    assert compute_advantages(REWARDS, made, GRPOAdvantage(epsilon=0), KLPenalty())[:3] == pytest.approx(
        [0.5**0.5] * 2 + [-(0.5**0.5)]
    )


def test_group_advantages_subtract_the_penalty_of_the_whole_completion() -> None:
    made = batch()
    gap = np.array([0.1, 0.2, 0.0, 0.0, 0.4, 0.0, 0.1], np.float32)  # k1: policy - reference
    made.set_per_target("reference_logprob", -1.0 - gap)
    kl = KLPenalty(coefficient=2.0, estimator="k1", where="reward")
    found = compute_advantages(REWARDS, made, DrGRPOAdvantage(), kl)
    first, second = (1 - 0.6 - 0.0) / 2, (0.0 - (-1.0)) / 2
    assert found.tolist() == pytest.approx([first, first, -first, second, -second, -second, -second], abs=1e-6)
    assert compute_advantages(REWARDS, made, DrGRPOAdvantage(), kl.model_copy(update={"where": "loss"}))[0] == 0.5


@pytest.mark.parametrize("baseline", [False, True])
def test_reinforce_plus_plus_subtracts_the_penalty_per_token(baseline: bool) -> None:
    made = batch()
    gap = np.array([0.1, 0.2, 0.0, 0.0, 0.4, 0.0, 0.1], np.float32)
    made.set_per_target("reference_logprob", -1.0 - gap)
    config = ReinforcePlusPlusBaselineAdvantage() if baseline else ReinforcePlusPlusAdvantage()
    found = compute_advantages(REWARDS, made, config, KLPenalty(coefficient=2.0, estimator="k1", where="reward"))
    rewards = [0.5, 0.5, -0.5, 0, 0, 0, 0] if baseline else [1, 1, 0, 2, 2, 2, 2]
    returns = torch.tensor(rewards) - 2 * torch.tensor([0.3, 0.2, 0.0, 0.0, 0.5, 0.1, 0.1])
    np.testing.assert_allclose(found, ((returns - returns.mean()) / returns.std()).numpy(), rtol=1e-5, atol=1e-6)
