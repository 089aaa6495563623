"""A calculator as a tool, and the data of the example that learns to use it.

    python examples/calculator.py runs/calculator-data

makes `sft.jsonl`, `grpo.jsonl` and `eval.jsonl`: products of two numbers, "37*48=". A tiny model cannot multiply; it
can write "[37*48]", read what the calculator answers ("1776;") and repeat it. Of the completions that supervised
learning sees, a third do that and the others guess; reinforcement learning finds out what pays.
"""

import ast
import json
import operator
import random
import sys
from pathlib import Path

SFT_ROWS, GRPO_ROWS, EVAL_ROWS = 30_000, 4_000, 256
WITH_TOOL = 0.35
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Computes an expression of numbers with + - * and parentheses.

    Args:
        expression: What to compute, such as "37*48".
    """
    return str(value(ast.parse(expression, mode="eval").body))


def value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
    raise ValueError(f"cannot compute {ast.unparse(node)}")


def main(folder: Path, seed: int = 7) -> None:
    rng = random.Random(seed)
    pairs = rng.choices([(a, b) for a in range(10, 100) for b in range(10, 100)], k=SFT_ROWS + GRPO_ROWS + EVAL_ROWS)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "sft.jsonl").open("w") as file:
        for a, b in pairs[:SFT_ROWS]:
            uses = f"[{a}*{b}]{a * b};{a * b}"
            guess = str(rng.randrange(100, 10_000))
            completion = uses if rng.random() < WITH_TOOL else guess
            file.write(json.dumps({"prompt": f"{a}*{b}=", "completion": completion}) + "\n")
    for name, part in (("grpo", pairs[SFT_ROWS:-EVAL_ROWS]), ("eval", pairs[-EVAL_ROWS:])):
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps({"prompt": f"{a}*{b}=", "answer": str(a * b)}) + "\n" for a, b in part)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/calculator-data"))
