"""The reward of all sides, in a signature that both frameworks support."""

import zlib
from typing import Any


def signal(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """A checksum of the text in [0, 1): rewards differ within every group, and nothing can be learned from them.

    Completions are texts, or lists of one message where prompts are messages."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in texts]
