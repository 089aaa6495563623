"""Loss and gradient of conversations that are packed as trees equal those of separate conversations."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_policy_model import assert_same_gradients, gradients

from lockstep.data.forest_builder import forest_from_rollouts
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Group, Prompt, Rollouts

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from turn_samples import conversation


def rollouts() -> Rollouts:
    random = np.random.default_rng(1)
    turns = [([(0, 0), (1, 1)], 0), ([(0, 0), (1, 1)], 3), ([(0, 0)], 2), ([(1, 0)], 0)]
    groups = []
    for g in range(2):
        completions = [conversation(f"{g}/{k}", said[g:], last, random) for k, (said, last) in enumerate(turns)]
        groups.append(Group(Prompt(f"0:{g}", g, random.integers(5, 40, 4).astype(np.int32), ""), completions))
    return Rollouts(0, 0, groups)


def separately(hf, made: Rollouts, advantages: np.ndarray) -> torch.Tensor:
    """Computes minus the mean over generated tokens of advantage times ratio to the engine, one completion at a
    time."""
    total, count = torch.zeros(()), 0
    for g, group in enumerate(made.groups):
        for k, each in enumerate(group.completions):
            whole = torch.from_numpy(np.concatenate([group.prompt.tokens, each.tokens])).long()
            places = len(group.prompt.tokens) + torch.from_numpy(np.flatnonzero(each.mask))
            every = hf(whole[None]).logits[0].log_softmax(-1)
            logprobs = every[places - 1].gather(-1, whole[places, None])[:, 0]
            ratio = (logprobs - torch.from_numpy(each.logprobs[each.mask])).exp()
            total = total - (ratio * float(advantages[g, k])).sum()
            count += each.generated
    return total / count


@pytest.mark.parametrize("mode,budget", [("forest", 200), ("forest", 24), ("block", 60), ("single", 60)])
def test_loss_and_gradient_equal_separate_rows(policy, hf, mode: str, budget: int) -> None:
    made = rollouts()
    advantages = np.random.default_rng(2).normal(size=(2, 4)).astype(np.float32)
    expected = separately(hf, made, advantages)
    expected.backward()
    batch = pack(forest_from_rollouts(made, advantages), 1, budget, mode)
    (minibatch,) = batch.minibatches()
    loss = torch.zeros(())
    for row in minibatch.by_rank[0]:
        tokens, sources, targets = (torch.from_numpy(a).long() for a in (row.tokens, row.sources, row.targets))
        logprobs, _ = policy(tokens, row.layout(), sources, targets)
        fields = {name: torch.from_numpy(values) for name, values in row.fields.items()}
        ratio = (logprobs - fields["engine_logprob"]).exp()
        part = -(fields["weight"] * fields["advantage"] * ratio).sum()
        part.backward()
        loss += part.detach()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients(policy), gradients(hf))
    computed = sum(row.tokens.size for row in minibatch.by_rank[0])
    whole = sum(4 + len(each.tokens) for group in made.groups for each in group.completions)
    assert computed < whole if mode == "forest" else computed == whole
