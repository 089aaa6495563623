"""The reward of all sides, in a signature that both frameworks support."""

import zlib
from typing import Any


def signal(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A checksum of the text in [0, 1): rewards differ within every group, and nothing can be learned from them."""
    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]
