"""A trainer's step compared with transformers' padded forward and backward and with its own matrix products.

    python -m benchmarks.training [--work fixed tail p512 sft] [--repeats 5] [--compile] [--json FILE]

All variants process the same tokens in one process with one thread, in turns; medians of CPU seconds and ratios are
printed. `lockstep` is packing and the optimizer step of `FSDP2Trainer` with its defaults; `malloc default` the same
with the C library's default allocation; `compiled` (with `--compile`) uses `trainer.compile: layers`, whose first step
is reported separately; `padded` is the forward and backward of transformers for the mean log-likelihood, on one
left-padded batch per micro-batch. For documents, `bfd` is the same on rows packed as by TRL's `bfd`, and torch's
fused AdamW: what a trainer with the model of transformers needs at least. As allocation settings last for the process,
`tune_malloc` is undone and redone between turns."""

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.matmul_baseline import TrainingFloor, segments
from benchmarks.workloads import MODEL, WORKS, Work, prepare
from lockstep.base.malloc import tune_malloc
from lockstep.config.algorithm import CrossEntropy, PPOClip
from lockstep.config.recipes import SFTConfig
from lockstep.data.forest import Forest, Segment
from lockstep.data.mini_batches import pack
from lockstep.train.distributed import ParallelContext
from lockstep.train.trainer_kinds import trainer_kind

MICRO = {"fixed": 128, "tail": 128, "p512": 8, "sft": 1}
"""Rows of a padded micro-batch: the fastest size."""


def trees(work: Work) -> list[list[Segment]]:
    """The workload's prompts with completions, or its documents, of random tokens; advantages differ within every
    group."""
    draw = np.random.default_rng(3)

    def tokens(count: int) -> np.ndarray:
        return draw.integers(4, 60, count).astype(np.int32)

    made, number = [], 0
    for root, own in segments(work):
        first = Segment(tokens(root), -1, np.arange(root) > 0 if not own else None, {}, () if own else number)
        children = []
        for place, size in enumerate(own):
            fields = {
                "engine_logprob": np.full(size, -4.1, np.float32),
                "advantage": np.full(size, (-1.0) ** place, np.float32),
            }
            children.append(Segment(tokens(size), 0, np.ones(size, np.bool_), fields, number + place))
        number += max(1, len(own))
        made.append([first, *children])
    return made


def _forest(made: list[list[Segment]]) -> Forest:
    return Forest.of(made, [str(number) for number in range(len(made))], [max(1, len(tree) - 1) for tree in made])


class LockstepStep:
    """Packing and one optimizer step of a trainer, by default the FSDP2 trainer; `trainer` are its settings."""

    def __init__(self, work: Work, model: Path, **trainer: Any) -> None:
        settings = {"recipe": "sft", "name": "bench", "steps": 1000, "data": {"path": "none"}}
        config = SFTConfig.model_validate({**settings, "model": {"path": str(model)}, "trainer": trainer})
        self._loss = CrossEntropy() if work.kind == "sft" else PPOClip()
        role = config.policy.model_copy(update={"objective": self._loss})
        self._trainer: Any = trainer_kind(role).create(role, ParallelContext(), 1, None)
        self._forest = _forest(trees(work))
        self._budget = config.token_budget

    def __call__(self) -> None:
        batch = pack(self._forest, 1, self._budget)
        for minibatch in batch.minibatches(objective=self._loss):
            self._trainer.step(minibatch.by_rank[0])


class PaddedStep:
    """Forward and backward of transformers over padded rows."""

    def __init__(self, work: Work, model: Path, rows: int) -> None:
        self._lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        paths = [
            np.concatenate([tree[0].tokens, leaf.tokens]) if leaf is not tree[0] else leaf.tokens
            for tree in trees(work)
            for leaf in tree[1:] or tree
        ]
        self._kept = 0 if work.kind == "sft" else work.max_tokens + 1
        """Number of last positions whose logits are computed; all positions for documents."""
        self._batches = [self._padded(paths[first : first + rows]) for first in range(0, len(paths), rows)]

    def __call__(self) -> None:
        for tokens, mask in self._batches:
            logits = self._lm(tokens, attention_mask=mask, use_cache=False, logits_to_keep=self._kept).logits
            targets = tokens[:, -logits.shape[1] + 1 :]
            found = logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            (found * mask[:, -targets.shape[1] :]).mean().neg().backward()
        self._lm.zero_grad()

    @staticmethod
    def _padded(rows: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        longest = max(len(row) for row in rows)
        tokens = torch.full(
            (len(rows), longest), 5
        )  # not the pad id, whose zero embedding would blow up RMSNorm's gradient
        mask = torch.zeros_like(tokens)
        for place, row in enumerate(rows):
            tokens[place, longest - len(row) :] = torch.from_numpy(row)
            mask[place, longest - len(row) :] = 1
        return tokens, mask


class BfdStep:
    """Forward and backward of transformers over documents in packed rows, without padding, and fused AdamW.

    A row is the best fit for the next document, the longest first, as in TRL's `bfd`; positions that begin at 0 again
    tell transformers where the documents are.
    """

    def __init__(self, work: Work, model: Path) -> None:
        self._lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._lm.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
        documents = sorted((tree[0].tokens for tree in trees(work)), key=len, reverse=True)
        rows: list[list[np.ndarray]] = []
        for document in documents:
            room = {number: work.max_tokens - sum(map(len, row)) - len(document) for number, row in enumerate(rows)}
            fitting = {number: left for number, left in room.items() if left >= 0}
            if fitting:
                rows[min(fitting, key=lambda number: fitting[number])].append(document)
            else:
                rows.append([document])
        self.rows = [self._packed(row) for row in rows]

    def __call__(self) -> None:
        targets = sum(int((positions > 0).sum()) for _, positions in self.rows)
        for tokens, positions in self.rows:
            logits = self._lm(tokens, position_ids=positions, use_cache=False).logits[0, :-1]
            found = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
            (found * (positions[0, 1:] > 0)).sum().div(targets).backward()
        torch.nn.utils.clip_grad_norm_(self._lm.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @staticmethod
    def _packed(documents: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        tokens = torch.from_numpy(np.concatenate(documents)).long()
        positions = torch.cat([torch.arange(len(document)) for document in documents])
        return tokens[None], positions[None]


def default_malloc() -> None:
    """Undo `tune_malloc`: restore glibc's initial thresholds."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for threshold in (-3, -1):
            libc.mallopt(threshold, 128 * 1024)
        libc.malloc_trim(0)


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(work: Work, repeats: int, compiled: bool = False) -> dict[str, Any]:
    """Median CPU seconds of a step by variant; `compile` is the first compiled step."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        prepare(work, folder, 1, MODEL)
        step = LockstepStep(work, folder / "model")
        padded = PaddedStep(work, folder / "model", MICRO[work.name])
        ways: dict[str, tuple[Callable[[], object], bool]] = {"lockstep": (step, True), "malloc default": (step, False)}
        once: dict[str, float] = {}
        if compiled:
            fast = LockstepStep(work, folder / "model", compile="layers")
            once["compile"] = cpu_seconds(fast)
            ways["compiled"] = (fast, True)
        ways["padded"] = (padded, False)
        if work.kind == "sft":
            ways["bfd"] = (BfdStep(work, folder / "model"), True)
    floor = TrainingFloor(padded._lm, work)
    ways["floor"] = (torch.inference_mode()(floor.run), True)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, (run, tuned) in ways.items():
            _ = tune_malloc() if tuned else default_malloc()
            seconds = cpu_seconds(run)
            if turn:  # the first turn warms up
                taken[name].append(seconds)
    return {"work": work.name, "tokens": floor.tokens, **{name: median(all_) for name, all_ in taken.items()}, **once}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a trainer's step with padded transformers and its floor.")
    parser.add_argument("--work", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.work:
        row = measure(WORKS[name], options.repeats, options.compile)
        rows.append(row)
        base = row["lockstep"]
        for way, seconds in row.items():
            if way not in ("work", "tokens"):
                print(f"{name:6} {way:15} {seconds:8.3f} s   x {seconds / base:.2f} of lockstep", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
