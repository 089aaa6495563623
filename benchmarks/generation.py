"""Tokens per CPU second of the builtin engine and of `generate` of transformers: one process, one thread, fp32.

    python benchmarks/generation.py [--models 0.5M 3M] [--work p32-fixed p32-tail p512-fixed] [--repeats 5]

Both sides generate as many tokens with the same random Qwen2: groups of 8 completions per prompt (`generate` gets each
prompt 8 times), temperature 1, no truncation. A table of lengths ends the rows on both sides, whatever their text:
`max_tokens` of each request here, a stopping criterion per row there. `fixed`: 64 tokens each; `tail`:
exponential, mean a third of 64, at most 64, as real rollouts. The floor is what the matrix products of the engine's
algorithm cost alone: every prompt once, then the unfinished rows at each token.

Process CPU time is measured, so a busy machine matters little; only ratios within one run are comparable. The numbers
are medians of alternating repeats, after one to warm up.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

from lockstep.models.tiny_model import make_tiny
from lockstep.rollout.builtin import BuiltinEngine
from lockstep.rollout.engine_protocol import Request

MODELS: dict[str, dict[str, int]] = {
    "0.5M": {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 512},
    "3M": {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 768},
}


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts, and the lengths of their completions."""

    name: str
    prompt: int
    groups: int = 16
    size: int = 8
    tokens: int = 64
    tail: bool = False

    def lengths(self) -> np.ndarray:
        """int `[groups, size]`: tokens of each completion."""
        shape = (self.groups, self.size)
        if not self.tail:
            return np.full(shape, self.tokens)
        drawn = np.random.default_rng(1).exponential(self.tokens / 3, size=shape)
        lengths: np.ndarray = drawn.clip(1, self.tokens).astype(int)
        return lengths

    def requests(self) -> list[Request]:
        random, lengths = np.random.default_rng(0), self.lengths()
        prompts = [random.integers(4, 60, size=self.prompt).astype(np.int32) for _ in range(self.groups)]
        return [
            Request(
                f"{g}/{k}", str(g), prompts[g], g * self.size + k, max_tokens=int(lengths[g, k]), ignore_eos=True
            )
            for g in range(self.groups)
            for k in range(self.size)
        ]  # fmt: skip


WORKS = (Work("p32-fixed", 32), Work("p32-tail", 32, tail=True), Work("p512-fixed", 512))


@dataclass(slots=True)
class Row:
    """Medians of CPU seconds."""

    model: str
    work: str
    tokens: int
    engine: float
    generate: float
    floor: float

    @property
    def ratio(self) -> float:
        """CPU time of `generate` over that of the engine."""
        return self.generate / self.engine


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the builtin engine with transformers' generate.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--work", nargs="+", choices=[work.name for work in WORKS], default=[w.name for w in WORKS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'model':6}{'work':12}{'engine':>9}{'generate':>10}{'ratio':>8}{'floor':>9}{'tokens/CPU s':>14}")
    for model in options.models:
        for work in WORKS:
            if work.name in options.work:
                row = measure(model, work, options.repeats)
                rows.append(asdict(row) | {"ratio": row.ratio})
                print(f"{row.model:6}{row.work:12}{row.engine:8.3f}s{row.generate:9.3f}s{row.ratio:7.2f}x"
                      f"{row.floor:8.3f}s{row.tokens / row.engine:14.0f}", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def measure(model: str, work: Work, repeats: int = 5) -> Row:
    """Measure engine, `generate` and floor in turns, on one thread (the process's number of threads is restored)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            sizes = MODELS[model]
            folder = make_tiny(Path(scratch) / "m", max_length=work.prompt + work.tokens, **sizes)
            tokenizer = AutoTokenizer.from_pretrained(folder)
            lm, plain = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
        sides = [engine_side(lm, tokenizer, work), generate_side(plain, work), floor_side(plain, work)]
        engine, generate, floor = medians(sides, repeats)
    finally:
        torch.set_num_threads(threads)
    return Row(model, work.name, int(work.lengths().sum()), engine, generate, floor)


def medians(sides: list[Callable[[], None]], repeats: int) -> list[float]:
    """Median CPU seconds of each side; the sides take turns."""
    seconds: list[list[float]] = [[] for _ in sides]
    for repeat in range(repeats + 1):
        for side, taken in zip(sides, seconds, strict=True):
            start = time.process_time()
            side()
            if repeat:
                taken.append(time.process_time() - start)
    return [statistics.median(taken) for taken in seconds]


def engine_side(lm: Any, tokenizer: Any, work: Work) -> Callable[[], None]:
    engine = BuiltinEngine(lm, tokenizer, work.groups * work.size)
    wanted = work.requests()
    expected = int(work.lengths().sum())

    def generate() -> None:
        engine.submit(wanted)
        done = []
        while len(done) < len(wanted):
            done += engine.step()
        if sum(len(each.tokens) for each in done) != expected:
            raise RuntimeError("the engine made another number of tokens than it was asked for")

    return generate


class LengthTable(StoppingCriteria):  # type: ignore[misc]
    """Ends row `i` when it has `lengths[i]` tokens after the prompt."""

    def __init__(self, prompt: int, lengths: np.ndarray) -> None:
        self.total = torch.from_numpy(lengths.reshape(-1)) + prompt

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return self.total <= input_ids.shape[1]


def generate_side(lm: Any, work: Work) -> Callable[[], None]:
    lm.generation_config.eos_token_id = None
    tokens = torch.from_numpy(np.stack([each.prompt for each in work.requests()]).astype(np.int64))
    stop = StoppingCriteriaList([LengthTable(work.prompt, work.lengths())])

    def generate() -> None:
        with torch.inference_mode():
            made = lm.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=True,
                top_k=0,
                max_new_tokens=work.tokens,
                pad_token_id=0,
                stopping_criteria=stop,
            )
        if made.shape[1] != work.prompt + int(work.lengths().max()):
            raise RuntimeError("generate made another number of tokens than it was asked for")

    return generate


def floor_side(lm: Any, work: Work) -> Callable[[], None]:
    """Matrix products alone: fused projections, scores and values of attention, no copies in between."""
    layers = [
        [torch.cat([module.weight for module in modules]) for modules in projections(layer)]
        for layer in lm.model.layers
    ]
    head = lm.lm_head.weight
    kv_heads, dim = lm.config.num_key_value_heads, lm.config.hidden_size // lm.config.num_attention_heads
    shared = lm.config.num_attention_heads // kv_heads
    lengths = work.lengths()

    def attention(batch: int, queries: int, keys: int) -> None:
        q, k = torch.empty(batch * kv_heads, queries, dim), torch.empty(batch * kv_heads, keys, dim)
        torch.bmm(torch.bmm(q, k.transpose(1, 2)), k)

    def stack(rows: int) -> None:
        inputs = {size: torch.zeros(rows, size) for size in {w.shape[1] for layer in layers for w in layer}}
        for layer in layers:
            for weight in layer:
                torch.mm(inputs[weight.shape[1]], weight.T)

    def products() -> None:
        with torch.inference_mode():
            stack(work.groups * work.prompt)
            for _ in layers:
                attention(work.groups, work.prompt * shared, work.prompt)
            for turn in range(work.tokens):
                live = int((lengths > turn).sum())
                groups = int((lengths > turn).any(1).sum())
                if not live:
                    break
                stack(live)
                torch.mm(torch.zeros(live, head.shape[1]), head.T)
                for _ in layers:
                    attention(groups, -(-live // groups) * shared, work.prompt)
                    attention(live, shared, turn + 1)

    return products


def projections(layer: Any) -> list[list[Any]]:
    """The layer's matrices, grouped by their input."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [attention.o_proj],
        [mlp.gate_proj, mlp.up_proj],
        [mlp.down_proj],
    ]


if __name__ == "__main__":
    main()
