"""An environment that answers with pictures: move the red square onto the green one (docs/environments.md).

    python examples/grid_moves.py runs/grid-data

writes the prompts, `train.jsonl` and `eval.jsonl`. A picture is 32 x 32 pixels: a grid of 4 x 4 cells, of which one is
red and one is green. Each turn of the model is a letter (`u`, `d`, `l`, `r`); the environment answers with a picture of
the grid after the move, until red is on green.
"""

import json
import random
import sys
from pathlib import Path

from lockstep.rollout.environments import Observation

SIDE, CELL = 4, 8
"""Cells of the grid per side, and pixels of a cell per side."""
RED, GREEN, GREY = (220, 40, 40), (40, 190, 60), (112, 112, 112)
MOVES = {"u": (0, -1), "d": (0, 1), "l": (-1, 0), "r": (1, 0)}
TRAIN_ROWS, EVAL_ROWS = 4_096, 64


class GridMoves:
    """Rewards: 0.25 for a move towards the green square, -0.05 for any other turn, and 1 more at the end."""

    def reset(self, prompt):
        cells = [(x, y) for x in range(SIDE) for y in range(SIDE)]
        self.red, self.green = random.Random(f"{prompt.text}{prompt.row}").sample(cells, 2)
        return Observation(images=[self.picture()])

    def step(self, action):
        before = self.distance
        dx, dy = MOVES.get(action.strip()[-1:], (0, 0))
        x, y = self.red[0] + dx, self.red[1] + dy
        if 0 <= x < SIDE and 0 <= y < SIDE:
            self.red = x, y
        closer = self.distance < before
        done = self.distance == 0
        reward = (0.25 if closer else -0.05) + done
        return Observation(images=[self.picture()], reward=reward, done=done, metrics={"arrived": float(done)})

    @property
    def distance(self):
        return abs(self.red[0] - self.green[0]) + abs(self.red[1] - self.green[1])

    def picture(self):
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), GREY)
        for (x, y), colour in ((self.green, GREEN), (self.red, RED)):
            corner = x * CELL, y * CELL, (x + 1) * CELL - 1, (y + 1) * CELL - 1
            ImageDraw.Draw(image).rectangle(corner, colour)
        return image


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", TRAIN_ROWS), ("eval", EVAL_ROWS)):
        (folder / f"{name}.jsonl").write_text((json.dumps({"prompt": f"{name}?"}) + "\n") * rows)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/grid-data"))
