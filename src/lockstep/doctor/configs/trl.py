"""TRL's trainers and other scripts on transformers' Trainer, with their accelerate and DeepSpeed files."""

from pathlib import Path

from lockstep.doctor.configs import memory, models, spelling, timeouts
from lockstep.doctor.configs.advice import Advice
from lockstep.doctor.configs.lengths import judge_heads, judge_positions
from lockstep.doctor.configs.settings import Setting, Settings
from lockstep.doctor.configs.tables import Option, Table, table
from lockstep.doctor.configs.trl_rules import (
    ONLINE,
    Run,
    judge_engine,
    judge_groups,
    judge_match,
    judge_match_accelerate,
    judge_trainer,
    vllm_mode,
    zero_stage,
)

PARSER = "https://github.com/huggingface/trl/blob/v1.16.0/trl/scripts/utils.py"


def program_of(name: str, settings: Settings) -> str:
    """Which trainer: by the script's name, or by options that only one has."""
    stem = name.removesuffix(".py").rpartition(".")[2].lower()
    for program in ("grpo", "rloo", "sft", "dpo", "kto", "reward"):
        if program in stem.replace("-", "_").split("_") or stem == program:
            return program
    if "num_generations" in settings:
        return "grpo"
    return "sft" if "packing" in settings or "max_seq_length" in settings else ""


def options_of(program: str) -> dict[str, Option]:
    """All options of a program, TrainingArguments' under those of TRL."""
    trainer = table("transformers", "TrainingArguments").options
    if not program:
        return dict(trainer)
    return {**trainer, **table("trl", "script").options, **table("trl", program).options}


def judge(advice: Advice, run: Run, folder: Path, gpu_gib: float | None, installed: dict[str, str]) -> None:
    """All that is known of its options."""
    names = [setting.name for setting in run.settings]
    trl = table("trl", run.program or "sft", "script")
    trainer = table("transformers", "TrainingArguments")
    run.version = trl.version_for(names, installed.get("trl"))
    trainer_version = trainer.version_for(names, installed.get("transformers"))
    known = {**trainer.at(trainer_version), **(trl.at(run.version) if run.program else {})}
    run.settings.defaults = {name: option.default for name, option in known.items()}
    _names(advice, run, trl, trainer, trainer_version, installed)
    how = "installed" if installed.get("trl") else "the versions that know most of its options"
    what = f"TRL {run.version} and " if run.program else ""
    advice.say("version", "ok", f"options judged by {what}transformers {trainer_version} ({how})", at=run.at)
    if run.program in ONLINE:
        judge_groups(advice, run)
        judge_engine(advice, run)
    judge_trainer(advice, run)
    if run.deepspeed is not None:
        judge_match(advice, run, run.deepspeed)
    elif run.accelerate is not None:
        judge_match_accelerate(advice, run, run.accelerate)
    kinds = _kind(run)
    timeouts.transformers(advice, run.settings, run.variables, kinds)
    _memory(advice, run, folder, gpu_gib)


def _names(
    advice: Advice, run: Run, trl: Table, trainer: Table, trainer_version: str, installed: dict[str, str]
) -> None:
    """An option is known when either knows it; what neither does is judged by the table that is nearer to it."""
    in_trl, in_trainer = (trl.at(run.version) if run.program else {}), trainer.at(trainer_version)
    mine: list[Setting] = []
    theirs: list[Setting] = []
    for setting in run.settings:
        if setting.name in ("config", "local_rank", "local-rank", "env"):
            continue
        if setting.name in in_trl:
            mine.append(setting)
        elif setting.name in in_trainer or setting.name in trainer.options or setting.name in trainer.renamed:
            theirs.append(setting)
        elif run.program and (
            setting.name in trl.options or setting.name in trl.renamed or trl.nearest(setting.name, run.version)
        ):
            mine.append(setting)
        else:
            theirs.append(setting)
    strict = not run.own_script
    consequence = "The parser ends with an error" + (
        "." if strict else ", unless the script has an option of this name."
    )
    for known, settings, version in ((trl, mine, run.version), (trainer, theirs, trainer_version)):
        form = spelling.Spelling("", consequence, known.framework not in installed, strict)
        spelling.judge(advice, known, settings, version, form, strict)


def _kind(run: Run) -> bool:
    """Whether it runs on DeepSpeed."""
    return run.deepspeed is not None or (
        run.accelerate is not None and run.accelerate.text("distributed_type") == "DEEPSPEED"
    )


# ---------------------------------------------------------------- groups of completions


# ---------------------------------------------------------------- generation


# ---------------------------------------------------------------- Trainer


# ---------------------------------------------------------------- memory


def _memory(advice: Advice, run: Run, folder: Path, gpu_gib: float | None) -> None:
    s = run.settings
    if "model_name_or_path" not in s:
        return
    shape = models.find(s.text("model_name_or_path"), folder)
    at = run.place("model_name_or_path")
    if shape is None:
        advice.unchecked(
            "memory-model",
            "memory: the model's size is not known here",
            "give a folder with its config.json, or a name that tells its size",
            at,
        )
        return
    completion, prompt = s.whole("max_completion_length") or 0, s.whole("max_prompt_length") or 0
    longest = (
        (completion + prompt) if run.program in ONLINE else s.whole("max_length") or s.whole("max_seq_length") or 0
    )
    judge_positions(advice, shape, longest, "sequences", run.place("max_length", "max_completion_length"))
    each = s.whole("per_device_train_batch_size")
    tokens = each * longest if each and longest and shape.layers and run.program not in ONLINE else None
    batch = memory.Batch(tokens, bool(s.flag("use_liger_kernel")))
    memory.judge(advice, _training(run, shape), _engine_share(advice, run, shape, longest), batch, gpu_gib, at)


def _engine_share(advice: Advice, run: Run, shape: models.Shape, longest: int) -> memory.Engine | None:
    """Of an engine on the trainer's GPUs."""
    s = run.settings
    if run.program not in ONLINE or not s.flag("use_vllm") or vllm_mode(run) != "colocate":
        return None
    parallel, share = s.whole("vllm_tensor_parallel_size") or 1, s.number("vllm_gpu_memory_utilization") or 0.3
    judge_heads(advice, shape, parallel, "vllm_tensor_parallel_size", run.place("vllm_tensor_parallel_size"))
    if not 0 < share <= 1:
        return None
    sleeps, at = bool(s.flag("vllm_enable_sleep_mode")), run.place("vllm_gpu_memory_utilization", "use_vllm")
    return memory.Engine(shape, parallel, share, True, sleeps, longest or None, at, "vllm_gpu_memory_utilization")


def _training(run: Run, shape: models.Shape) -> memory.Training | None:
    stage = zero_stage(run)
    if stage is None and run.world != 1:
        return None
    optimizer, weights = (_offloaded(run, what) for what in ("optimizer", "param"))
    trainable = 0.02 if run.settings.flag("use_peft") else 1.0
    return memory.Training(shape, run.world, stage or 0, optimizer, weights, trainable)


def _offloaded(run: Run, what: str) -> bool:
    """`what`: optimizer or param."""
    device = None
    if run.deepspeed is not None:
        device = run.deepspeed.text(f"zero_optimization.offload_{what}.device")
    elif run.accelerate is not None:
        device = run.accelerate.text(f"deepspeed_config.offload_{what}_device")
    return device in ("cpu", "nvme")
