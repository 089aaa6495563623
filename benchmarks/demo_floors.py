"""How far the stages of a finished GRPO run are from their floors, on this machine.

    python benchmarks/demo_floors.py runs/demo/sort-grpo [--steps 10] [--json FILE]

Floors, for the same tokens as the run's last stored steps:

- train: forward and backward of one rank's packed tokens through the bare transformers model (plain causal attention,
  mean cross-entropy, no optimizer, no communication), with the threads of a rank;
- rollout: a bare decode loop of transformers over all rows of a step (prompts of equal length, one cache, multinomial
  sampling, no stop conditions), with the threads of the engine.

Everything is wall time, median over the steps: run it on a machine with nothing else to do.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional
from transformers import AutoModelForCausalLM

from lockstep.config.load import check_config
from lockstep.config.recipes import GRPOConfig
from lockstep.data.packing import pack
from lockstep.data.samples import Rollouts
from lockstep.data.trees import trees_of_rollouts
from lockstep.ledger.ledger import Ledger

STAGES = ("rollout", "reward", "ledger", "pack", "train", "publish")


def main() -> None:
    parser = argparse.ArgumentParser(description="Stages of a run against their floors.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with Ledger.reader(options.run) as ledger:
        config = check_config(ledger.config(), str(options.run))
        if not isinstance(config, GRPOConfig):
            parser.error(f"{options.run} is no GRPO run")
        rows = ledger.metrics_rows()[-5 * options.steps :]
        steps = [rollouts for row in rows if (rollouts := ledger.rollouts(row.step)) is not None][-options.steps :]
    if not steps:
        parser.error(f"{options.run} has no stored rollouts")
    model = AutoModelForCausalLM.from_pretrained(options.run / "export", dtype=torch.float32)
    took = {stage: statistics.median(row.values[f"time/{stage}_s"] for row in rows) for stage in STAGES}
    floors = {
        "train": median_of(lambda rollouts: training(model, rollouts, config), steps),
        "rollout": median_of(lambda rollouts: decoding(model, rollouts, config), steps),
    }
    show(took, floors)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"seconds": took, "floors": floors, **machine()}, indent=2) + "\n")


def median_of(work: Callable[[Rollouts], float], steps: list[Rollouts]) -> float:
    """Median seconds, after one step to warm up."""
    work(steps[0])
    return statistics.median(work(rollouts) for rollouts in steps)


def training(model: Any, rollouts: Rollouts, config: GRPOConfig) -> float:
    """Seconds of the bare forward and backward of what rank 0 had to train on."""
    batch = pack(trees_of_rollouts(rollouts), config.trainer.ranks, config.token_budget)
    rows = [torch.from_numpy(row.tokens).long()[None] for row in next(batch.minibatches()).ranks[0]]
    torch.set_num_threads(config.trainer.threads or max(1, (os.cpu_count() or 1) // config.trainer.ranks))
    model.train().zero_grad()
    start = time.perf_counter()
    for row in rows:
        logits = model(input_ids=row, use_cache=False).logits[0]
        functional.cross_entropy(logits[:-1], row[0, 1:]).backward()
    return time.perf_counter() - start


@torch.no_grad()
def decoding(model: Any, rollouts: Rollouts, config: GRPOConfig) -> float:
    """Seconds of the bare decode loop for as many rows and tokens."""
    torch.set_num_threads(config.rollout.engine.threads or os.cpu_count() or 1)
    completions = [completion for group in rollouts.groups for completion in group.completions]
    longest = max(len(completion.tokens) for completion in completions)
    prompt = torch.from_numpy(rollouts.groups[0].prompt.tokens).long()
    tokens, cache = prompt.repeat(len(completions), 1), None
    model.eval()
    start = time.perf_counter()
    for _ in range(longest):
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens = torch.multinomial(out.logits[:, -1].softmax(-1), 1)
    return time.perf_counter() - start


def show(took: dict[str, float], floors: dict[str, float]) -> None:
    table = Table("stage", "ms a step", "floor", "times the floor", box=None)
    for stage, seconds in took.items():
        floor = floors.get(stage)
        cells = ("", "") if floor is None else (f"{1e3 * floor:.0f}", f"{seconds / floor:.2f}")
        table.add_row(stage, f"{1e3 * seconds:.0f}", *cells)
    Console().print(table)


def machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}


if __name__ == "__main__":
    main()
