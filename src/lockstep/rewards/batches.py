"""Cutting rollouts into the batches that scorers see, and putting what they say back together."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lockstep.data.samples import Completion, Group, Rollouts
from lockstep.rewards.api import Batch, Sample, Scores


def unscored(rollouts: Rollouts) -> list[Group]:
    return [group for group in rollouts.groups if group.rewards is None]


def batches(groups: Sequence[Group], step: int, size: int) -> list[Batch]:
    """Batches of at most `size` samples in the order of the groups. A group that fits into one batch is never cut:
    functions that see batches may compare the completions of a prompt."""
    found: list[Batch] = []
    for group in groups:
        if not found or len(found[-1]) + len(group.completions) > size:
            found.append(Batch(step, [], []))
        for index, completion in enumerate(group.completions):
            if len(found[-1]) == size:
                found.append(Batch(step, [], []))
            last = found[-1]
            if index == 0 or not last.prompts:
                last.prompts.append(group.prompt)
            last.samples.append(_sample(completion, len(last.prompts) - 1, index))
    return [batch for batch in found if len(batch)]


def _sample(completion: Completion, prompt: int, index: int) -> Sample:
    return Sample(prompt, index, completion.text, completion.tokens, completion.generated, completion.episode)


def columns(name: str, scores: Sequence[Scores], sizes: Sequence[int]) -> dict[str, np.ndarray]:
    """The values of one term over all its batches, float64 `[samples]`, NaN where it does not apply; under
    `name/extra` what it reported besides, NaN where it did not."""
    extras = list(dict.fromkeys(extra for each in scores for extra in each.extras))
    found = {name: np.concatenate([_floats(each.values) for each in scores])}
    for extra in extras:
        parts = (each.extras.get(extra) or [None] * size for each, size in zip(scores, sizes, strict=True))
        found[f"{name}/{extra}"] = np.concatenate([_floats(part) for part in parts])
    return found


def with_rewards(rollouts: Rollouts, rewards: np.ndarray, breakdown: Mapping[str, np.ndarray]) -> Rollouts:
    """Rollouts in which the groups that had none have their slice of the rewards (float32 `[samples]`). Groups that
    had rewards are the same objects as before."""
    groups, start = [], 0
    for group in rollouts.groups:
        if group.rewards is None:
            here = slice(start, start + len(group.completions))
            parts = {name: values[here].astype(np.float32) for name, values in breakdown.items()}
            groups.append(replace(group, rewards=rewards[here].copy(), breakdown=parts))
            start = here.stop
        else:
            groups.append(group)
    return replace(rollouts, groups=groups)


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if each is None else each for each in values], np.float64)
