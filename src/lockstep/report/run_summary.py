"""Writes `summary.json`, the summary of a run."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lockstep.ledger import EvaluationRow, Ledger, MetricsRow
from lockstep.ledger.durable_files import replace_file
from lockstep.ledger.metric_blocks import MetricTotals
from lockstep.ledger.run_folder import SUMMARY_FILE
from lockstep.ledger.run_incidents import incidents_of

EXACT_MATCH, HELD_OUT_REWARD = "eval/exact_match", "eval/reward_mean"
MAX_ROWS = 4000
"""Most steps whose metrics a report reads: several times the width of a chart."""
PARENT_EVENT = "parent"
"""The ledger event of a new run that starts from another one's checkpoint."""
_PACKAGES = ("lockstep-rl", "torch", "transformers", "numpy", "pyarrow", "ray", "vllm", "deepspeed")


def build_summary(ledger: Ledger, exit_reason: str) -> dict[str, Any]:
    """Builds the summary of a run from its ledger. `exit_reason` is `finished`, `interrupted`, or an error."""
    config, checkpoint = ledger.config(), ledger.newest_checkpoint()
    rows, evaluations = committed_rows(ledger)
    totals = ledger.metric_totals(ledger.steps_done())
    return {
        "name": config.get("name", ledger.folder.name),
        "recipe": config.get("recipe"),
        "exit_reason": exit_reason,
        "stopped_early": early_stop(ledger),
        "steps": {"done": ledger.steps_done(), "wanted": config.get("steps")},
        **_evaluation_summary(evaluations),
        "last": rows[-1].values if rows else {},
        "tokens": total_tokens(ledger, ledger.steps_done(), totals),
        "seconds": stage_seconds(totals),
        "incidents": [each.json() for each in incidents_of(ledger.events())],
        "checkpoint": None if checkpoint is None else str(checkpoint.path),
        "parent": parent_of(ledger),
        "generation": ledger.generation,
        "versions": package_versions(),
    }


def early_stop(ledger: Ledger) -> str | None:
    """Returns why the run ended before its last step; None if it did not."""
    last = [event for event in ledger.events() if event.kind in ("start", "early_stop")][-1:]
    return str(last[0].fields["reason"]) if last and last[0].kind == "early_stop" else None


def parent_of(ledger: Ledger) -> dict[str, Any] | None:
    """Returns the run whose checkpoint a run started from: its folder, the steps in the checkpoint, whether the
    optimizer's state was taken over, and how the config differs; None if it started by itself."""
    return next((dict(event.fields) for event in ledger.events() if event.kind == PARENT_EVENT), None)


def committed_rows(ledger: Ledger) -> tuple[list[MetricsRow], list[EvaluationRow]]:
    """Returns metrics and evaluations of committed steps, without those of steps that a resumed run has not reached
    again. Of more than `MAX_ROWS` steps, returns the metrics of some, at even distances, and of the last."""
    done = ledger.steps_done()
    rows = ledger.metrics_rows(before=done, most=MAX_ROWS)
    return rows, [row for row in ledger.evaluation_metrics() if row.step < done]


def write_summary(ledger: Ledger, exit_reason: str) -> Path:
    """Writes `summary.json` into the run's folder atomically."""
    path = ledger.folder / SUMMARY_FILE
    text = json.dumps(build_summary(ledger, exit_reason), indent=2, ensure_ascii=False)
    replace_file(path, (text + "\n").encode())
    return path


def stage_seconds(totals: MetricTotals) -> dict[str, float]:
    """Returns the seconds that each stage took in all steps, from `time/<stage>_s` (`time/step_s` is the sum of
    all)."""
    return {
        name.removeprefix("time/").removesuffix("_s"): round(seconds, 3)
        for name, seconds in totals.sums.items()
        if name.startswith("time/") and name.endswith("_s") and name != "time/step_s"
    }


def total_tokens(ledger: Ledger, steps: int, totals: MetricTotals) -> int:
    """Returns `tokens/total` of the last of the first `steps` steps that has it, else the sum of the generated
    tokens."""
    newest = ledger.newest_metrics("tokens/total", steps)
    return int(totals.sums.get("rollout/tokens", 0.0) if newest is None else newest.values["tokens/total"])


def package_versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages that affect a run's results."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _evaluation_summary(evaluations: list[EvaluationRow]) -> dict[str, Any]:
    """Returns first, final and best exact match, the same of the reward if held-out prompts were scored (`best_step`:
    steps done at the best), and all metrics of the last evaluation."""
    found: dict[str, Any] = {EXACT_MATCH: _first_final_best(evaluations, EXACT_MATCH)}
    if any(HELD_OUT_REWARD in row.metrics for row in evaluations):
        found[HELD_OUT_REWARD] = _first_final_best(evaluations, HELD_OUT_REWARD)
    return {**found, "evaluation": evaluations[-1].metrics if evaluations else {}}


def _first_final_best(evaluations: list[EvaluationRow], metric: str) -> dict[str, float | None]:
    scored = [row for row in evaluations if metric in row.metrics]
    best = max(scored, key=lambda row: row.metrics[metric], default=None)
    return {
        "first": scored[0].metrics[metric] if scored else None,
        "final": scored[-1].metrics[metric] if scored else None,
        "best": best.metrics[metric] if best else None,
        "best_step": best.step + 1 if best else None,
    }
