"""The part of `lockstep check` that needs only a config: placement, memory, time, and a small first run."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.base import waits
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.placement.assignment import DoesNotFit, NodesBusy
from lockstep.config.cluster import RayClusterConfig
from lockstep.config.recipes import GRPOConfig, SFTConfig
from lockstep.doctor.check.rules import memory_fit, step_durations
from lockstep.doctor.check.rules.memory_fit import ProcessMemory
from lockstep.doctor.check.rules.model_shape import UnknownModelShape, model_shape_of
from lockstep.doctor.output.findings import CheckReport, Finding
from lockstep.ledger.errors import LedgerError
from lockstep.models.errors import ModelError
from lockstep.models.huggingface import download_model
from lockstep.run.errors import RunFinished, RunRefused
from lockstep.run.planning.prepare import DryRun, dry_run
from lockstep.run.planning.run_plan import RunPlan

Config = GRPOConfig | SFTConfig

SMALL_BOUND_S = 900.0


def check_plan(report: CheckReport, config: Config, overrides: Sequence[str], memory: ProcessMemory) -> RunPlan | None:
    """Checks placement, memory and time; returns the plan if there is one.

    Args:
        memory: available to one process on this host.
    """
    began = time.monotonic()
    found, findings = _dry_run(config, overrides)
    report.add("placement", "Placement", findings, time.monotonic() - began)
    if any(each.id == "model" for each in findings):
        return None  # the size of an unavailable model is not known
    began = time.monotonic()
    report.add("memory", "Memory and time", _judge_sizes(config, memory), time.monotonic() - began)
    return None if found is None else found.plan


def _dry_run(config: Config, overrides: Sequence[str]) -> tuple[DryRun | None, list[Finding]]:
    """The dry run of this config, or the reason why the run would be refused."""
    why = "the run would refuse to start for the same reason"
    try:
        found = dry_run(config, None, overrides)
    except DoesNotFit as error:
        fix = "set " + ", or ".join(error.alternatives) if error.alternatives else "no smaller number of processes fits"
        return None, [Finding("placement", "error", error.largest.name if error.largest else "", error.why, why, fix)]
    except NodesBusy as error:
        return None, [Finding("placement", "warning", "", str(error), "the run waits until they are free")]
    except RunFinished as error:
        return None, [Finding("placement", "note", "", str(error))]
    except (RunRefused, LedgerError, ValueError, OSError) as error:
        return None, [_refused(error, why)]
    findings = [Finding("placement", "note", "", note) for note in found.notes]
    if found.plan.busy:
        findings.append(Finding("placement", "warning", "", found.plan.busy, "the run waits until they are free"))
    if found.plan.assignment is not None:
        rows = "; ".join(f"{node}: {processes} ({cpus} CPUs{', ' * bool(gpus)}{gpus}{' GPUs' * bool(gpus)})"
                         for node, _, processes, cpus, gpus in found.plan.assignment.rows())  # fmt: skip
        findings.insert(0, Finding("placement", "ok", "", f"every bundle fits: {rows}"))
    elif isinstance(config.cluster, RayClusterConfig):
        findings.append(Finding("placement", "unchecked", "", "the nodes of the cluster are not known"))
    else:
        names = ", ".join(f"{each.name} on {each.device}" for each in found.plan.processes)
        findings.insert(0, Finding("placement", "ok", "", f"this host holds all processes: {names}"))
    return found, findings


def _refused(error: Exception, why: str) -> Finding:
    text, remedy = str(error), str(getattr(error, "remedy", ""))
    problem = text.replace(remedy, "").rstrip("; ") if remedy else text.rpartition(": ")[0]
    remedy = remedy or (text.rpartition(": ")[2] if problem else "")
    id = "model" if isinstance(error, ModelError) else "placement"
    return Finding(id, "error", "", problem or text, why, remedy)


def _judge_sizes(config: Config, memory: ProcessMemory) -> list[Finding]:
    try:
        shape = model_shape_of(_model_config(config))
    except (UnknownModelShape, ModelError, OSError, ValueError) as error:
        return [Finding("memory", "unchecked", "", f"memory and time were not estimated: {error}")]
    return [
        *memory_fit.judge_memory(config, shape, memory),
        *step_durations.judge_durations(config, shape, memory.name, os.environ),
    ]


def _model_config(config: Config) -> dict[str, object]:
    """The model's `config.json`, from its folder or the hub. Raises OSError, ValueError, ModelError."""
    folder = Path(config.model.path).expanduser()
    if not folder.is_dir():
        folder = download_model(config.model.path, config.model.revision, field="model.path", weights=False)
    values = json.loads((folder / "config.json").read_text())
    if not isinstance(values, dict):
        raise ValueError(f"{folder}/config.json is not a JSON object")
    text = values.get("text_config")
    return {**text, "model_type": text.get("model_type", "")} if isinstance(text, dict) else values


def run_small(report: CheckReport, config: Config, file: Path, overrides: Sequence[str]) -> None:
    """Runs the config with two steps and tiny sizes through `lockstep train`, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="lockstep-small-") as folder:
        words = [*overrides, *small_overrides(config), f"folder={folder}"]
        command = [sys.executable, "-m", "lockstep", "train", str(file), *words]
        began = time.monotonic()
        try:
            done = waits.run(command, why="two small steps", timeout_s=SMALL_BOUND_S, notice_after_s=None)
        except WaitTimeout:
            finding = Finding(
                "small-first", "error", "", f"two small steps did not finish within {SMALL_BOUND_S:.0f} s",
                "the run itself would not finish either",
                "run `lockstep train` with these settings and watch it with `lockstep top`: "
                + " ".join(small_overrides(config)),
            )  # fmt: skip
            report.add("small-first", "Small first", [finding], time.monotonic() - began)
            return
    took = time.monotonic() - began
    if done.returncode == 0:
        seen = f"two small steps succeeded ({' '.join(small_overrides(config))})"
        report.add("small-first", "Small first", [Finding("small-first", "ok", "", seen)], took)
        return
    last = " ".join((done.stderr.strip() or done.stdout.strip()).split()[-80:])
    finding = Finding(
        "small-first", "error", "", f"two small steps failed with exit code {done.returncode}: {last}",
        "the run itself would fail in the same way, only later",
        "fix that error; `lockstep train` with the same settings reproduces it: " + " ".join(small_overrides(config)),
    )  # fmt: skip
    report.add("small-first", "Small first", [finding], took)


def small_overrides(config: Config) -> list[str]:
    """Overrides that make a run tiny but keep its placement, model, data and communicators."""
    ranks = config.trainer.ranks
    words = ["steps=2", "checkpoint.every=1", "checkpoint.export=false", "watch.notice_s=3"]
    if config.recipe == "grpo":
        group = config.group_size
        prompts = max(2, ranks)
        words += [f"prompts_per_step={prompts}", f"minibatch_size={group}" if config.minibatch_size else ""]
        tokens = min(16, config.rollout.sampling.max_tokens)
        words.append(f"rollout.sampling.max_tokens={tokens}")
    else:
        words.append(f"batch_size={min(config.batch_size, 2 * ranks)}")
    if config.evaluation is not None:
        words.append("evaluation.prompts=2")
        if config.evaluation.sampling is not None:
            words.append(f"evaluation.sampling.max_tokens={min(16, config.evaluation.sampling.max_tokens)}")
    if config.trainer.schedule.warmup_steps:
        words.append("trainer.schedule.warmup_steps=1")
    if config.trainer.schedule.total_steps is not None:
        words.append("trainer.schedule.total_steps=2")
    words += ["tracking=[]"] if config.tracking else []
    return [word for word in words if word]
