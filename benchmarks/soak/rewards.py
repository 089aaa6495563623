"""The reward function of the soak's runs, in TRL's signature: usually fast, sometimes as slow as a judge."""

import os
import random
import zlib
from pathlib import Path
from typing import Any

from benchmarks.soak.activities import ACTS, perform

_chance = random.Random(os.getpid())


def judged(
    prompts: list[str], completions: list[str], record: str, silence_s: float, share: float, **columns: Any
) -> list[float]:
    """A number in [0, 1) that depends on every character of the text."""
    if _chance.random() < share:
        perform(_chance.choice(list(ACTS)), silence_s * _chance.choice((0.3, 1.0, 1.15)), Path(record))
    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]
