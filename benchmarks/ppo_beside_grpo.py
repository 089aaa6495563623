"""PPO beside GRPO: CPU time of a step by stage and role, of the same model, prompts, completions and ranks, in turns.

Both recipes run unchanged (`benchmarks.lockstep_side`), and every completion has the same length. What PPO does in
addition is the critic's: a forward pass for the values of all states, and a training step, which continues that pass
(`critic.kept_microbatches` is the number of the step's rows). Neither has a KL penalty.
"""

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.comparison_table import Line, markdown, markdown_head
from benchmarks.runner import Match, Tell, write
from benchmarks.workloads import MODEL, TOY, WORKS, Side, Work, quick
from lockstep.base.text import count_noun

RAW = "ppo.jsonl"
GOAL = 2.1
"""The most that policy and critic of PPO may cost together, in units of what GRPO's policy costs in the same stages."""
LEARNING = ("logprobs", "train")
"""The stages in which trained roles compute."""
TITLES = {
    "rollout": "rollout: generation",
    "reward": "reward",
    "ledger": "ledger: the step's rollouts",
    "pack": "pack",
    "logprobs": "logprobs: values of the critic",
    "train": "train: optimizer steps",
    "publish": "publish: weights to the engine",
}
SIDES = (
    Side("grpo", "lockstep", {}, 2),
    Side(
        "ppo",
        "lockstep",
        {
            "recipe": "ppo",
            "loss": {"kl": {"coefficient": 0.0}},
            "critic": {
                "kept_microbatches": 3,
                "trainer": {"threads": 1, "optimizer": {"lr": 1e-6}, "max_grad_norm": 1.0},
            },
        },
        2,
    ),
)
WORK = replace(WORKS["fixed"], name="ppo", sides=SIDES, goals={}, details=0)


def measure(folder: Path, repeats: int, tell: Tell, small: bool = False) -> list[Line]:
    """Appends a line of JSON per repeat and recipe to `ppo.jsonl` in the folder; returns all lines."""
    record = folder / RAW
    work, model = (quick_work(), TOY) if small else (WORK, MODEL)
    lines: list[Line] = []
    with (
        tempfile.TemporaryDirectory(prefix="lockstep-benchmark-") as scratch,
        Match(work, repeats, Path(scratch), tell, model) as match,
    ):
        for repeat in range(repeats):
            for side in work.sides:
                load = os.getloadavg()[0]
                stages = match.stages(side, side.steps)
                line = {"recipe": side.name, "repeat": repeat, "steps": side.steps, "load": load, "ms": stages}
                write(record, line)
                lines.append(line)
                tell(f"{side.name} {repeat + 1}/{repeats}: {sum(by_role(line).values()):.0f} CPU ms a step")
    return lines


def quick_work() -> Work:
    return replace(quick(WORK), sides=tuple(replace(side, steps=1, warm=False) for side in SIDES))


def role_of(process: str) -> str:
    """The role of a process, such as `policy` of `policy-0`."""
    return process.rpartition("-")[0] or process


def stage_of(name: str) -> str:
    """The stage to which a stretch of a step belongs: what follows one, until the next begins, is `between stages`."""
    return name if name in TITLES else "between stages"


def by_stage(line: Line) -> dict[str, dict[str, float]]:
    """CPU milliseconds per step by stage and role."""
    found: dict[str, dict[str, float]] = {}
    for name, processes in line["ms"].items():
        roles = found.setdefault(stage_of(name), {})
        for process, ms in processes.items():
            roles[role_of(process)] = roles.get(role_of(process), 0.0) + ms
    return found


def by_role(line: Line) -> dict[str, float]:
    """CPU milliseconds per step by role."""
    found: dict[str, float] = {}
    for roles in by_stage(line).values():
        for role, ms in roles.items():
            found[role] = found.get(role, 0.0) + ms
    return found


def learning(line: Line, *roles: str) -> float:
    """CPU milliseconds per step of trained roles in the stages in which they compute."""
    stages = by_stage(line)
    return sum(stages.get(stage, {}).get(role, 0.0) for stage in LEARNING for role in roles)


def table(lines: Sequence[Line]) -> list[str]:
    """Medians over the repeats; ratios are medians of those within a repeat."""
    mine = [line for line in lines if "recipe" in line]
    grpo, ppo = ([line for line in mine if line["recipe"] == name] for name in ("grpo", "ppo"))
    out = markdown_head("stage", "GRPO, CPU ms a step", "PPO, CPU ms a step", "PPO / GRPO")
    for stage in (*TITLES, "between stages"):
        each = [[by_stage(line).get(stage, {}) for line in of] for of in (grpo, ppo)]
        out.append(markdown(TITLES.get(stage, stage), *(_roles(of) for of in each), _ratio(*map(_sums, each))))
    totals = [[by_role(line) for line in of] for of in (grpo, ppo)]
    out.append(markdown("**all**", *(_roles(of) for of in totals), _ratio(*map(_sums, totals))))
    out += ["", *markdown_head("policy and critic, in logprobs and train", "CPU ms a step", "against GRPO's policy")]
    base = [learning(line, "policy") for line in grpo]
    out.append(markdown("GRPO's policy", f"{statistics.median(base):.0f}", "1"))
    for title, roles in (("PPO's policy", ("policy",)), ("PPO's critic", ("critic",)), ("both", ("policy", "critic"))):
        spent = [learning(line, *roles) for line in ppo]
        ratio = statistics.median(own / of for own, of in zip(spent, base, strict=True))
        goal = f" (goal: at most {GOAL:g}{'' if ratio <= GOAL else ', not met'})" if len(roles) == 2 else ""
        out.append(markdown(title, f"{statistics.median(spent):.0f}", f"{ratio:.2f}{goal}"))
    loads = [line["load"] for line in mine]
    how = f"Medians of {len(ppo)} repeats of {count_noun(ppo[0]['steps'], 'step')}, one thread in each process, float32"
    return [*out, "", f"{how}, load average {min(loads):.1f} to {max(loads):.1f}."]


def _sums(lines: Sequence[Mapping[str, float]]) -> list[float]:
    return [sum(line.values()) for line in lines]


def _ratio(base: Sequence[float], other: Sequence[float]) -> str:
    found = [own / of for of, own in zip(base, other, strict=True) if of >= 0.5]
    return f"{statistics.median(found):.2f}" if found else ""


def _roles(lines: Sequence[Mapping[str, Any]]) -> str:
    """The sum, and the roles with at least one percent of it."""
    names = dict.fromkeys(name for line in lines for name in line)
    medians = {name: statistics.median(line.get(name, 0.0) for line in lines) for name in names}
    total = statistics.median(_sums(lines))
    large = [name for name, ms in medians.items() if ms >= max(0.5, 0.01 * total)]
    large.sort(key=lambda name: -medians[name])
    return f"{total:.0f}" + (f" ({', '.join(f'{name} {medians[name]:.0f}' for name in large)})" if large else "")
