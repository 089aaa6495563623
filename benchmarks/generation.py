"""Tokens per CPU second of the builtin engine against `generate` of transformers, one thread, one process.

    python benchmarks/generation.py [--groups 32] [--size 8] [--prompt 6] [--repeats 3] [--json FILE]

The model is a Qwen2 of 0.5 M random parameters (hidden 128, 2 layers). `fixed N`: every completion has N tokens;
`tail N`: lengths are exponential with mean N / 3, at most N, as in real rollouts. Process CPU time, so the numbers
hold on a busy machine; only ratios within one run compare.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.models.tiny import make_tiny
from lockstep.rollout.builtin import BuiltinEngine
from lockstep.rollout.protocol import Request


def requests(groups: int, size: int, prompt: int, lengths: np.ndarray) -> list[Request]:
    """`lengths` int `[groups, size]`: tokens of each completion."""
    random = np.random.default_rng(0)
    prompts = [random.integers(4, 60, size=prompt).astype(np.int32) for _ in range(groups)]
    return [
        Request(f"{g}/{k}", str(g), prompts[g], seed=g * size + k, max_tokens=int(lengths[g, k]), ignore_eos=True)
        for g in range(groups)
        for k in range(size)
    ]


def cpu_seconds(work: Callable[[], int], repeats: int) -> tuple[float, int]:
    """Fastest of the repeats, after one to warm up, and the tokens made."""
    tokens, best = work(), float("inf")
    for _ in range(repeats):
        start = time.process_time()
        tokens = work()
        best = min(best, time.process_time() - start)
    return best, tokens


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("groups", 32), ("size", 8), ("prompt", 6), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_tiny(Path(scratch) / "m", max_length=options.prompt + 64)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        engine = BuiltinEngine(AutoModelForCausalLM.from_pretrained(folder), tokenizer, options.groups * options.size)
        plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    plain.generation_config.eos_token_id = None
    rows, shape = [], (options.groups, options.size)
    tail = np.random.default_rng(1).exponential(64 / 3, size=shape).clip(1, 64).astype(int)
    for label, lengths in (("fixed 6", np.full(shape, 6)), ("fixed 64", np.full(shape, 64)), ("tail 64", tail)):
        wanted = requests(options.groups, options.size, options.prompt, lengths)

        def ours(wanted: list[Request] = wanted) -> int:
            engine.submit(wanted)
            done = []
            while len(done) < len(wanted):
                done += engine.step()
            return sum(len(each.tokens) for each in done)

        def theirs(wanted: list[Request] = wanted, lengths: np.ndarray = lengths) -> int:
            tokens = torch.from_numpy(np.stack([each.prompt for each in wanted]).astype(np.int64))
            plain.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                top_k=0,
                max_new_tokens=int(lengths.max()),
                pad_token_id=0,
                output_logits=True,  # log-probabilities are made from them: the same service as ours
                return_dict_in_generate=True,
            )
            return int(lengths.sum())  # the useful ones

        (mine, tokens), (other, _) = cpu_seconds(ours, options.repeats), cpu_seconds(theirs, options.repeats)
        rows.append({"work": label, "tokens": tokens, "ours": tokens / mine, "generate": tokens / other})
        print(f"{label:9} {mine:7.3f} s  {tokens / mine:8.0f} tok/CPU s   generate {tokens / other:8.0f}   "
              f"x {other / mine:.2f}")  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
