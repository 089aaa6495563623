"""Rewards of grpo_gsm8k_8gpu.yaml, with TRL's signature. GSM8K's answers end with "#### 42"."""

import re

MARKED = re.compile(r"####\s*(-?[\d,]*\.?\d+)")
NUMBER = re.compile(r"-?[\d,]*\.?\d+")


def correct(completions, answer, **kwargs):
    """1 where the number after the last "####" (or, without one, the last number) is the answer's."""
    return [float(number(said(each)) == number(truth)) for each, truth in zip(completions, answer, strict=True)]


def formed(completions, **kwargs):
    """1 where the completion has exactly one "####" with a number, and nothing after it."""
    found = [(list(MARKED.finditer(text)), text) for text in map(said, completions)]
    return [float(len(marks) == 1 and not text[marks[0].end() :].strip(" .\n")) for marks, text in found]


def said(completion):
    """The text of a completion: of a conversation, the last turn."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def number(text):
    found = MARKED.findall(text) or NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
