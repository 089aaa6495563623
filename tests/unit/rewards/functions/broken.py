"""Reward functions with everything that goes wrong."""

import math


def raises(prompts, completions, **kwargs):
    lookup = {"good": 1.0}
    return [lookup[completion] for completion in completions]


def raises_each(data_source, solution_str, ground_truth, extra_info=None):
    return {"good": 1.0}[solution_str]


def exits(data_source, solution_str, ground_truth, extra_info=None):
    raise SystemExit(3)


def nan(prompts, completions, **kwargs):
    return [1.0 if completion == "good" else math.nan for completion in completions]


def infinite(prompts, completions, **kwargs):
    return [1.0 if completion == "good" else 1e39 for completion in completions]


def short(prompts, completions, **kwargs):
    return [1.0] * (len(completions) - 1)


def nothing(prompts, completions, **kwargs):
    pass


def scalar(prompts, completions, **kwargs):
    return 1.0


def text(prompts, completions, **kwargs):
    return ["1.0" for _ in completions]


def nothing_each(data_source, solution_str, ground_truth, extra_info=None):
    return None


def no_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"acc": 1.0}


def out_of_memory(data_source, solution_str, ground_truth, extra_info=None):
    raise MemoryError


def wants_column(prompts, completions, solutoin, **kwargs):
    return [0.0] * len(completions)


def positional(x, y, /):
    return []


def neither(text, truth):
    return 0.0


def both(completions, queries):
    return []


not_callable = 3


class Reward:
    def __call__(self, completions):
        return [1.0] * len(completions)
