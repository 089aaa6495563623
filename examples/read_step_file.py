"""Prints the best completions of a step, from its file in the folder of a run.

python examples/read_step_file.py runs/NAME/steps/00000040.arrow
"""

import sys
from typing import Any


def completions(step_file: str) -> list[dict[str, Any]]:
    import pyarrow as pa

    with pa.memory_map(step_file) as source:
        table = pa.ipc.open_file(source).read_all()
    return [
        {
            "prompt": group["prompt_text"],
            "completion": completion["text"],
            "reward": group["rewards"][0][k],
            **{entry["term"]: entry["scores"][k] for entry in group["breakdown"]},
        }
        for group in table.to_pylist()
        for k, completion in enumerate(group["completions"])
    ]


if __name__ == "__main__":
    for row in sorted(completions(sys.argv[1]), key=lambda row: -row["reward"])[:5]:
        sys.stdout.write(f"{row}\n")
