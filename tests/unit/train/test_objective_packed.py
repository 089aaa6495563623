"""Losses that depend on whole sequences, for several rows, ranks and cuts."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from turn_samples import conversations

from lockstep.config.algorithm import CISPO, GSPO, ImportanceCorrection, PPOClip
from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.mini_batches import pack
from lockstep.train.objective import ModelOutput, make_objective

LOSSES = [
    GSPO(),
    GSPO(clip_low=0.1, clip_high=0.2, aggregation="token-mean"),
    CISPO(clip_high=0.2),
    PPOClip(old_logprobs="trainer", importance=ImportanceCorrection(kind="mask", level="sequence", cap=1.5, floor=0.5)),
]


@settings(max_examples=25, deadline=None)
@given(
    conversations(),
    st.sampled_from(LOSSES),
    st.sampled_from(["forest", "block", "single"]),
    st.integers(1, 3),
    st.integers(0, 25),
    st.integers(0, 2**16),
)
def test_a_loss_does_not_depend_on_how_it_was_packed(rollouts, loss, mode, ranks, slack, seed) -> None:
    """The loss depends neither on rows and ranks nor on where trees with shared turns are cut."""
    random = np.random.default_rng(seed)
    longest = max(3 + len(each.tokens) for group in rollouts.groups for each in group.completions)
    advantages = random.normal(size=(2, 4))
    totals, gradients = [], []
    for budget, how, many in ((100_000, "forest", 1), (longest + slack, mode, ranks)):
        batch = pack(forest_from_rollouts(rollouts, advantages), many, budget, how)
        new = torch.from_numpy(
            batch.fields["engine_logprob"] + 0.2 * np.random.default_rng(seed).normal(size=batch.targets)
        )
        new = new.float().requires_grad_()
        batch.set_per_target("old_logprob", batch.fields["engine_logprob"] + 0.1)
        (minibatch,) = batch.minibatches(objective=loss)
        total = torch.zeros(())
        for packed in (row for rank in minibatch.by_rank for row in rank):
            row = packed.to(torch.device("cpu"))
            index = torch.from_numpy(packed.index)
            logprobs = torch.where(index >= 0, new[index.clamp_min(0)], 0.0)
            outputs: dict[ModelOutput, torch.Tensor] = {"logprobs": logprobs, "entropy": torch.zeros_like(logprobs)}
            total = total + make_objective(loss).compute(row.fields, outputs, row.sequences).loss
        totals.append(total.item())
        gradients.append(torch.autograd.grad(total, new)[0])
    assert totals[0] == pytest.approx(totals[1], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
