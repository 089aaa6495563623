"""How long commands take on the folder of a long run, how long a large dataset takes to open, and the memory of both.

    python -m benchmarks.run_folders                          100,000 steps and 1,000,000 prompts: three minutes
    python -m benchmarks.run_folders --steps 1000 --rows 10000
    python -m benchmarks.run_folders --out benchmarks/results/cpu/run_folders.jsonl --label after

Makes the folder of a GRPO run (a row of 58 metrics and a commit per step, 16 prompts per step, an evaluation and
samples every 20 steps, some thousand events, metrics.jsonl, two checkpoints), and a dataset as JSONL and as Parquet.
Each operation is measured in a process of its own, without the seconds for imports; the memory is what the operation
added to the process at its peak. `--label` names the state of the code, of which the table has a column each.
"""

import argparse
import json
import os
import random
import resource
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparison_table import markdown, markdown_head
from lockstep.base.filesystems import is_on_local_disk
from lockstep.config.data import DatasetConfig
from lockstep.config.loader import check_config
from lockstep.data.datasets import load_rows
from lockstep.data.row_lengths import LengthLimit
from lockstep.data.sample_sources import PromptSource
from lockstep.ledger import json_values
from lockstep.ledger.ledger import Ledger

PROMPTS_PER_STEP = 16
SAMPLED_EVERY = 20
MODEL = "model"
"""The folder of the tiny model beside the run."""
OPERATIONS = ("top", "explain", "report", "resume", "fork")
DATASETS = ("jsonl", "parquet")


def make_run(folder: Path, steps: int, config: Mapping[str, Any]) -> Path:
    """Makes the folder of a run that was killed after so many steps, with checkpoints of the last two hundred."""
    run = folder / "long"
    with Ledger.create(run, dict(config)):
        pass
    index = sqlite3.connect(run / "ledger.sqlite")
    began = time.time() - steps * 10.0
    rows = ((step, json_values.dumps(metrics_row(step)), 1, began + step * 10) for step in range(steps))
    index.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
    stats = {name.removeprefix("policy/"): value for name, value in metrics_row(0).items() if "policy" in name}
    commits = ((step, json_values.dumps(stats), 1, began + step * 10) for step in range(steps))
    index.executemany("INSERT INTO commits VALUES (?, ?, ?, ?)", commits)
    stored = (
        (step, step, f"{step:064x}", 50_000, PROMPTS_PER_STEP, PROMPTS_PER_STEP * 8, 1, began + step * 10, 1)
        for step in range(steps)
    )
    index.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", stored)
    count = steps * PROMPTS_PER_STEP
    uids = ((f"0:{number}", number // PROMPTS_PER_STEP) for number in range(count))
    index.executemany("INSERT INTO prompts VALUES (?, ?)", uids)
    samples = json_values.dumps([sample(number) for number in range(4)])
    sampled = range(SAMPLED_EVERY - 1, steps, SAMPLED_EVERY)
    index.executemany("INSERT INTO samples VALUES (?, ?, 1, ?)", ((step, samples, began) for step in sampled))
    metrics = json_values.dumps({"eval/exact_match": 0.5, "eval/reward_mean": 0.4, "eval/length_mean": 200.0})
    index.executemany(
        "INSERT INTO evaluations VALUES (?, ?, ?, 1, ?)", ((step, metrics, samples, began) for step in sampled)
    )
    start = json_values.dumps({"rows": count, "row_counts": [count], "compile": {}})
    index.execute("INSERT INTO events (kind, fields, generation, at) VALUES ('start', ?, 1, ?)", (start, began))
    notices = ((json_values.dumps({"text": "engine-0 restarted"}), began + number) for number in range(steps // 20))
    index.executemany("INSERT INTO events (kind, fields, generation, at) VALUES ('note', ?, 1, ?)", notices)
    for step in (max(steps - 201, 0), max(steps - 101, 1)):
        (run / "checkpoints" / f"{step + 1:08d}").mkdir()
        path = f"checkpoints/{step + 1:08d}"
        index.execute("INSERT INTO checkpoints VALUES (?, ?, 0.5, 1, ?)", (step, path, began))
    index.commit()
    index.close()
    with Ledger.resume(run) as ledger:  # as the run itself does with each checkpoint
        ledger.compact(steps)
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step + 1, **metrics_row(step)}) + "\n" for step in range(steps))
    return run


def metrics_row(step: int) -> dict[str, float]:
    """58 metrics, as a GRPO run has them."""
    noise = random.Random(step)
    names = [f"policy/metric_{number}" for number in range(24)] + [f"rollout/metric_{number}" for number in range(10)]
    names += [f"reward/term_{number}/mean" for number in range(4)] + [f"time/stage_{number}_s" for number in range(8)]
    names += ["reward/mean", "reward/std", "policy/loss", "policy/kl", "policy/entropy", "policy/grad_norm"]
    names += ["rollout/length_mean", "rollout/tokens", "throughput/tokens_per_s", "time/step_s", "policy/lr"]
    return {name: noise.random() for name in names} | {"tokens/total": float(step * 20_000)}


def sample(number: int) -> dict[str, Any]:
    """A completion as the ledger keeps it."""
    return {"prompt": "p" * 800, "completion": "c" * 2000, "answer": "42", "reward": 0.5, "uid": f"0:{number}"}


def make_datasets(folder: Path, rows: int) -> dict[str, Path]:
    """A dataset of prompts and answers in each format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = {"jsonl": folder / "prompts.jsonl", "parquet": folder / "prompts.parquet"}
    with made["jsonl"].open("w") as file:
        file.writelines(json.dumps(each) + "\n" for each in prompts(rows))
    schema = pa.schema([("prompt", pa.string()), ("answer", pa.string())])
    with pq.ParquetWriter(made["parquet"], schema) as writer:
        for begin in range(0, rows, 50_000):
            part = list(prompts(min(50_000, rows - begin), begin))
            writer.write_table(pa.Table.from_pylist(part, schema))
    return made


def prompts(count: int, begin: int = 0) -> Iterable[dict[str, str]]:
    for number in range(begin, begin + count):
        text = f"Question {number}: a train leaves at {number % 24} and travels {number % 977} km. " * 6
        yield {"prompt": text, "answer": str(number % 977)}


# Operations. Each returns what is measured, after everything is imported.


def top(folder: Path) -> Callable[[], Any]:
    from lockstep.cli.top import describe_ended

    return lambda: describe_ended(folder / "long")


def explain(folder: Path) -> Callable[[], Any]:
    from lockstep.doctor.runs.run_outcome import judge_run, read_record

    return lambda: judge_run(read_record(folder / "long"), None)


def report(folder: Path) -> Callable[[], Any]:
    import matplotlib.figure  # noqa: F401  # not a part of the measured time

    from lockstep.report.html_report import write_report

    def work() -> None:
        with Ledger.reader(folder / "long") as ledger:
            write_report(ledger)

    return work


def resume(folder: Path) -> Callable[[], Any]:
    """What a resumed run reads and writes until its first step, except for models and data."""
    from lockstep.config.trainer import CheckpointConfig
    from lockstep.run.checkpoint_manager import CheckpointManager
    from lockstep.run.evaluation.evaluator import Evaluator
    from lockstep.run.planning.resumed_run import earlier_starts, resumed_config
    from lockstep.run.planning.working_folder import working_folder
    from lockstep.run.run_reporter import RunReporter

    def work() -> None:
        run: Path = folder / "long"
        working_folder(run)
        config, _ = resumed_config(None, run, ())
        earlier_starts(run)
        with Ledger.resume(run, config.model_dump(mode="json")) as ledger:
            done = ledger.steps_done()
            reporter = RunReporter(config, run, ledger, "none")
            CheckpointManager(CheckpointConfig(), run / "checkpoints", ledger, None)  # type: ignore[arg-type]
            Evaluator([], ledger, reporter)
            reporter.begin(done)
            reporter.close()

    return work


def fork(folder: Path) -> Callable[[], Any]:
    """What a new run reads of its parent."""
    from lockstep.run.planning.parent_run import choose_checkpoint, parent_config, split_parent

    def work() -> None:
        run, step = split_parent(f"{folder / 'long'}@last")
        check_config(parent_config(run), str(run))
        with Ledger.reader(run) as ledger:
            choose_checkpoint(ledger.checkpoints(), step)

    return work


def open_prompts(path: Path) -> Callable[[], Any]:
    """A dataset as a run opens it, and the prompts of a step in a shuffled epoch."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent / MODEL)
    config = DatasetConfig(path=str(path))

    def work() -> None:
        source = PromptSource(load_rows(config), config, tokenizer, 0, LengthLimit(4096))
        assert len(source.take(0, PROMPTS_PER_STEP)) == PROMPTS_PER_STEP

    return work


def measure(work: Callable[[], Any]) -> dict[str, float]:
    """Seconds of one call, and MiB that it added to the process at its peak: anonymous memory, not mapped files."""
    peak, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak.append(max(peak.pop(), anonymous()))

    before = peak[0]
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began, cpu = time.monotonic(), time.process_time()
    work()
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    done.set()
    watcher.join(1)
    return {
        "seconds": round(seconds, 3),
        "cpu_s": round(cpu, 3),
        "mib": round(max(peak[0] - before, 0) / 2**20, 1),
        "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def anonymous() -> int:
    """Bytes of this process's memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def measured(operation: str, folder: Path, path: Path | None = None) -> dict[str, float]:
    """Measures an operation in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.run_folders", "--measure", operation, str(path or folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{operation}: {done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """One row per operation and size; columns for each label."""
    labels = list(dict.fromkeys(line["label"] for line in lines))
    out = markdown_head("what", *(f"{label}: {unit}" for label in labels for unit in ("s", "MiB")))
    for what in dict.fromkeys(line["what"] for line in lines):
        cells = []
        for label in labels:
            found = [line for line in lines if line["what"] == what and line["label"] == label]
            for key, digits in (("seconds", 1), ("mib", 0)):
                cells.append(f"{statistics.median(each[key] for each in found):,.{digits}f}" if found else "")
        out.append(markdown(what, *cells))
    loads = [line["load"] for line in lines if line["load"] is not None]
    return [*out, "", f"{lines[-1]['cores']} cores, load average {min(loads):.1f} to {max(loads):.1f}."]


def config_of(folder: Path, data: Path, steps: int) -> dict[str, Any]:
    """A GRPO run with the dataset, longer than the steps that it has done."""
    config = {
        "recipe": "grpo", "name": "long", "folder": str(folder), "steps": steps + 100,
        "model": {"path": str(folder / MODEL)}, "data": {"path": str(data)}, "prompts_per_step": PROMPTS_PER_STEP,
        "reward": {"terms": [{"kind": "exact_match"}]}, "report": {"tensorboard": False, "console": False},
    }  # fmt: skip
    return check_config(config, "the benchmark").model_dump(mode="json")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--label", default="now")
    parser.add_argument("--only", nargs="*", default=(*OPERATIONS, *DATASETS), choices=(*OPERATIONS, *DATASETS))
    parser.add_argument("--folder", type=Path, help="where the run and the dataset are made, and kept")
    parser.add_argument("--out", type=Path, help="adds the results to this file")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.measure:
        name, path = options.measure
        found = open_prompts(Path(path)) if name in DATASETS else globals()[name](Path(path))
        print(json.dumps(measure(found)))
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-folders-") as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        lines = list(run_all(folder, options))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    print("\n".join(table(lines)))


def run_all(folder: Path, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Makes what is missing in the folder, and measures."""
    from lockstep.models.tiny_model import TinyModel, make_tiny

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / MODEL).exists():
        make_tiny(folder / MODEL, TinyModel())
    data = {name: folder / f"prompts.{name}" for name in DATASETS}
    if not all(path.exists() for path in data.values()):
        data = make_datasets(folder, options.rows)
    if not (folder / "long").exists():
        make_run(folder, options.steps, config_of(folder, data["jsonl"], options.steps))
    local = is_on_local_disk(folder)
    for name in options.only:
        if name in OPERATIONS:
            copy = folder / "measured"
            shutil.rmtree(copy, ignore_errors=True)
            copy.mkdir()
            subprocess.run(["cp", "-a", str(folder / "long"), str(folder / MODEL), str(copy)], check=True)
            found, what = measured(name, copy), f"{name}, {options.steps:,} steps"
        else:
            found, what = measured(name, folder, data[name]), f"open {options.rows:,} prompts, {name}"
        facts = {"label": options.label, "cores": os.cpu_count(), "load": os.getloadavg()[0], "local_disk": local}
        print(f"{what}: {found}", file=sys.stderr)
        yield {"what": what, **found, **facts}


if __name__ == "__main__":
    main()
