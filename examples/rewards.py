"""One reward function for each signature that Lockstep takes; all three reward sorted digits.

reward:
  terms:
    - {kind: function, path: examples/rewards.py:sorted_share}
    - {kind: function, path: examples/rewards.py:compute_score, arguments: {data_source: sort}, weight: 0.5}
"""


def sorted_share(prompts, completions, answer, **kwargs):
    """TRL: lists in, a list out; every column of the data is a keyword. The share of digits in their place."""
    return [share(completion, truth) for completion, truth in zip(completions, answer, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl: one sample at a time. `score` is the reward, the other numbers are logged."""
    said, truth = solution_str.strip(), ground_truth.strip()
    return {"score": float(said == truth), "right_length": float(len(said) == len(truth))}


def reward_func(queries, prompts, labels, **kwargs):
    """OpenRLHF: whole texts in, a dict out. `rewards` are trained on, the rest is logged."""
    completions = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    shares = [share(completion, label) for completion, label in zip(completions, labels, strict=True)]
    exact = [float(each == 1.0) for each in shares]
    return {"rewards": exact, "scores": shares, "extra_logs": {"length": [len(each) for each in completions]}}


def share(completion, truth):
    """How much of the truth stands in its place, 0 for text of another length."""
    said, truth = completion.strip(), truth.strip()
    if not truth or len(said) != len(truth):
        return 0.0
    return sum(a == b for a, b in zip(said, truth, strict=True)) / len(truth)
