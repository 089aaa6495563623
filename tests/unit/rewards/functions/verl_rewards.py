"""Reward functions as people write them for verl."""

import asyncio
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """GSM8K's rule, strict."""
    if data_source != "openai/gsm8k":
        raise NotImplementedError(f"Reward function is not implemented for {data_source=}")
    found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
    return 1.0 if found and found[-1].replace(",", "") == ground_truth else 0.0


def with_details(data_source, solution_str, ground_truth, extra_info=None, penalty=0.0):
    correct = solution_str.endswith(ground_truth)
    extra_info["seen"] = extra_info.get("seen", 0) + 1
    return {
        "score": float(correct) - penalty,
        "acc": correct,
        "pred": solution_str[-5:],
        "seen": extra_info["seen"],
        **({"only_correct": 1} if correct else {}),
    }


async def compute_score_async(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01 if solution_str.endswith("0") else 0.0)
    if "boom" in solution_str:
        raise RuntimeError("judge says no")
    return float(len(solution_str))


class Judge:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return self.scale * (solution_str == ground_truth)


judge = Judge(3)


def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, penalty=0.0):
    """verl's batch reward manager."""
    assert len(data_sources) == len(solution_strs) == len(ground_truths) == len(extra_infos)
    assert set(data_sources) <= {"x", None}
    for info in extra_infos:
        if info is not None:
            info["seen"] = True
    right = [float(truth in text) for text, truth in zip(solution_strs, ground_truths, strict=True)]
    return [{"score": each - penalty * (1 - each), "acc": each} for each in right]


def short_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0]


def unscored_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0, {"acc": 1.0}]
