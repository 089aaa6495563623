"""Reward functions as people write them for OpenRLHF."""

import numpy as np


def reward_func(queries, prompts, labels, **kwargs):
    assert not kwargs or set(kwargs) <= {"scale"}, kwargs
    rewards = [
        float(query[len(prompt) :].strip() == label)
        for query, prompt, label in zip(queries, prompts, labels, strict=True)
    ]
    return {
        "rewards": np.array(rewards) * kwargs.get("scale", 1.0),
        "scores": np.clip(rewards, 0, 1),
        "extra_logs": {"length": np.array([len(query) for query in queries]), "flat": 7, "note": "text"},
    }


def tensor(queries, prompts, labels):
    import torch

    return torch.tensor([[float(len(query))] for query in queries])


def renamed(texts, questions, references):
    return [len(text) - len(question) for text, question in zip(texts, questions, strict=True)]


def without_rewards(queries, prompts, labels):
    return {"reward": [0.0] * len(queries)}
