"""Metrics of scored rollouts: statistics of the rewards and of each reward term."""

import math
from collections.abc import Sequence

import numpy as np

from lockstep.data.samples import Group, Rollouts
from lockstep.rewards import verifiers


def checked_exact_match(completion: str, answer: object) -> float:
    """1 if the stripped completion equals the stripped answer, else 0. Evaluation uses it as accuracy. Raises
    ValueError without an answer."""
    if answer is None:
        raise ValueError("exact match needs an answer, and the row has none; set data.answer_column")
    return verifiers.exact_match(completion, answer)


def exact_match_rate(rollouts: Rollouts) -> float:
    """Mean exact match over all completions."""
    pairs = [(group.prompt, completion) for group in rollouts.groups for completion in group.completions]
    if not pairs:
        raise ValueError("no completions to evaluate")
    return sum(checked_exact_match(completion.text, prompt.answer) for prompt, completion in pairs) / len(pairs)


def groups_without_signal(rollouts: Rollouts) -> float:
    """The share of groups whose completions all have the same reward: their group-relative advantages are zero."""
    return float(np.mean([np.ptp(_scored_rewards(group.rewards)) == 0 for group in rollouts.groups]))


def reward_metrics(rollouts: Rollouts) -> dict[str, float]:
    """`reward/mean`, `/std` (population), `/min`, `/max` over all completions, `rollout/groups_without_signal`, and
    the metrics of each reward term. Raises ValueError if a group has no rewards yet."""
    rewards = np.concatenate([_scored_rewards(group.rewards) for group in rollouts.groups]).astype(np.float64)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "rollout/groups_without_signal": groups_without_signal(rollouts),
        **breakdown_metrics(rollouts.groups, "reward/"),
    }


def breakdown_metrics(groups: Sequence[Group], prefix: str) -> dict[str, float]:
    """Returns the metrics `{prefix}{term}/mean` and `{prefix}{term}/std` (population) of each term's unweighted reward,
    over the completions to which the term applies. For extra values that a reward function returns (breakdown keys
    `TERM/KEY`), returns only the mean, as `{prefix}{term}/{key}`. Terms that apply to no completion have no metrics."""
    extra_means: dict[str, float] = {}
    term_statistics: dict[str, float] = {}
    for name in dict.fromkeys(name for group in groups for name in group.breakdown):
        parts = [group.breakdown[name] for group in groups if name in group.breakdown]
        values = np.concatenate(parts).astype(np.float64)
        values = values[~np.isnan(values)]
        if values.size and "/" in name:
            extra_means[f"{prefix}{name}"] = float(values.mean())
        elif values.size:
            term_statistics[f"{prefix}{name}/mean"] = float(values.mean())
            term_statistics[f"{prefix}{name}/std"] = float(values.std())
    return extra_means | term_statistics


def pass_at_k(passed: np.ndarray) -> dict[int, float]:
    """Returns pass@k for k = 1, 2, 4, ... and for the number of completions: the probability that at least one of k
    completions of a prompt passes, by the unbiased estimator of Chen et al. (2021), as a mean over prompts.

    Args:
        passed: 1 for each completion that passes, else 0: float `[prompts, completions]`.
    """
    n, correct = passed.shape[1], passed.sum(axis=1).astype(int)
    sizes = sorted({n, *(1 << power for power in range(n.bit_length()) if 1 << power <= n)})
    return {k: float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in correct.tolist()])) for k in sizes}


def _scored_rewards(rewards: np.ndarray | None) -> np.ndarray:
    if rewards is None:
        raise ValueError("a group is not scored yet")
    return rewards
