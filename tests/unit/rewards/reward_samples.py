"""Batches and rollouts for the tests of rewards."""

from typing import Any

import numpy as np

from lockstep.data.samples import Completion, Group, Prompt, Rollouts
from lockstep.rewards.scoring_messages import RewardSample, ScoringBatch


def prompt(row: int = 0, answer: Any = None, messages: bool = False, text: str = "2+2=", **columns: Any) -> Prompt:
    said = [{"role": "user", "content": text}] if messages else None
    return Prompt(f"0:{row}", row, np.arange(3, dtype=np.int32), text, said, answer, columns)


def batch(prompts: list[Prompt], texts: list[list[str]], step: int = 0) -> ScoringBatch:
    """One list of completions per prompt; a completion has as many tokens as characters."""
    samples = [
        RewardSample(position, index, text, np.arange(len(text), dtype=np.int32), len(text))
        for position, group in enumerate(texts)
        for index, text in enumerate(group)
    ]
    return ScoringBatch(step, prompts, samples)


def completion(text: str) -> Completion:
    count = max(1, len(text))
    zeros = np.zeros(count, np.int32)
    return Completion("request", np.arange(count, dtype=np.int32), np.zeros(count, np.float32), zeros, "stop", text)


def rollouts(prompts: list[Prompt], texts: list[list[str]], step: int = 3) -> Rollouts:
    groups = [Group(each, [completion(text) for text in group]) for each, group in zip(prompts, texts, strict=True)]
    return Rollouts(step, step, groups)
