"""What compiled layers cost and save: the figures behind `trainer.compile: auto`.

    python -m benchmarks.compile_cost [--trainer deepspeed-0] [--one 256 4] [--repeats 5] [--json FILE]

For models of several widths and depths, one optimizer step on the documents of the workload `sft` is measured without
and with `trainer.compile: layers`, in turns in one process with one thread, each model in a process of its own with an
empty cache of compiled code. CPU seconds; medians, also of the ratios within one turn. *Saved* is divided by the number
of values in the hidden states: tokens * layers * hidden size. DeepSpeed is measured at the stages that may compile."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.runner import ROOT
from benchmarks.training import LockstepStep, cpu_seconds, trees
from benchmarks.workloads import MODEL, WORKS, prepare
from lockstep.base.malloc import tune_malloc

SHAPES = ((256, 2), (256, 4), (256, 8), (512, 4), (1024, 2))
"""Hidden size and layers; the feed-forward network is three times as wide."""
WAYS = ("fused", "own", "compiled")
"""Lockstep's fused layers; the model's own, without which families other than Llama's do; those compiled."""
TRAINERS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    **{f"deepspeed-{n}": {"kind": "deepspeed", "deepspeed": {"zero_optimization": {"stage": n}}} for n in (0, 1)},
}
LIMIT_S = 3600.0


def measure(trainer: str, hidden: int, layers: int, repeats: int) -> dict[str, Any]:
    """The figures of one model."""
    torch.set_num_threads(1)
    tune_malloc()
    work, model = WORKS["sft"], replace(MODEL, hidden=hidden, layers=layers, heads=hidden // 64, ffn=3 * hidden)
    with tempfile.TemporaryDirectory() as scratch:
        prepare(work, Path(scratch), 1, model)
        plain, compiled = (
            LockstepStep(work, Path(scratch) / "model", compile=way, **TRAINERS[trainer]) for way in ("off", "layers")
        )
    fused = plain._trainer.policy.fused_decoder
    assert fused is not None

    def run(way: str) -> None:
        fused.enabled = way == "fused"
        (compiled if way == "compiled" else plain)()

    first = {way: cpu_seconds(lambda way=way: run(way)) for way in WAYS}  # type: ignore[misc]
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, seconds in taken.items():
            seconds.append(cpu_seconds(lambda way=way: run(way)))  # type: ignore[misc]
    medians = {way: median(seconds) for way, seconds in taken.items()}
    values = sum(tree[0].tokens.size for tree in trees(work)) * layers * hidden
    saved = {way: (medians[way] - medians["compiled"]) / values * 1e9 for way in WAYS[:2]}
    fastest = {way: min(seconds) for way, seconds in taken.items()}
    ratios = {way: median(s / c for s, c in zip(taken[way], taken["compiled"], strict=True)) for way in WAYS[:2]}
    return {
        "trainer": trainer, "hidden": hidden, "layers": layers, "seconds": medians, "fastest": fastest,
        "ratio_to_compiled": ratios,
        "compile_s": first["compiled"] - medians["compiled"], "saved_ns_per_value": saved,
    }  # fmt: skip


def in_own_process(trainer: str, hidden: int, layers: int, repeats: int) -> dict[str, Any]:
    """The figures of one model, measured in a process with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.compile_cost", "--here", "--one", str(hidden), str(layers)]
        done = subprocess.run(
            [*command, "--trainer", trainer, "--repeats", str(repeats)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True,
        )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what compiled layers cost and save.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trainer", choices=TRAINERS, default="fsdp2")
    parser.add_argument("--one", nargs=2, type=int, metavar=("HIDDEN", "LAYERS"), help="measure one model only")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options.trainer, *options.one, options.repeats)))
        return
    rows = []
    for hidden, layers in [options.one] if options.one else SHAPES:
        rows.append(in_own_process(options.trainer, hidden, layers, options.repeats))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
