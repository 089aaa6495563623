"""Writes the tables of docs/weight-sync.md, engines.md, ppo.md, recorder.md, run-folder.md, deepspeed.md,
performance.md and endurance.md from the committed results: `python -m benchmarks.docs_tables`.

Needs none of the measured programs. A test compares the pages with the results. The goals were set before anything was
measured; those that are not met are listed below each table.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cluster_simulation, deepspeed_beside_fsdp2, response_length
from benchmarks.comparison_table import markdown, markdown_head
from benchmarks.docs_markers import into_page
from benchmarks.endurance.summary import summary as endurance_summary
from benchmarks.ppo_beside_grpo import table as ppo_table
from benchmarks.recorder import table as recorder_table
from benchmarks.run_folders import table as run_folders_table
from benchmarks.scale import table as scale_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """A measured ratio and its goal."""

    what: str
    measured: float
    goal: float
    is_upper_bound: bool = False

    @property
    def met(self) -> bool:
        return self.measured <= self.goal if self.is_upper_bound else self.measured >= self.goal

    @property
    def limit(self) -> str:
        return f"{'at most ' if self.is_upper_bound else ''}{self.goal:g}"

    @property
    def cell(self) -> str:
        return f"{self.limit}{'' if self.met else ' (not met)'}"


def weights(lines: Sequence[Row]) -> list[str]:
    """The table of `benchmarks.weights`: medians, and medians of the speed relative to the bare copy in the same
    repeat."""
    out = markdown_head("model", "what", "ms", "GB/s", "speed / bare", "goal")
    goals: list[Goal] = []
    for size in dict.fromkeys(line["size"] for line in lines):
        for part, bare, ways in (("host", "memcpy", HOST), ("nodes", "broadcast", NODES)):
            found = [line for line in lines if line["size"] == size and line["part"] == part]
            for way in ways if found else ():
                took = [sum(line[name] for name in way.parts) for line in found]
                ratio = statistics.median(
                    way.times * line[bare] / each for line, each in zip(found, took, strict=True)
                )  # fmt: skip
                seconds = statistics.median(took)
                rate = found[0]["bytes"] * way.times / seconds / 1e9
                goal = Goal(f"{size}, {way.title}", ratio, way.goal) if way.goal and size == "100M" else None
                goals += [goal] if goal else []
                cells = f"{seconds * 1e3:.1f}", f"{rate:.2f}", f"{ratio:.2f}", goal.cell if goal else ""
                out.append(markdown(size, way.title, *cells))
    return [*out, "", *verdicts(goals), "", _about(lines)]


@dataclass(frozen=True, slots=True)
class Way:
    """A row of the table: the sum of some measured times."""

    title: str
    parts: tuple[str, ...]
    times: int = 1
    """How often the row moves the bytes: it is compared with as many bare copies."""
    goal: float | None = None
    """The goal for the model of 100 M parameters."""


HOST = (
    Way("bare memcpy, one thread", ("memcpy",)),
    Way("a rank writes, sampled checksums", ("write_sampled", "commit_sampled")),
    Way("the builtin engine loads, sampled checksums", ("load_sampled",)),
    Way("both, compared with two memcpys", ("write_sampled", "commit_sampled", "load_sampled"), 2, 0.6),
    Way("both, complete checksums", ("write_complete", "commit_complete", "load_complete"), 2),
    Way("a reader that only verifies and copies", ("take_sampled",)),
)
NODES = (
    Way("bare gloo broadcast to two", ("broadcast",)),
    Way("bare, in buckets of 64 MiB", ("broadcast_64",)),
    Way("publish to two nodes, sampled", ("gloo",), 1, 0.7),
    Way("publish to two nodes, complete", ("complete",)),
    Way("publish to two nodes, delta, a tenth changed", ("delta",)),
)


def update(rows: Sequence[Row]) -> list[str]:
    """The table of `benchmarks.vllm_engine update`."""
    out = markdown_head(
        "parameters", "memcpy", "Lockstep's part, before vLLM's", "in memcpys", "full update",
        "`reload_weights` from a RAM disk", "reload / update", "with writing its files",
    )  # fmt: skip
    goals = []
    for row in rows:
        part = Goal(f"{row['model']}, Lockstep's part in memcpys", row["write/copy"], 2, is_upper_bound=True)
        full = Goal(f"{row['model']}, `reload_weights` / update", row["reload/update"], 1.3)
        goals += [part, full]
        ms = {name: f"{row[f'{name} ms']:.3g} ms" for name in ("copy", "write", "update", "reload", "reload+save")}
        cells = ms["copy"], ms["write"], f"{part.measured:.2f}", ms["update"], ms["reload"], f"{full.measured:.2f}"
        out.append(markdown(row["model"], *cells, ms["reload+save"]))
    goal = "Goals: Lockstep's part at most 2 memcpys, the update 1.3 times as fast as `reload_weights`."
    return [*out, "", f"{goal} {' '.join(verdicts(goals))}", "", _about(rows)]


def generate(rows: Sequence[Row]) -> list[str]:
    """The table of `benchmarks.vllm_engine generate`. The speed over `LLM`'s defaults is limited to what `LLM` itself
    has with the engine's arguments, in the same run: on a CPU an engine that loads weights cannot use compiled code."""
    out = markdown_head(
        "parameters",
        "work",
        "Lockstep",
        "speed / `LLM`, same arguments",
        "speed / `LLM`, its defaults",
        "`LLM`, same arguments / its defaults",
        "goal",
    )
    goals = []
    for row in rows:
        same = row["generate median"] / row["ours median"]
        own = row["defaults median"] / row["ours median"] if "defaults median" in row else None
        what = f"{row['model']} {row['work']}"
        reached = [Goal(f"{what}, same arguments", same, 0.95)]
        reached += [] if own is None else [Goal(f"{what}, its defaults", own, 0.95)]
        goals += reached
        met = "0.95" if all(goal.met for goal in reached) else "0.95 (not met)"
        beside_defaults = ("not measured", "") if own is None else (f"{own:.2f}", f"{own / same:.2f}")
        cells = f"{row['ours median']:.2f} s", f"{same:.2f}", *beside_defaults, met
        out.append(markdown(row["model"], row["work"], *cells))
    return [*out, "", *verdicts(goals), "", _about(rows)]


def builtin(rows: Sequence[Row]) -> list[str]:
    """The table of `benchmarks.vllm_engine builtin`."""
    out = markdown_head("parameters", "work", "builtin", "vLLM", "speed of builtin / vLLM")
    for row in rows:
        ours, theirs = row["builtin median"], row["vllm median"]
        out.append(markdown(row["model"], row["work"], f"{ours:.2f} s", f"{theirs:.2f} s", f"{theirs / ours:.2f}x"))
    return [*out, "", _about(rows)]


def verdicts(goals: Iterable[Goal]) -> list[str]:
    """A line that lists the goals that are not met."""
    missed = [f"{goal.what} {goal.measured:.2f}, goal {goal.limit}" for goal in goals if not goal.met]
    return [f"**Goal not met**: {'; '.join(missed)}." if missed else "All goals are met."]


def _about(rows: Sequence[Row]) -> str:
    """The number of repeats, and the load of the machine if the results have it."""
    loads = [row["load"] for row in rows if "load" in row]
    busy = f", load average {min(loads):.1f} to {max(loads):.1f}" if loads else ""
    repeats = [row.get("repeats", row.get("repeat")) for row in rows if "repeats" in row or "repeat" in row]
    often = f" of {max(repeats)} repeats" if repeats else ""
    return f"Medians{often}, one thread, float32{busy}."


Table = tuple[str, str, str, Callable[[Any], list[str]]]
TABLES: tuple[Table, ...] = (
    ("weight-sync.md", "weights", "weights.jsonl", weights),
    ("engines.md", "builtin", "vllm-builtin.json", builtin),
    ("engines.md", "generate", "vllm-generate.json", generate),
    ("engines.md", "update", "vllm-update.json", update),
    ("ppo.md", "ppo", "ppo.jsonl", ppo_table),
    ("recorder.md", "cost", "recorder.json", recorder_table),
    ("ppo.md", "lengths", response_length.RESULTS.name, response_length.table),
    ("run-folder.md", "run_folders", "run_folders.jsonl", run_folders_table),
    ("deepspeed.md", "fsdp2", deepspeed_beside_fsdp2.RESULTS.name, deepspeed_beside_fsdp2.table),
    ("endurance.md", "endurance", "endurance.jsonl", endurance_summary),
    ("performance.md", "scale", "scale.json", scale_table),
    ("endurance.md", "simulation", cluster_simulation.RESULTS.name, cluster_simulation.table),
)
"""Page, name of its markers, file of results, and the function that makes the table."""


def read(path: Path) -> Any:
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def main() -> None:
    for page, name, results, table in TABLES:
        into_page(ROOT / "docs" / page, "\n".join(table(read(RESULTS / results))) + "\n", name)


if __name__ == "__main__":
    main()
