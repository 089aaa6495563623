"""The metrics of a step: from its rollouts, and from its optimizer steps."""

from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.data.samples import Completion, Rollouts
from lockstep.rewards.reward_metrics import reward_metrics


def rollout_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Returns metrics of rewards, lengths and staleness.

    The staleness of a token is the trained version (the number of the step) minus the version that generated the token.
    `rollout/groups_without_signal` is the share of groups whose completions all have the same reward and so give no
    gradient. `reward/std` is over all completions, as in TRL and verl.
    """
    completions = [completion for group in rollouts.groups for completion in group.completions]
    lengths = np.array([completion.generated for completion in completions], dtype=np.float64)
    prompts = np.array([len(group.prompt.tokens) for group in rollouts.groups], dtype=np.float64)
    truncated = np.mean([completion.finish == "length" for completion in completions])
    logprobs = np.concatenate([each.own(each.logprobs) for each in completions])
    staleness = rollouts.step - np.concatenate([each.own(each.versions) for each in completions]).astype(np.float64)
    return {
        **reward_metrics(rollouts),
        **_episode_metrics(completions),
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/prompt_length_mean": float(prompts.mean()),
        "rollout/truncated": float(truncated),
        "rollout/staleness_mean": float(staleness.mean()) if staleness.size else 0.0,
        "rollout/staleness_max": float(staleness.max(initial=0.0)),
        **({"rollout/logprob_mean": float(logprobs.mean())} if logprobs.size else {}),
        "rollout/tokens": float(lengths.sum()),
    }


def _episode_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Metrics of conversations: turns, tokens of the environment, how they ended, and the environment's own metrics."""
    episodes = [each.episode for each in completions if each.episode is not None]
    if not episodes:
        return {}
    turns = np.array([episode.turns for episode in episodes], dtype=np.float64)
    written = np.mean([len(each.tokens) - each.generated for each in completions])
    metrics = {
        "rollout/turns_mean": float(turns.mean()),
        "rollout/turns_max": float(turns.max()),
        "rollout/environment_tokens_mean": float(written),
        "environment/reward": float(np.mean([sum(episode.rewards) for episode in episodes])),
    }
    for ended in ("turns", "tokens", "error"):
        metrics[f"environment/ended_{ended}"] = float(np.mean([episode.ended == ended for episode in episodes]))
    for name in sorted({name for episode in episodes for name in episode.metrics}):
        metrics[f"environment/{name}"] = float(np.mean([episode.metrics.get(name, 0.0) for episode in episodes]))
    return metrics


def update_metrics(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combines the metrics of a step's optimizer steps: counts and seconds are summed, names in `_max` take the
    maximum, others the mean over the optimizer steps that measured them."""

    def combine(name: str) -> float:
        values = [each[name] for each in stats if name in each]
        if name in ("tokens", "batch/skipped_sequences", "train_s"):
            return float(np.sum(values))
        return float(np.max(values) if name.endswith("_max") else np.mean(values))

    return {name: combine(name) for name in dict.fromkeys(name for each in stats for name in each)}
