"""Environments that answer with images, for the tests of conversations."""

import io
import os
import random
from pathlib import Path

from PIL import Image

from lockstep.rollout.environments import Observation


def noise(seed: int, size: tuple[int, int] = (30, 20)) -> Image.Image:
    return Image.frombytes("RGB", size, random.Random(seed).randbytes(3 * size[0] * size[1]))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class Shows:
    """Answers with one image, then with two, then with text."""

    def reset(self, prompt):
        self.prompt, self.turn = prompt, 0
        return Observation("a<image>b?", images=[noise(prompt.row)]) if prompt.row == 1 else None

    def step(self, action):
        self.turn += 1
        if self.turn == 1:
            return Observation("see", images=[noise(len(action))], reward=0.5)
        if self.turn == 2:
            parts = [{"type": "image", "image": png(noise(7))}, {"type": "text", "text": "ab"}]
            content = [*parts, {"type": "image", "image": noise(8, (50, 20))}, {"type": "text", "text": "cd?"}]
            return Observation(messages=[{"role": "user", "content": content}])
        return Observation("ha", done=self.turn == 4)


class Breaks:
    """Answers with half of a file."""

    def step(self, action):
        whole = png(noise(0))
        return Observation("ab", images=[whole[: len(whole) // 2]], reward=1.0)


class BreaksAtReset(Breaks):
    def reset(self, prompt):
        return self.step("")


class Dies(Shows):
    """Ends its process once, in the second turn."""

    def __init__(self, mark):
        self.mark = Path(mark)

    def step(self, action):
        if self.turn == 1 and not self.mark.exists():
            self.mark.touch()
            os._exit(3)
        return super().step(action)
