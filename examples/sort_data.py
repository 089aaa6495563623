"""Writes the data of the sorting example: sort the digits of a number.

    python examples/sort_data.py runs/sort-data

makes six files: `sft.jsonl` (prompt and completion; two thirds of the answers are sorted the wrong way round, so
that supervised learning alone gets about a third right), `grpo.jsonl` and `eval.jsonl` (prompt and answer; held-out
prompts appear in none of the others), `pairs.jsonl` (prompt, chosen and rejected; the prompts of `grpo.jsonl`, and
one pair in ten is the wrong way round), `eval_pairs.jsonl` (the held-out prompts, all labels right), and
`labelled.jsonl` (prompt, completion and label; one of both sides of each of the pairs, and one label in ten is wrong).
"""

import json
import random
import sys
from pathlib import Path

DIGITS = 5
SFT_ROWS, GRPO_ROWS, EVAL_ROWS = 40_000, 20_000, 512
WRONG, WRONG_PAIRS, WRONG_LABELS = 0.65, 0.1, 0.1


def main(folder: Path, seed: int = 7) -> None:
    rng = random.Random(seed)
    numbers = [f"{n:0{DIGITS}d}" for n in rng.sample(range(10**DIGITS), SFT_ROWS + GRPO_ROWS + EVAL_ROWS)]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "sft.jsonl").open("w") as file:
        for number in numbers[:SFT_ROWS]:
            answer = "".join(sorted(number, reverse=rng.random() < WRONG))
            file.write(json.dumps({"prompt": f"{number}=", "completion": answer}) + "\n")
    for name, part in (("grpo", numbers[SFT_ROWS:-EVAL_ROWS]), ("eval", numbers[-EVAL_ROWS:])):
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in part:
                file.write(json.dumps({"prompt": f"{number}=", "answer": "".join(sorted(number))}) + "\n")
    with (folder / "pairs.jsonl").open("w") as file:
        for number in numbers[SFT_ROWS:-EVAL_ROWS]:
            sides = ["".join(sorted(number)), "".join(sorted(number, reverse=True))]
            if rng.random() < WRONG_PAIRS:
                sides.reverse()
            file.write(json.dumps({"prompt": f"{number}=", "chosen": sides[0], "rejected": sides[1]}) + "\n")
    with (folder / "eval_pairs.jsonl").open("w") as file:
        for number in numbers[-EVAL_ROWS:]:
            sides = ["".join(sorted(number)), "".join(sorted(number, reverse=True))]
            file.write(json.dumps({"prompt": f"{number}=", "chosen": sides[0], "rejected": sides[1]}) + "\n")
    with (folder / "labelled.jsonl").open("w") as file:
        for number in numbers[SFT_ROWS:-EVAL_ROWS]:
            right, label_is_right = rng.random() < 0.5, rng.random() >= WRONG_LABELS
            row = {"prompt": f"{number}=", "completion": "".join(sorted(number, reverse=not right))}
            file.write(json.dumps({**row, "label": right == label_is_right}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sort-data"))
