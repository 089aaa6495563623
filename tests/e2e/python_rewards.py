"""A reward function in a module, for runs that are started from Python."""

from typing import Any


def first_digit(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for the right first character, half a point for any digit."""
    return [
        1.0 if text.startswith(each) else 0.5 * text[:1].isdigit()
        for text, each in zip(completions, answer, strict=True)
    ]
