"""The measurements: how fast the device is, then training, decoding and memory beside what it could do.

Each returns a record of JSON. Times are medians; a device is synchronized before every look at the clock.
"""

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.gpu.sizes import LETTERS, Shape, Sizes
from lockstep.config.algorithm import CrossEntropy
from lockstep.config.model import ModelConfig
from lockstep.config.recipes import SFTConfig
from lockstep.config.train_role import TrainRole
from lockstep.data.forest_builder import forest_from_documents
from lockstep.data.mini_batches import pack
from lockstep.data.samples import Document
from lockstep.models.model_facts import model_facts
from lockstep.models.model_loader import load_policy
from lockstep.rollout.builtin import BuiltinEngine
from lockstep.rollout.engine_protocol import Request
from lockstep.train.distributed import ParallelContext
from lockstep.train.fsdp.fsdp_trainer import FSDP2Trainer
from lockstep.train.trainer_kinds import trainer_kind

Record = dict[str, Any]


def device_of(sizes: Sizes) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if sizes.device == "cuda" else torch.device("cpu")


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of the wall seconds of `work`, after one call to warm up."""
    taken = []
    for _ in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ceilings(sizes: Sizes, scratch: Path) -> Record:
    """What the device does at best: a bf16 matrix product (random, as zeros run faster) and a copy within its
    memory, bytes read and written."""
    device = device_of(sizes)
    one, other = (torch.randn(sizes.matmul, sizes.matmul, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = seconds(lambda: one @ other, device, 10)
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    copy = seconds(lambda: target.copy_(source), device, 10)
    return {"flops": 2 * sizes.matmul**3 / product, "bytes_per_s": 2 * sizes.copied / copy}


# --- training


def documents(sizes: Sizes) -> list[Document]:
    """Random tokens; lengths drawn evenly from 64 to `document_tokens`."""
    draw = np.random.default_rng(0)
    made = []
    for number in range(sizes.documents):
        tokens = draw.integers(4, 4 + LETTERS, draw.integers(64, sizes.document_tokens + 1)).astype(np.int32)
        made.append(Document(f"0:{number}", number, tokens, np.arange(tokens.size) > 0))
    return made


def training_role(folder: Path, sizes: Sizes) -> TrainRole:
    values = {
        "recipe": "sft",
        "name": "gpu",
        "steps": 1000,
        "data": {"path": "none"},
        "token_budget": sizes.token_budget,
    }
    return SFTConfig.model_validate({**values, "model": {"path": str(folder)}}).policy


def training_flops(shape: Shape, lengths: list[int]) -> float:
    """Forward and backward of documents: 6 per parameter of a matrix and token, and the causal scores and their sums,
    `6 * layers * hidden * length^2` (Chowdhery et al. 2022, appendix B, halved because later tokens are masked)."""
    dense = 6.0 * shape.matrices * sum(lengths)
    return dense + sum(6.0 * shape.layers * shape.hidden * length**2 for length in lengths)


def sft(sizes: Sizes, scratch: Path) -> Record:
    """Optimizer steps of SFT on packed documents: tokens per second, and the estimate of memory beside its peak."""
    device, made = device_of(sizes), documents(sizes)
    lengths, found = [document.tokens.size for document in made], {}
    for shape in sizes.shapes:
        folder = shape.write(scratch / shape.name, device)
        role = training_role(folder, sizes)
        peak_before(device)
        trainer = FSDP2Trainer(role, ParallelContext(device=device))
        batch = pack(forest_from_documents(made), 1, sizes.token_budget)
        rows = next(iter(batch.minibatches(1, None, CrossEntropy()))).by_rank[0]
        taken = seconds(partial(trainer.step, rows), device, sizes.repeats)
        estimate = trainer_kind(role).planner.memory(role, model_facts(role.model, device.type), sizes.token_budget)
        found[shape.name] = {
            "tokens": sum(lengths),
            "seconds": taken,
            "flops_per_s": training_flops(shape, lengths) / taken,
            "estimate": estimate,
            "peak_bytes": peak(device),
        }
        del trainer, rows
    return found


def peak_before(device: torch.device) -> None:
    """Forgets the highest allocation so far."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    """The highest allocation since `peak_before`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# --- generation


def decode(sizes: Sizes, scratch: Path) -> Record:
    """Tokens per second of the builtin engine, and the most that the device's memory allows: each step reads the
    matrices once and the keys and values of every row."""
    device, found = device_of(sizes), {}
    for shape in sizes.shapes:
        folder = shape.write(scratch / shape.name, device)
        lm = load_policy(ModelConfig(path=str(folder), dtype="bfloat16"), device.type).lm
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found[shape.name] = {}
        for rows in sizes.decode_rows:
            engine = BuiltinEngine(lm, tokenizer, max_rows=rows)
            taken = seconds(partial(generate, engine, rows, sizes), device, min(3, sizes.repeats))
            engine.close()
            found[shape.name][rows] = {
                "tokens_per_s": rows * sizes.decode_tokens / taken,
                "bytes_per_step": 2 * shape.matrices + rows * shape.cache_bytes * average_context(sizes),
            }
        del lm
    return found


def average_context(sizes: Sizes) -> float:
    return sizes.prompt_tokens + sizes.decode_tokens / 2


def generate(engine: BuiltinEngine, rows: int, sizes: Sizes) -> None:
    """One completion for each of `rows` different prompts, all of the same length."""
    draw = np.random.default_rng(1)
    engine.submit(
        [
            Request(
                str(row), str(row), draw.integers(4, 4 + LETTERS, sizes.prompt_tokens).astype(np.int32), row,
                max_tokens=sizes.decode_tokens, ignore_eos=True,
            )
            for row in range(rows)
        ]
    )  # fmt: skip
    left = rows
    while left:
        left -= len(engine.step())


def finite(record: Record) -> bool:
    """Whether a record has numbers, and all are finite and none is negative."""
    numbers = [value for value in _leaves(record) if isinstance(value, int | float)]
    return bool(numbers) and all(math.isfinite(value) and value >= 0 for value in numbers)


def _leaves(value: Any) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if parts is None else [leaf for each in parts for leaf in _leaves(each)]
