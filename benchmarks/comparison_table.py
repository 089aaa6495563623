"""Builds the comparison table from measurements. Pure functions."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.workloads import Side, Work

Line = Mapping[str, Any]
"""One line of the record: a repeat of a side, details of stages, a row of generation, floors."""

ENGINE, TRAINER = "engine-0", "policy-0"
OWN_WORK = {"rollout": ENGINE, "train": TRAINER}
"""The process that does the work of a stage that TRL has as well; all other work is Lockstep's overhead."""


@dataclass(frozen=True, slots=True)
class Row:
    """One side of one workload: medians over its repeats."""

    side: str
    repeats: int
    cpu_s: float
    """Per step."""
    wall_s: float
    spread: float
    """Largest minus smallest CPU time, over the median."""
    rate: float
    """Completions, or real tokens, per CPU second."""
    peak_bytes: int


def row(work: Work, side: Side, lines: Sequence[Line]) -> Row | None:
    """The medians of a side; None if it was not measured."""
    mine = [line for line in lines if line.get("work") == work.name and line.get("side") == side.name]
    if not mine:
        return None
    cpu = [line["cpu_s"] / line["steps"] for line in mine]
    median = statistics.median(cpu)
    if work.kind == "sft":
        rate = statistics.median(line["tokens"] / line["cpu_s"] for line in mine)
    else:
        rate = work.completions / median
    return Row(
        side.name,
        len(mine),
        median,
        statistics.median(line["wall_s"] / line["steps"] for line in mine),
        (max(cpu) - min(cpu)) / median,
        rate,
        max(line["peak_bytes"] for line in mine),
    )


def comparison(works: Sequence[Work], lines: Sequence[Line]) -> list[str]:
    """The main table: a line per peer of each workload, and per way to run Lockstep. Ratios are of rates per CPU
    second."""
    out = markdown_head(
        "workload", "against", "Lockstep", "peer", "Lockstep / peer", "goal", "repeats (spread)", "memory"
    )
    for work in works:
        for own in (side for side in work.sides if side.program == "lockstep"):
            for side in (side for side in work.sides if side.program != "lockstep"):
                ours, theirs = row(work, own, lines), row(work, side, lines)
                if ours is not None and theirs is not None:
                    title = f"{work.title}; {own.title}" if own.title else work.title
                    goal = work.goals.get(side.name if own is work.sides[0] else f"{own.name} / {side.name}")
                    out.append(_compared(work, title, side, ours, theirs, goal))
    return out


def _compared(work: Work, title: str, side: Side, ours: Row, theirs: Row, goal: float | None) -> str:
    ratio = ours.rate / theirs.rate
    return markdown(
        title,
        side.title or side.name,
        amount(work, ours),
        amount(work, theirs),
        f"**{ratio:.2f}x**",
        "" if goal is None else f"{goal:g}x{'' if ratio >= goal else ' (not met)'}",
        f"{ours.repeats} ({ours.spread:.0%}), {theirs.repeats} ({theirs.spread:.0%})",
        f"{ours.peak_bytes / 2**20:,.0f}, {theirs.peak_bytes / 2**20:,.0f} MiB",
    )


def amount(work: Work, row: Row) -> str:
    if work.kind == "sft":
        return f"{row.rate:,.0f} tokens/CPU s"
    return f"{row.cpu_s:.2f} CPU s ({row.wall_s:.2f} s wall)"


def generation(lines: Sequence[Line], goal: float = 12.0) -> list[str]:
    """The engine compared with `generate`, from the rows of `benchmarks.generation`."""
    found = [line["generation"] for line in lines if "generation" in line]
    if not found:
        return []
    out = markdown_head(
        "generation alone", "engine", "generate", "engine / generate", "goal", "floor", "times the floor"
    )
    for each in found:
        wanted = f"{goal:g}x{'' if each['ratio'] >= goal else ' (not met)'}" if each["work"] == "p512-fixed" else ""
        out.append(
            markdown(
                each["work"],
                f"{each['tokens'] / each['engine']:,.0f} tokens/CPU s",
                f"{each['tokens'] / each['generate']:,.0f} tokens/CPU s",
                f"**{each['ratio']:.2f}x**",
                wanted,
                f"{each['floor']:.2f} CPU s",
                f"{each['engine'] / each['floor']:.2f}",
            )
        )
    return out


def floors(works: Sequence[Work], lines: Sequence[Line]) -> list[str]:
    """The two main stages of each workload compared with the matrix products of the same tokens."""
    out = markdown_head("workload", "stage", "CPU s a step", "floor", "times the floor")
    for work in works:
        known: dict[str, float] = {}
        for line in lines:
            if line.get("floors", {}).get("work") == work.name:
                known |= line["floors"]
        for stage, process in (("generation", ENGINE), ("training", TRAINER)):
            spent = process_seconds(work, process, lines)
            if spent is not None and stage in known:
                floor = known[stage]
                out.append(markdown(work.title, stage, f"{spent:.3f}", f"{floor:.3f}", f"{spent / floor:.2f}"))
    return out if len(out) > 2 else []


def process_seconds(work: Work, process: str, lines: Sequence[Line]) -> float | None:
    """Median CPU seconds per step of one of Lockstep's processes, with default settings."""
    found = [
        line["by_process"][process] / line["steps"]
        for line in lines
        if (line.get("work"), line.get("side")) == (work.name, work.sides[0].name) and process in line["by_process"]
    ]
    return statistics.median(found) if found else None


def overhead(work: Work, lines: Sequence[Line], goal: float = 0.05) -> list[str]:
    """The cost of a step besides generation and training, by part, from the details of its stages."""
    details = [line["ms"] for line in lines if line.get("details") == work.name]
    if not details:
        return []
    parts = overhead_parts(details[-1])
    step_ms = sum(sum(each.values()) for each in details[-1].values())
    out = markdown_head("part", "CPU ms a step", f"share of the step ({step_ms:,.0f} ms)")
    for name, ms in parts.items():
        out.append(markdown(name, f"{ms:.1f}", f"{ms / step_ms:.2%}"))
    total = sum(parts.values())
    verdict = "" if total <= goal * step_ms else ", not met"
    out.append(markdown(f"**all** (goal: under {goal:.0%}{verdict})", f"**{total:.1f}**", f"**{total / step_ms:.2%}**"))
    return out


def overhead_parts(details: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Milliseconds by part, largest first, without the engine's decoding and the trainer's step. The agent's time is
    one part, whatever the stage."""
    parts: dict[str, float] = {}
    for stage, each in details.items():
        for process, ms in each.items():
            if process == OWN_WORK.get(stage):
                continue
            part = part_of(stage, process)
            parts[part] = parts.get(part, 0.0) + ms
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def part_of(stage: str, process: str) -> str:
    """The name of the part to which the time of a process in a stage belongs."""
    if process == "agent":
        return "node agent"
    if process.startswith("scorer") and stage != "reward":
        return "scorer, idle"
    if process in (ENGINE, TRAINER) and stage != "publish":
        return f"{'engine' if process == ENGINE else 'trainer'}, idle and talking"
    return {
        "rollout": "controller: requests and completions",
        "reward": "reward: controller and scorer",
        "ledger": "ledger: the step's rollouts",
        "pack": "controller: packing",
        "after logprobs": "controller: advantages",
        "logprobs": "controller: advantages",
        "train": "controller: mini-batches to the trainer",
        "after train": "ledger: commit",
        "publish": "weight sync: trainer, controller, engine",
        "after publish": "metrics and sinks",
    }.get(stage, "controller: rest")


def markdown_head(*cells: str) -> list[str]:
    return [markdown(*cells), markdown(*("---" for _ in cells))]


def markdown(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
