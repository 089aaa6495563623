"""Chooses among the completions of each prompt by their rewards: the best and the worst, or the best ones."""

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.data.sample_order import permutation
from lockstep.data.samples import Group, Pair, Rollouts


def best_and_worst(rollouts: Rollouts) -> list[Pair | None]:
    """Makes a pair of each group: the completion with the highest reward, and the one with the lowest. Of several with
    the same reward, the first one.

    A completion in which the model wrote nothing is in no pair. A group gives None if all its rewards are the same, or
    if both completions have the same tokens and images, from which nothing would be learned.
    """
    return [_pair_of(group) for group in rollouts.groups]


def _pair_of(group: Group) -> Pair | None:
    rewards = _rewards(group)
    numbers = np.flatnonzero([completion.generated > 0 for completion in group.completions])
    if not numbers.size:
        return None
    best, worst = (int(numbers[choose(rewards[numbers])]) for choose in (np.argmax, np.argmin))
    chosen, rejected = group.completions[best], group.completions[worst]
    shown = [[image.digest for image in completion.images] for completion in (chosen, rejected)]
    if rewards[best] == rewards[worst] or (np.array_equal(chosen.tokens, rejected.tokens) and shown[0] == shown[1]):
        return None
    margin = float(rewards[best]) - float(rewards[worst])
    prompt = group.prompt
    tokens = prompt.tokens, chosen.tokens, rejected.tokens
    images = prompt.images, chosen.images, rejected.images
    return Pair(prompt.uid, prompt.row, *tokens, margin, chosen.mask, rejected.mask, *images)


def best_completions(
    rollouts: Rollouts, best_k: int = 1, min_reward: float | None = None, mask_truncated: bool = False
) -> np.ndarray:
    """Returns which completions are the best ones of their group: bool `[groups, group size]`. Of several with the same
    reward, the first ones. A completion in which the model wrote nothing is never one.

    Args:
        best_k: how many of each group; fewer where there are not enough.
        min_reward: none has a lower reward.
        mask_truncated: none was cut at the limit of tokens.
    """
    found = np.zeros(rollouts.rewards.shape, np.bool_)
    for row, group in zip(found, rollouts.groups, strict=True):
        rewards = _rewards(group)
        possible = np.array([each.generated > 0 for each in group.completions])
        if min_reward is not None:
            possible &= rewards >= np.float32(min_reward)  # as rewards are rounded
        if mask_truncated:
            possible &= [each.finish != "length" for each in group.completions]
        order = np.argsort(-rewards, kind="stable")
        row[order[possible[order]][:best_k]] = True
    return found


def minibatches_of_pairs(
    pairs: Sequence[Pair | None], epochs: int, groups: int | None, seed: int
) -> Iterator[list[Pair]]:
    """Yields the pairs of each optimizer step. Which groups share one is random, given by (seed, epoch), as in
    `TrainingBatch.minibatches`. Where no group gives a pair, there is no step.

    Args:
        pairs: one for each group, or None.
        groups: how many belong to an optimizer step; None: all.
    """
    size = groups or max(1, len(pairs))
    for epoch in range(epochs):
        order = permutation(len(pairs), seed, epoch)
        for start in range(0, len(pairs), size):
            part = [pairs[number] for number in sorted(order[start : start + size].tolist())]
            if found := [pair for pair in part if pair is not None]:
                yield found


def pair_statistics(pairs: Sequence[Pair | None]) -> dict[str, float]:
    """Metrics of the pairs of a step: their number, and means over them of the difference of the rewards and of the
    numbers of tokens that the model wrote."""
    found = [pair for pair in pairs if pair is not None]
    if not found:
        return {"pairs/count": 0.0}
    lengths = [(_learned(p.chosen, p.chosen_mask), _learned(p.rejected, p.rejected_mask)) for p in found]
    chosen, rejected = np.mean(lengths, axis=0).tolist()
    return {
        "pairs/count": float(len(found)),
        "pairs/reward_margin": float(np.mean([pair.margin for pair in found])),
        "pairs/chosen_length_mean": chosen,
        "pairs/rejected_length_mean": rejected,
    }


def longest_pair(pairs: Sequence[Pair | None]) -> int:
    """Tokens of the longest pair, with both completions; 0 without any pair."""
    present = (pair for pair in pairs if pair is not None)
    return max((pair.prompt.size + pair.chosen.size + pair.rejected.size for pair in present), default=0)


def choice_statistics(rollouts: Rollouts, chosen: np.ndarray) -> dict[str, float]:
    """Metrics of the chosen completions of a step: their number, and means over them of the reward and of the number of
    tokens that the model wrote.

    Args:
        chosen: bool `[groups, group size]`.
    """
    lengths = np.array([[completion.generated for completion in group.completions] for group in rollouts.groups])
    found = {"chosen/count": float(np.count_nonzero(chosen))}
    if chosen.any():
        found["chosen/reward_mean"] = float(rollouts.rewards[chosen].mean(dtype=np.float64))
        found["chosen/length_mean"] = float(lengths[chosen].mean())
    return found


def _rewards(group: Group) -> np.ndarray:
    if group.rewards is None:
        raise ValueError(f"group {group.prompt.uid!r} is not scored")
    return group.rewards


def _learned(tokens: np.ndarray, mask: np.ndarray | None) -> int:
    return int(tokens.size if mask is None else np.count_nonzero(mask))
