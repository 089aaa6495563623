"""The lengths of responses under PPO with and without `bootstrap_truncated`, on a task in which a long answer is cut.

    python -m benchmarks.response_length                 three seeds of both, on two cores that were busy: 46 minutes
    python -m benchmarks.response_length --plot          the plot in docs, from the committed results

The task is that of examples/sort_data.py, but the model may write any number of `=` before the sorted digits, and a
reward of 1 is for digits that are right, however many `=` precede them. It learns from `sft.jsonl` to write 0 to 15 of
them; a completion ends at `MAX_TOKENS`, so that about half are cut before their digits are complete, and get 0.
Both settings start from that model, and have the same prompts, seeds and hyperparameters (examples/ppo_sort.yaml).
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.comparison_table import Line, markdown, markdown_head
from benchmarks.runner import LOCKSTEP, ROOT, call, train, write
from benchmarks.workloads import merged
from lockstep.base.text import count_noun
from lockstep.ledger.ledger import Ledger
from lockstep.models.tiny_model import TinyModel, make_tiny

RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "response-length.jsonl"
PLOT = ROOT / "docs" / "images" / "response-length.svg"
MODEL = TinyModel(
    alphabet="0123456789=", hidden=128, layers=2, heads=4, kv_heads=2, ffn=512, max_length=64, seed=11
)  # fmt: skip
"""The model of the README."""
LONGEST_PREFIX, MAX_TOKENS = 15, 14
"""The most `=` of the data before an answer, and the most tokens of a completion: 8 `=`, 5 digits and the end."""
SEEDS = (11, 12, 13)
SETTINGS = {"off": False, "on": True}
METRICS = {"length": "rollout/length_mean", "truncated": "rollout/truncated", "exact": "reward/mean"}
TITLES = {"length": "mean tokens of a response", "truncated": "share truncated", "exact": "exact match"}
AVERAGED = 10
"""Steps over which a number of the table is a mean."""
PPO_STEPS = 120
LIMIT_S = 1800.0


def main() -> None:
    options = _arguments()
    if options.plot:
        draw([json.loads(line) for line in RESULTS.read_text().splitlines()], PLOT)
        return
    seeds, steps = (SEEDS[:1], 6) if options.quick else (SEEDS, PPO_STEPS)
    with tempfile.TemporaryDirectory(prefix="lockstep-lengths-") as scratch:
        prepare(Path(scratch), 2 if options.quick else None)
        for seed in seeds:
            for name, bootstrap in SETTINGS.items():
                line = measure(Path(scratch), name, seed, steps, bootstrap)
                write(options.out, line)
                print(f"seed {seed}, bootstrap_truncated {name}: {_last(line)}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / "build" / "benchmark" / RESULTS.name
    parser.add_argument("--out", type=Path, default=default, help="file that gets a line of JSON per run")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps, to see that it works")
    parser.add_argument("--plot", action="store_true", help="measure nothing")
    return parser.parse_args()


def prepare(folder: Path, steps: int | None = None) -> None:
    """Makes the data and the model that has learnt to answer after 0 to 15 `=`.

    Args:
        steps: those of supervised fine-tuning; None for the example's.
    """
    make_tiny(folder / "model", MODEL)
    call([sys.executable, "examples/sort_data.py", str(folder / "data")], LOCKSTEP, LIMIT_S)
    draw_prefix = random.Random(7)
    rows = [json.loads(line) for line in (folder / "data" / "sft.jsonl").read_text().splitlines()]
    for row in rows:
        row["completion"] = "=" * draw_prefix.randint(0, LONGEST_PREFIX) + row["completion"]
    (folder / "data" / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data": {"path": str(folder / "data" / "sft.jsonl")}, "model": {"path": str(folder / "model")}}
    _train(folder, "sft_sort.yaml", {**changes, **({} if steps is None else {"steps": steps})})


def measure(folder: Path, name: str, seed: int, steps: int, bootstrap: bool) -> Line:
    """One run of PPO: the metrics of each step."""
    run = f"ppo-{name}-{seed}"
    load = os.getloadavg()[0]
    changes = {
        "name": run,
        "seed": seed,
        "steps": steps,
        "model": {"path": str(folder / "sort-sft" / "export")},
        "data": {"path": str(folder / "data" / "grpo.jsonl")},
        "reward": {"terms": [{"kind": "exact_match", "extract": "^=*([0-9]+)$"}]},
        "rollout": {"sampling": {"max_tokens": MAX_TOKENS}},
        "bootstrap_truncated": bootstrap,
        "checkpoint": {"every": 0, "export": False},
    }
    _train(folder, "ppo_sort.yaml", changes)
    with Ledger.reader(folder / run) as ledger:
        rows = [row.values for row in ledger.metrics_rows()]
    found = {key: [round(row[metric], 5) for row in rows] for key, metric in METRICS.items()}
    return {"bootstrap_truncated": bootstrap, "seed": seed, "load": load, **found}


def _train(folder: Path, example: str, changes: Mapping[str, Any]) -> None:
    """Trains an example with changes, without an evaluation."""
    base = yaml.safe_load((ROOT / "examples" / example).read_text())
    base.pop("evaluation", None)
    if example.startswith("sft"):
        base.pop("rollout", None)
    quiet = {"folder": str(folder), "report": {"console": False, "html": False, "tensorboard": False}}
    config = folder / f"{changes.get('name', base['name'])}.json"
    config.write_text(json.dumps(merged(merged(base, quiet), dict(changes))))
    train(config, LIMIT_S)


def _last(line: Line) -> str:
    return ", ".join(f"{title} {statistics.mean(line[key][-AVERAGED:]):.2f}" for key, title in TITLES.items())


def table(lines: Sequence[Line]) -> list[str]:
    """Means over the seeds and over some steps; behind them, the lowest and highest of a seed."""
    heads = [f"{title}, {name}" for title in TITLES.values() for name in SETTINGS]
    out = markdown_head("steps", *heads)
    steps = len(lines[0]["length"])
    for first in sorted({*range(0, steps, max(1, steps // 4)), max(0, steps - AVERAGED)}):
        if first + AVERAGED > steps and first:
            continue
        cells = [
            _cell([statistics.mean(line[key][first : first + AVERAGED]) for line in _of(lines, bootstrap)])
            for key in TITLES
            for bootstrap in SETTINGS.values()
        ]
        out.append(markdown(f"{first + 1} to {first + AVERAGED}", *cells))
    seeds, loads = len(_of(lines, False)), [line["load"] for line in lines]
    how = f"Means of {count_noun(seeds, 'seed')} over {AVERAGED} steps (lowest to highest seed)"
    return [*out, "", f"{how}, load average {min(loads):.1f} to {max(loads):.1f}."]


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _of(lines: Sequence[Line], bootstrap: bool) -> list[Line]:
    return [line for line in lines if line["bootstrap_truncated"] == bootstrap]


def draw(lines: Sequence[Line], path: Path) -> None:
    """Draws the metrics over steps as SVG: a thin line for each seed, and a thick one for their mean."""
    import matplotlib as mpl  # only here, so that --help and the tables are fast
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": "response length", "font.size": 9, "axes.grid": True,
             "axes.spines.top": False, "axes.spines.right": False, "grid.color": "#dddddd"}  # fmt: skip
    with mpl.rc_context(style):
        figure = Figure(figsize=(10.5, 2.9), facecolor="white", layout="constrained")
        FigureCanvasSVG(figure)
        for axes, (key, title) in zip(figure.subplots(1, len(TITLES)), TITLES.items(), strict=True):
            for (name, bootstrap), colour in zip(SETTINGS.items(), ("#3556a8", "#c2571a"), strict=True):
                curves = [line[key] for line in _of(lines, bootstrap)]
                for curve in curves:
                    axes.plot(range(1, len(curve) + 1), curve, color=colour, alpha=0.35, linewidth=0.7)
                means = [statistics.mean(values) for values in zip(*curves, strict=True)]
                label = f"bootstrap_truncated {name}"
                axes.plot(range(1, len(means) + 1), means, color=colour, linewidth=1.8, label=label)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("step")
            axes.set_ylim(0, MAX_TOKENS + 1 if key == "length" else 1.02)
        figure.axes[0].legend(frameon=False, loc="lower left", fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
