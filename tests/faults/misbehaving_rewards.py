"""Reward functions that raise, leave, block, or use too much memory, for test_intended_ends.py."""

import asyncio
import atexit
import os
import sys
import time


def raises(prompts, completions, **kwargs):
    raise LookupError("no such key")


def exits(data_source, solution_str, ground_truth, extra_info=None):
    sys.exit(3)


def reads_input(data_source, solution_str, ground_truth, extra_info=None):
    return float(input("score? "))


async def asynchronous(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01)
    raise LookupError("no such key")


def hangs(data_source, solution_str, ground_truth, extra_info=None):
    """Never answers; leaves with a code of its own when it is interrupted."""
    try:
        time.sleep(1000)
    finally:
        os._exit(7)


def needs_memory(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(bytearray(8 << 30)))


def steady(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def leaves_with_nine(data_source, solution_str, ground_truth, extra_info=None):
    atexit.register(os._exit, 9)
    return 1.0
