"""Metrics of a step, computed by the controller from its rollouts. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.data.samples import Rollouts
from lockstep.rewards.metrics import reward_metrics


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Rewards and lengths under the names the field uses.

    `rollout/groups_without_signal` is the share of groups whose completions all have the same reward: they teach
    nothing. `reward/std` is over all completions, as in TRL and verl.
    """
    completions = [completion for group in rollouts.groups for completion in group.completions]
    lengths = np.array([completion.generated for completion in completions], dtype=np.float64)
    prompts = np.array([len(group.prompt.tokens) for group in rollouts.groups], dtype=np.float64)
    truncated = np.mean([completion.finish == "length" for completion in completions])
    staleness = np.mean(
        [float(rollouts.version - completion.own(completion.versions).min()) for completion in completions]
    )
    return {
        **reward_metrics(rollouts),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/prompt_length_mean": float(prompts.mean()),
        "rollout/truncated": float(truncated),
        "rollout/staleness_mean": float(staleness),
        "rollout/logprob_mean": float(np.concatenate([each.own(each.logprobs) for each in completions]).mean()),
        "rollout/tokens": float(lengths.sum()),
    }


def update_metrics(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One row from the optimizer steps of a step: means; of `tokens` the sum, of what ends in `_max` the maximum."""

    def joined(name: str) -> float:
        values = [each[name] for each in stats]
        if name == "tokens":
            return float(np.sum(values))
        return float(np.max(values) if name.endswith("_max") else np.mean(values))

    return {name: joined(name) for name in stats[0]}
