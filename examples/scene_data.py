"""Writes the data of the examples with images: where is the coloured square?

    python examples/scene_data.py runs/scene-data

makes a folder `images` of PNG files and four files in VLM-R1's layout (`image`, `conversations`, with `<image>` in
the question), or TRL's (`pairs.jsonl`). An image is 32 x 32 pixels of grey noise with one coloured square of 2 or 3
cells on a grid of 8 x 8; the question is the square's colour (`blue?`), the answer its box in cells: `x1,y1,x2,y2`,
which are the coordinates `0-8` of the reward `iou`.

`sft.jsonl`: half of the answers are shifted by up to two cells, as careless annotators would do, so that supervised
learning alone is right in about a third of the cases. `grpo.jsonl` and `eval.jsonl`: right answers; the held-out scenes
are in none of the others. `pairs.jsonl`: the right box as `chosen`, a shifted one as `rejected`.
"""

import json
import random
import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIDE, CELL = 8, 4
"""Cells of the grid per side, and pixels of a cell per side."""
COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 230), "yellow": (230, 210, 50)}
SFT_ROWS, GRPO_ROWS, EVAL_ROWS, PAIR_ROWS = 12_800, 5_120, 256, 2_048
SHIFTED = 0.5
Box = tuple[int, int, int, int]


def scene(rng: random.Random, pixels: np.random.Generator) -> tuple[Image.Image, str, Box]:
    """An image, the colour of its square, and the square's box in cells."""
    size = rng.choice((2, 3))
    x, y = rng.randint(0, SIDE - size), rng.randint(0, SIDE - size)
    colour = rng.choice(list(COLOURS))
    grey = 112 + 4 * pixels.integers(0, 8, (SIDE * CELL, SIDE * CELL, 1), np.uint8)  # few levels make small files
    values = np.repeat(grey, 3, axis=2)
    values[y * CELL : (y + size) * CELL, x * CELL : (x + size) * CELL] = COLOURS[colour]
    return Image.fromarray(values), colour, (x, y, x + size, y + size)


def shifted(box: Box, rng: random.Random) -> Box:
    """The box, moved by up to two cells in each direction, and not where it was."""
    x1, y1, x2, y2 = box
    moves = [
        (dx, dy)
        for dx in range(max(-2, -x1), min(2, SIDE - x2) + 1)
        for dy in range(max(-2, -y1), min(2, SIDE - y2) + 1)
        if dx or dy
    ]
    dx, dy = rng.choice(moves)
    return x1 + dx, y1 + dy, x2 + dx, y2 + dy


def written(box: Box) -> str:
    return ",".join(map(str, box))


def main(folder: Path, seed: int = 7, share: float = 1.0) -> None:
    """Writes the files.

    Args:
        share: of the usual number of rows, for a quick look.
    """
    rng, pixels = random.Random(seed), np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, rows in (("sft", SFT_ROWS), ("grpo", GRPO_ROWS), ("eval", EVAL_ROWS), ("pairs", PAIR_ROWS)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(max(1, round(rows * share))):
                image, colour, box = scene(rng, pixels)
                path = f"{name}-{number:05d}.png"
                image.save(folder / "images" / path)
                file.write(json.dumps(row(name, number, path, f"{colour}?", box, rng)) + "\n")


def row(name: str, number: int, image: str, question: str, box: Box, rng: random.Random) -> dict:
    if name == "pairs":
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        sides = {"chosen": written(box), "rejected": written(shifted(box, rng))}
        turns = {side: [{"role": "assistant", "content": text}] for side, text in sides.items()}
        return {"images": [image], "prompt": [{"role": "user", "content": parts}], **turns}
    answer = shifted(box, rng) if name == "sft" and rng.random() < SHIFTED else box
    human, model = {"from": "human", "value": f"<image>{question}"}, {"from": "gpt", "value": written(answer)}
    return {"id": number, "image": image, "conversations": [human, model]}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/scene-data"))
