"""The part of `lockstep check` that needs only a config: placement, memory, time, and a trial run of two steps."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import AutoConfig

from lockstep.base import waits
from lockstep.base.folders import scratch_dir
from lockstep.base.json_text import read_json
from lockstep.base.wait_state import WaitTimeout
from lockstep.cli.check.check_images import image_findings
from lockstep.cluster.placement.assignment import DoesNotFit, NodesBusy
from lockstep.config.cluster import RayClusterConfig
from lockstep.config.run_config import RunConfig
from lockstep.config.train_role import TrainRole
from lockstep.data.images.image_usage import ImageUsage
from lockstep.doctor.check.rules import memory_fit, step_durations
from lockstep.doctor.check.rules.memory_fit import ProcessMemory
from lockstep.doctor.check.rules.model_shape import ModelShape, UnknownModelShape, VisionShape, model_shape_of
from lockstep.doctor.output.findings import CheckReport, Finding
from lockstep.ledger.errors import LedgerError
from lockstep.models.errors import ModelError
from lockstep.models.huggingface import download_model
from lockstep.models.model_facts import ModelFacts
from lockstep.run.errors import RunFinished, RunRefused
from lockstep.run.planning.prepare import DryRun, dry_run, resolve_adapters, trained_models
from lockstep.run.planning.run_plan import RunPlan
from lockstep.run.planning.served_models import served_models
from lockstep.train.decoder_layers import CompilerMissing, require_compiler
from lockstep.train.trainer_kinds import SERVED_MODELS, trainer_kind

Config = RunConfig

TRIAL_TIMEOUT_S = 900.0
"""Time limit of the trial run, including the start of its processes."""


def check_plan(report: CheckReport, config: Config, overrides: Sequence[str], memory: ProcessMemory) -> RunPlan | None:
    """Checks placement, memory and time; returns the plan if there is one.

    Args:
        memory: what one process can use on this host.
    """
    began = time.monotonic()
    found, findings = _dry_run(config, overrides)
    findings += _find_compiler(config, memory.device)
    report.add("placement", "Placement", findings, time.monotonic() - began)
    if any(each.id == "model" for each in findings):
        return None  # without its config.json, the model's size is not known
    began = time.monotonic()
    findings = _judge_sizes(config, memory, found)
    report.add("memory", "Memory and time", findings, time.monotonic() - began)
    return None if found is None else found.plan


def _dry_run(config: Config, overrides: Sequence[str]) -> tuple[DryRun | None, list[Finding]]:
    """The dry run of this config (None if the run would be refused), and findings about the placement."""
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
        return None, [_refusal_finding(error, why)]
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


def _find_compiler(config: Config, device: str) -> list[Finding]:
    """An error if layers are to be compiled for this host's CPU, and there is no compiler."""
    wanted = any(role.trainer.compile == "layers" for role in config.train_roles)
    if not wanted or device != "cpu" or isinstance(config.cluster, RayClusterConfig):
        return []
    try:
        require_compiler()
    except CompilerMissing as error:
        return [_refusal_finding(error, "the trainer's ranks would end when they start")]
    return []


def _refusal_finding(error: Exception, why: str) -> Finding:
    """The finding for an error that refuses the run.

    The fix is the error's `remedy`, or without one the part of its message after the last colon.
    """
    text, remedy = str(error), str(getattr(error, "remedy", ""))
    problem = text.replace(remedy, "").rstrip("; ") if remedy else text.rpartition(": ")[0]
    remedy = remedy or (text.rpartition(": ")[2] if problem else "")
    id = "model" if isinstance(error, ModelError) else "placement"
    return Finding(id, "error", "", problem or text, why, remedy)


def _judge_sizes(config: Config, memory: ProcessMemory, found: DryRun | None) -> list[Finding]:
    """Estimates whether the run fits into memory, how long its stages take, and what its images need."""
    usage = ImageUsage() if found is None or found.data is None else found.data.image_usage

    def ranks(role: TrainRole, token_budget: int) -> Mapping[str, int]:
        return trainer_kind(role).planner.memory(role, models[role.name], token_budget)

    try:
        config = resolve_adapters(config)
        models = trained_models(config, memory.device)
        facts = served_models(config, models[config.policy.name], memory.device)
        for role in config.train_roles:  # refuses settings that contradict each other, as DeepSpeed's may
            ranks(role, config.token_budget)
    except (ModelError, OSError, ValueError) as error:
        return [Finding("memory", "unchecked", "", f"memory and time were not estimated: {error}")]

    served = {
        role.name: SERVED_MODELS.planner.memory(role, facts[role.name], config.token_budget)
        for role in config.serve_roles
    }
    images = image_findings(config, models[config.policy.name], found)
    try:
        shapes = {role.name: _shape(role, models[role.name], usage) for role in config.train_roles}
    except (UnknownModelShape, ModelError, OSError, ValueError) as error:
        unknown = f"the memory of engines, and time, were not estimated: {error}"
        return [
            *memory_fit.judge_memory(config, ranks, None, memory, served),
            Finding("memory", "unchecked", "", unknown),
            *images,
        ]
    return [
        *memory_fit.judge_memory(config, ranks, shapes[config.policy.name], memory, served),
        *step_durations.judge_durations(config, shapes, memory.name, os.environ),
        *images,
    ]


def _shape(role: TrainRole, model: ModelFacts, usage: ImageUsage) -> ModelShape:
    """The shape of a role's model, with its vision part. Raises UnknownModelShape, OSError, ValueError, ModelError."""
    shape, vision = model_shape_of(_model_config(role)), model.vision
    if vision is None:
        return shape
    flops = usage.images * vision.flops(usage.tokens // usage.images) / usage.samples if usage.images else 0.0
    parameters, trained = vision.tower + vision.projector, bool(model.changing & {"tower", "projector"})
    return replace(shape, vision=VisionShape(parameters, vision.largest_unit, trained, usage.most_tokens, flops))


def _model_config(role: TrainRole) -> dict[str, object]:
    """The `config.json` of a role's model, from its folder or the hub; of a vision-language model, what it says of the
    language model, with defaults. Raises OSError, ValueError, ModelError."""
    folder = Path(role.model.path).expanduser()
    if not folder.is_dir():
        field = role.field("model.path")
        folder = download_model(role.model.path, role.model.revision, field=field, weights=False)
    values = read_json(folder / "config.json")
    if not isinstance(values, dict):
        raise ValueError(f"{folder}/config.json is not a JSON object")
    if "vision_config" not in values:
        return values
    config = AutoConfig.from_pretrained(folder, trust_remote_code=role.model.trust_remote_code)
    text: dict[str, object] = config.get_text_config().to_dict()
    return {**text, "tie_word_embeddings": config.tie_word_embeddings}


def run_trial(report: CheckReport, config: Config, file: Path, overrides: Sequence[str]) -> None:
    """Trains with this config for two steps with tiny sizes, through `lockstep train` in a temporary folder."""
    with scratch_dir("lockstep-trial-") as folder:
        arguments = [*overrides, *trial_overrides(config), f"folder={folder}"]
        command = [sys.executable, "-m", "lockstep", "train", str(file), *arguments]
        began = time.monotonic()
        try:
            done = waits.run(command, why="a trial run of two steps", timeout_s=TRIAL_TIMEOUT_S, notice_after_s=None)
        except WaitTimeout:
            finding = Finding(
                "small-first", "error", "", f"the trial run of two steps did not finish within {TRIAL_TIMEOUT_S:.0f} s",
                "the run itself would not finish either",
                "run `lockstep train` with these settings and watch it with `lockstep top`: "
                + " ".join(trial_overrides(config)),
            )  # fmt: skip
            report.add("small-first", "Trial run", [finding], time.monotonic() - began)
            return
    took = time.monotonic() - began
    if done.returncode == 0:
        seen = f"a trial run of two steps succeeded ({' '.join(trial_overrides(config))})"
        report.add("small-first", "Trial run", [Finding("small-first", "ok", "", seen)], took)
        return
    last = " ".join((done.stderr.strip() or done.stdout.strip()).split()[-80:])
    finding = Finding(
        "small-first", "error", "", f"the trial run of two steps failed with exit code {done.returncode}: {last}",
        "the run itself would fail in the same way, only later",
        "fix that error; `lockstep train` with the same settings reproduces it: " + " ".join(trial_overrides(config)),
    )  # fmt: skip
    report.add("small-first", "Trial run", [finding], took)


def trial_overrides(config: Config) -> list[str]:
    """Overrides that make a run tiny but keep its placement, model, data and communicators."""
    overrides = ["steps=2", "checkpoint.every=1", "checkpoint.export=false", "watch.notice_s=3"]
    overrides += [f"{name}={value}" for name, value in config.trial_overrides.items()]
    if config.early_stopping is not None:
        overrides.append("early_stopping=null")
    if config.evaluation is not None:
        overrides.append("evaluation.prompts=2")
        if config.evaluation.sampling is not None:
            overrides.append(f"evaluation.sampling.max_tokens={min(16, config.evaluation.sampling.max_tokens)}")
    for role in config.train_roles:
        if role.trainer.schedule.warmup_steps:
            overrides.append(f"{role.field('trainer.schedule.warmup_steps')}=1")
        if role.trainer.schedule.total_steps is not None:
            overrides.append(f"{role.field('trainer.schedule.total_steps')}=2")
    overrides += ["tracking=[]"] if config.tracking else []
    return [each for each in overrides if each]
