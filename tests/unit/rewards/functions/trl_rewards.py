"""Reward functions as people write them for TRL."""

import asyncio
import re


def format_reward(completions, **kwargs):
    """Like TRL's think_format_reward, for conversations."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content, re.DOTALL) else 0.0 for content in contents]


def accuracy(prompts, completions, solution, **kwargs):
    """None where there is nothing to compare with, as in TRL's accuracy_reward."""
    print("scoring", len(prompts))
    return [
        None if truth == "" else float(text.strip() == truth) for text, truth in zip(completions, solution, strict=True)
    ]


def lengths(completion_ids, trainer_state, log_extra, log_metric, **kwargs):
    log_extra("first", [ids[0] for ids in completion_ids])
    log_metric("longest", max(len(ids) for ids in completion_ids))
    return [len(ids) + 100.0 * trainer_state.global_step for ids in completion_ids]


async def judged(prompts, completions, level, **kwargs):
    await asyncio.sleep(0.001)
    return [0.5 * each for each in level]


def strict(prompts, completions, level):
    """No **kwargs: TRL itself would refuse the call; here it gets what it names."""
    return list(level)


def everything(**kwargs):
    assert {"prompts", "completions", "completion_ids", "level", "answer"} <= set(kwargs), sorted(kwargs)
    return [1.0] * len(kwargs["prompts"])
