"""Reward functions that hang, crash, raise or return wrong values, for test_scorers.py."""

import ctypes
import os
import re
import signal
import time
from pathlib import Path


def hangs(data_source, solution_str, ground_truth, extra_info=None):
    while solution_str == "bad":
        time.sleep(0.1)
    return 1.0


def holds_the_interpreter(data_source, solution_str, ground_truth, extra_info=None):
    """Catastrophic backtracking: no other Python instruction, thread or signal handler runs again."""
    return float(re.fullmatch(r"(a+)+b", "a" * 64 if solution_str == "bad" else "ab") is not None)


def hangs_in_a_batch(prompts, completions, **kwargs):
    print("scoring", completions)
    while "bad" in completions:
        time.sleep(0.1)
    return [1.0] * len(completions)


def too_slow_together(prompts, completions, **kwargs):
    """Fast for one sample; a batch takes longer than allowed."""
    if len(completions) > 1:
        time.sleep(3600)
    return [1.0] * len(completions)


def slow_but_steady(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.5)
    return float(len(solution_str))


def leaves(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        print("about to leave")
        os._exit(1)
    return 1.0


def crashes(prompts, completions, **kwargs):
    if "bad" in completions:
        ctypes.string_at(0)
    return [1.0] * len(completions)


def killed(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def leaves_once(data_source, solution_str, ground_truth, extra_info=None):
    """Dies the first time it gets the sample, as on a machine short of memory."""
    marker = Path(extra_info["marker"])
    if solution_str == "bad" and not marker.exists():
        marker.touch()
        os._exit(9)
    return float(os.getpid())


def leaves_once_per_sample(data_source, solution_str, ground_truth, extra_info=None):
    marker = Path(extra_info["marker"], solution_str)
    if solution_str != "ok" and not marker.exists():
        marker.touch()
        os._exit(9)
    return 1.0


def hungry(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        return float(len(bytearray(8 << 30)))
    return 1.0


def raises(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "bad":
        raise LookupError("no such key")
    return 1.0


def raises_in_a_batch(prompts, completions, **kwargs):
    return [{"ok": 1.0}[completion] for completion in completions]


def nan(prompts, completions, **kwargs):
    return [float("nan") if completion == "bad" else 1.0 for completion in completions]


def short(prompts, completions, **kwargs):
    return [1.0 for completion in completions if completion != "bad"]


def never(prompts, completions, **kwargs):
    return [None if completion == "bad" else 1.0 for completion in completions]


def where(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str), "pid": os.getpid(), "nice": os.nice(0)}


def compares(prompts, completions, **kwargs):
    """Group-relative: needs whole groups in one call."""
    return [float(len(completions)) for _ in completions]
