"""One reward function for each signature that Lockstep accepts; all three reward sorted digits.

reward:
  terms:
    - {kind: function, path: examples/rewards.py:sorted_share}
    - {kind: function, path: examples/rewards.py:compute_score, arguments: {data_source: sort}, weight: 0.5}
"""


def sorted_share(prompts, completions, answer, **kwargs):
    """TRL: lists in, a list out; every column of the data is a keyword. The share of digits in the right position."""
    return [share(completion, truth) for completion, truth in zip(completions, answer, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl: one sample at a time. `score` is the reward; other numbers are logged."""
    given, truth = solution_str.strip(), ground_truth.strip()
    return {"score": float(given == truth), "right_length": float(len(given) == len(truth))}


def reward_func(queries, prompts, labels, **kwargs):
    """OpenRLHF: full texts in, a dict out. `rewards` are trained on; the rest is logged."""
    completions = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    shares = [share(completion, label) for completion, label in zip(completions, labels, strict=True)]
    exact = [float(each == 1.0) for each in shares]
    return {"rewards": exact, "scores": shares, "extra_logs": {"length": [len(each) for each in completions]}}


def share(completion, truth):
    """The share of the truth's characters in the right position; 0 for text of another length."""
    given, truth = completion.strip(), truth.strip()
    if not truth or len(given) != len(truth):
        return 0.0
    return sum(a == b for a, b in zip(given, truth, strict=True)) / len(truth)
