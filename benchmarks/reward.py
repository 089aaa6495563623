"""The reward of all sides, in the signature both know."""

import zlib
from typing import Any


def signal(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A number in [0, 1) that any other text changes: every group has a signal, and nothing is learned from it."""
    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]
