"""Leaving out groups without any advantage does not change the update."""

import numpy as np
import pytest
import torch

from lockstep.config.algorithm import PolicyLoss
from lockstep.config.recipes import GRPOConfig
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.models.tiny_model import make_tiny
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer

SIGNALS = ([True, False, True, False], [False] * 4, [True] * 4)
"""Groups without advantages in each step: some, all (the moments still change the weights), none."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> GRPOConfig:
    torch.set_num_threads(1)
    folder = make_tiny(tmp_path_factory.mktemp("idle") / "model", hidden=32, ffn=48)
    return GRPOConfig.model_validate(
        {
            "recipe": "grpo",
            "name": "idle",
            "steps": 4,
            "model": {"path": str(folder)},
            "data": {"path": "unused.jsonl"},
            "trainer": {"optimizer": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-5}},
            "rollout": {"sampling": {"max_tokens": 12}},
            "reward": {"terms": [{"kind": "exact_match"}]},
        }
    )


def rollouts(seed: int) -> Rollouts:
    draw = np.random.default_rng(seed)

    def completion(name: str) -> Completion:
        count = int(draw.integers(1, 12))
        logprobs = (-4.6 + 0.1 * draw.standard_normal(count)).astype(np.float32)
        tokens = draw.integers(10, 60, count).astype(np.int32)
        return Completion(name, tokens, logprobs, np.zeros(count, np.int32), "stop", "")

    groups = [
        Group(
            Prompt(f"0:{g}", g, draw.integers(10, 60, draw.integers(3, 9)).astype(np.int32), ""),
            [completion(f"{g}-{k}") for k in range(4)],
        )
        for g in range(4)
    ]
    return Rollouts(0, 0, groups)


def train(config: GRPOConfig) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Returns how many sequences each step left out, and the final weights."""
    trainer = FSDP2Trainer(config.policy, ParallelContext())
    skipped = []
    for seed, signal in enumerate(SIGNALS):
        advantages = np.random.default_rng(9).standard_normal((4, 4)) * np.array(signal)[:, None]
        batch = pack(forest_from_rollouts(rollouts(seed), advantages), 1, 64)
        for minibatch in batch.minibatches(objective=config.loss):
            trainer.step(minibatch.by_rank[0])
            skipped.append(minibatch.skipped)
    assert trainer.optimizer.steps == len(SIGNALS)
    return skipped, {name: parameter.detach().clone() for name, parameter in trainer.trained_parameters.items()}


def test_the_weights_are_the_same(config: GRPOConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    skipped, left = train(config)
    monkeypatch.setattr(PolicyLoss, "zero_advantage_has_no_gradient", False)
    nothing, whole = train(config)
    assert (skipped, nothing) == ([8, 16, 0], [0, 0, 0])
    for name, weight in left.items():
        torch.testing.assert_close(weight, whole[name], rtol=1e-6, atol=1e-7, msg=name)
