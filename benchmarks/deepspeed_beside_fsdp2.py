"""DeepSpeed's stages beside FSDP2: time and memory of the same steps on two gloo ranks.

    python -m benchmarks.deepspeed_beside_fsdp2            every repeat goes to `--out`, then the table is printed
    python -m benchmarks.deepspeed_beside_fsdp2 --docs     and put into docs/deepspeed.md
    python -m benchmarks.deepspeed_beside_fsdp2 --quick    one repeat of a small model, to see that it works

The trainers take turns within a repeat, in another order each time, in two processes with one torch thread, once for
times and once more for memory. Each trains a small model first, so that libraries, communicators and buffers of fixed
size are not counted: memory is what the model adds to a rank's resident memory at its peak, with the pages of the
checkpoint's file that are mapped while it is read. All trainers must compute the same losses, to 1e-5.
"""

import argparse
import gc
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.comparison_table import markdown, markdown_head
from benchmarks.docs_markers import into_page
from lockstep.base.text import count_noun

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "deepspeed.jsonl"
QUICK = ROOT / "build" / "benchmark" / "deepspeed.jsonl"
PAGE, MARKERS = ROOT / "docs" / "deepspeed.md", "fsdp2"
RANKS, MICROBATCHES = 2, 2
TOLERANCE = 1e-5
LIMIT_S = 1800.0
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """A trainer and its settings."""

    title: str
    zero: Mapping[str, Any] | None = None
    """DeepSpeed's `zero_optimization`; None for FSDP2."""

    @property
    def trainer(self) -> dict[str, Any]:
        if self.zero is None:
            return {"kind": "fsdp2"}
        return {"kind": "deepspeed", "deepspeed": {"zero_optimization": dict(self.zero)}}


HOST = {"offload_optimizer": {"device": "cpu"}}
SMALL_BUCKETS = {"reduce_bucket_size": 1_000_000}
VARIANTS = {
    "fsdp2": Variant("FSDP2"),
    "0": Variant("stage 0", {"stage": 0}),
    "1": Variant("stage 1", {"stage": 1}),
    "2": Variant("stage 2", {"stage": 2}),
    "2-buckets": Variant("stage 2, buckets of 10^6", {"stage": 2, **SMALL_BUCKETS}),
    "2-offload": Variant("stage 2, `offload_optimizer`", {"stage": 2, **HOST}),
    "3": Variant("stage 3", {"stage": 3}),
    "3-buckets": Variant("stage 3, buckets of 10^6", {"stage": 3, **SMALL_BUCKETS}),
    "3-offload": Variant("stage 3, `offload_optimizer`", {"stage": 3, **HOST}),
}


@dataclass(frozen=True, slots=True)
class Size:
    """The work of a variant."""

    sizes: Mapping[str, int]
    """Of the model, as in `TinyModel`."""
    tokens: int
    """Of each micro-batch; a rank has `MICROBATCHES` in a step."""
    steps: int


FULL = Size({"hidden": 384, "layers": 6, "heads": 6, "kv_heads": 6, "ffn": 1152}, 128, 2)
SMALL = Size({"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 64}, 32, 2)


# Freed tensors leave resident memory at once, so that its peak is what is used at the same time. This costs CPU time,
# most where layers are gathered and freed, so times are measured without it.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}


def measure(folder: Path, variants: Sequence[str], size: Size) -> list[dict[str, Any]]:
    """Trains with one variant after the other, with the usual allocator for times and with `EXACT_MEMORY` for memory.

    CPU seconds are those of both ranks, memory that of the rank with more of it.
    """
    times = measure_once(folder, variants, size, {})
    memories = measure_once(folder, variants, size, EXACT_MEMORY)
    return [
        {**time_, **{name: memory_[name] for name in ("load_bytes", "step_bytes")}}
        for time_, memory_ in zip(times, memories, strict=True)
    ]


def measure_once(
    folder: Path, variants: Sequence[str], size: Size, environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Trains with one variant after the other on two new ranks, processes with these variables."""
    from torch.distributed import TCPStore  # only where it measures, so that tables need no torch

    context = multiprocessing.get_context("spawn")  # not forks, which have the allocator of their parent
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = [folder / f"rank-{rank}.json" for rank in range(RANKS)]
    ranks = [
        context.Process(target=run_rank, args=(rank, store.port, folder, variants, size, results[rank]), daemon=True)
        for rank in range(RANKS)
    ]
    before = dict(os.environ)
    os.environ.update(environment)
    for process in ranks:
        process.start()
    os.environ.clear()
    os.environ.update(before)
    for process in ranks:
        process.join(LIMIT_S)
        if process.exitcode != 0:
            raise SystemExit(f"a rank ended with {process.exitcode}, see its output above")
    return [
        {
            **first,
            "cpu_s": first["cpu_s"] + other["cpu_s"],
            **{name: max(first[name], other[name]) for name in ("wall_s", "load_bytes", "step_bytes")},
        }
        for first, other in zip(*(json.loads(each.read_text()) for each in results), strict=True)
    ]


def run_rank(rank: int, port: int, folder: Path, variants: Sequence[str], size: Size, result: Path) -> None:
    """One rank, in its own process."""
    import torch

    from lockstep.train.distributed import join_ranks
    from lockstep.watch.beacon.writer import open_beacon

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    os.environ["LOCKSTEP_BEACONS"] = str(folder / "beacons")  # collectives are recorded, as in a run
    open_beacon(f"benchmark-{port}", f"policy-{rank}", "policy", rank)
    ranks = join_ranks(rank, RANKS, torch.device("cpu"), f"tcp://127.0.0.1:{port}", "benchmark", LIMIT_S)
    lines = [measure_variant(folder, VARIANTS[name], size, ranks) for name in variants]
    result.write_text(json.dumps(lines))
    ranks.leave()


def measure_variant(folder: Path, variant: Variant, size: Size, ranks: Any) -> dict[str, Any]:
    """Trains on this rank. All ranks call it."""
    warm, rows = create(folder / "small", variant, SMALL, ranks)
    warm.step(rows)
    del warm
    gc.collect()
    reset_peak()
    base = memory("VmRSS")
    trainer, rows = create(folder / "model", variant, size, ranks)
    loaded = memory("VmHWM") - base
    losses = [trainer.step(rows).values["loss"]]  # the first one allocates
    reset_peak()
    seconds, cpu = [], time.process_time()
    for _ in range(size.steps):
        began = time.perf_counter()
        losses.append(trainer.step(rows).values["loss"])
        seconds.append(time.perf_counter() - began)
    line = {
        "parameters": sum(math.prod(each.shape) for each in trainer.parameters()),
        "losses": losses,
        "cpu_s": (time.process_time() - cpu) / size.steps,
        "wall_s": statistics.median(seconds),
        "load_bytes": loaded,
        "step_bytes": memory("VmHWM") - base,
    }
    del trainer
    gc.collect()
    return line


def create(model: Path, variant: Variant, size: Size, ranks: Any) -> tuple[Any, Any]:
    """One rank of the trainer, and its micro-batches."""
    import numpy as np

    from lockstep.config.recipes import SFTConfig
    from lockstep.data.forest_builder import forest_from_documents
    from lockstep.data.mini_batches import pack
    from lockstep.data.samples import Document
    from lockstep.train.trainer_kinds import trainer_kind

    role = SFTConfig.model_validate(
        {
            "recipe": "sft",
            "name": "benchmark",
            "steps": 100,
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"path": "unused.jsonl"},
            # a larger eps: else AdamW turns gradients that are only rounding errors into full updates
            "trainer": {**variant.trainer, "ranks": RANKS, "threads": 1, "optimizer": {"lr": 1e-4, "eps": 1e-5}},
        }
    ).policy
    draw, count = np.random.default_rng(5), RANKS * MICROBATCHES
    tokens = draw.integers(10, 60, (count, size.tokens)).astype(np.int32)
    documents = [Document(f"0:{n}", n, row, np.arange(row.size) > 0) for n, row in enumerate(tokens)]
    batch = pack(forest_from_documents(documents), RANKS, size.tokens, "forest")
    (whole,) = batch.minibatches(1, None, role.objective)
    return trainer_kind(role).create(role, ranks, 1), whole.by_rank[ranks.rank]


def reset_peak() -> None:
    """Sets the peak of this process's resident memory to what it is now. See proc(5), `clear_refs`."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(name: str) -> int:
    """Bytes, `VmRSS` (now) or `VmHWM` (the peak), of this process."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:"))


def measure_all(variants: Sequence[str], repeats: int, size: Size, out: Path) -> Sequence[Line]:
    """Appends a line of JSON per repeat and variant to the record, which begins anew; returns all lines."""
    from benchmarks.runner import write
    from lockstep.models.tiny_model import TinyModel, make_tiny

    lines: list[dict[str, Any]] = []
    out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as scratch:
        for name, each in (("small", SMALL), ("model", size)):
            make_tiny(Path(scratch) / name, replace(TinyModel(), **each.sizes, max_length=1024, seed=1))
        for repeat in range(repeats):
            load = os.getloadavg()[0]
            first = repeat * len(variants) // repeats  # in another order each time
            order = [*variants[first:], *variants[:first]]
            work = {"ranks": RANKS, "microbatches": MICROBATCHES, "tokens": size.tokens, "steps": size.steps}
            for name, found in zip(order, measure(Path(scratch), order, size), strict=True):
                lines.append({"variant": name, "repeat": repeat, **work, **found, "load": load})
                check_losses(lines[0], lines[-1])
                write(out, lines[-1])
    return lines


def check_losses(first: Line, line: Line) -> None:
    """Raises SystemExit if a trainer's losses are not those of the first."""
    for step, (own, of) in enumerate(zip(line["losses"], first["losses"], strict=True), start=1):
        if not abs(own - of) <= TOLERANCE:  # nor is nan
            raise SystemExit(f"{line['variant']} computes another loss than {first['variant']}: {own} in step {step}")


def table(lines: Sequence[Line]) -> list[str]:
    """Medians over the repeats; ratios are medians of those within a repeat, to FSDP2."""
    by_variant = {name: [line for line in lines if line["variant"] == name] for name in VARIANTS}
    base = by_variant["fsdp2"]
    out = markdown_head("trainer", "CPU s a step", "/ FSDP2", "MB while loading", "MB while training", "/ FSDP2")
    for name, of in by_variant.items():
        if of:
            cells = [
                f"{statistics.median(line['cpu_s'] for line in of):.2f}",
                _ratio(of, base, "cpu_s"),
                f"{statistics.median(line['load_bytes'] for line in of) / 1e6:.0f}",
                f"{statistics.median(line['step_bytes'] for line in of) / 1e6:.0f}",
                _ratio(of, base, "step_bytes"),
            ]
            out.append(markdown(VARIANTS[name].title, *cells))
    first, loads = base[0], [line["load"] for line in lines]
    apart = max(abs(a - b) for line in lines for a, b in zip(line["losses"], first["losses"], strict=True))
    return [
        *out,
        "",
        f"Medians of {count_noun(len(base), 'repeat')} of {count_noun(first['steps'], 'step')} of a model with "
        f"{first['parameters'] / 1e6:.1f} million parameters ({4 * first['parameters'] / 1e6:.0f} MB) on "
        f"{count_noun(first['ranks'], 'gloo rank')}, {first['microbatches']} micro-batches of {first['tokens']} tokens "
        f"per rank and step, float32, one thread, load average {min(loads):.1f} to {max(loads):.1f}. CPU time is that "
        f"of both ranks, memory the peak of what the model adds to a rank. Losses are at most {apart:.0e} apart.",
    ]


def _ratio(of: Sequence[Line], base: Sequence[Line], name: str) -> str:
    return f"{statistics.median(own[name] / first[name] for own, first in zip(of, base, strict=False)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path, help=f"default: {RESULTS.relative_to(ROOT)}, with --quick a file in build")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/deepspeed.md")
    parser.add_argument("--quick", action="store_true", help="one repeat of a small model")
    options = parser.parse_args()
    if "fsdp2" not in options.variants:
        parser.error("--variants: the others are compared with fsdp2, which must be one of them")
    repeats, size, out = (1, SMALL, QUICK) if options.quick else (options.repeats, FULL, RESULTS)
    found = table(measure_all(options.variants, repeats, size, options.out or out))
    if options.docs:
        into_page(PAGE, "\n".join(found) + "\n", MARKERS)
    print("\n".join(found))


if __name__ == "__main__":
    main()
