"""Settings of TRL's trainers: program, options, launch, and the memory they need."""

from dataclasses import dataclass, field
from pathlib import Path

from lockstep.doctor.configs import model_memory, option_tables
from lockstep.doctor.configs.accelerate_rules import accelerate_zero_stage
from lockstep.doctor.configs.config_settings import ConfigFindings, ConfigLocation, ConfigSetting, ConfigSettings
from lockstep.doctor.configs.option_tables import OptionSpec, OptionTable, option_table
from lockstep.doctor.configs.shared_rules import judge_heads, judge_positions
from lockstep.doctor.configs.shell_scripts import ShellWord

ONLINE = ("grpo", "rloo")


@dataclass(slots=True)
class TRLConfig:
    """A training: its settings and how it is launched."""

    program: str
    """grpo, rloo, sft, dpo, kto, reward, or "" if not known."""
    settings: ConfigSettings
    at: ConfigLocation
    world: int | None = None
    variables: dict[str, ShellWord] = field(default_factory=dict)
    accelerate: ConfigSettings | None = None
    deepspeed: ConfigSettings | None = None
    own_script: bool = False
    """Whether it is a custom script, which may have options of its own."""
    version: str = ""

    def place(self, *names: str) -> ConfigLocation:
        """Location of the first of these that is set, else of the program."""
        place = self.settings.place(*names)
        return place if place.file else self.at


def vllm_mode(run: TRLConfig) -> str | None:
    """Mode of the engine; None for versions without the option, in which it had a GPU of its own."""
    if "vllm_mode" in run.settings:
        return run.settings.text("vllm_mode")
    if "vllm_mode" not in run.settings.defaults:
        return None
    return "server" if run.version.startswith("0.") else "colocate"


def zero_stage(run: TRLConfig) -> int | None:
    if run.deepspeed is not None:
        return run.deepspeed.whole("zero_optimization.stage")
    return accelerate_zero_stage(run.accelerate) if run.accelerate is not None else None


TRL_PARSER_SOURCE = "https://github.com/huggingface/trl/blob/v1.16.0/trl/scripts/utils.py"


def trl_program(name: str, settings: ConfigSettings) -> str:
    """Determines the trainer by the script's name, or by options that only one has."""
    stem = name.removesuffix(".py").rpartition(".")[2].lower()
    for program in ("grpo", "rloo", "sft", "dpo", "kto", "reward"):
        if program in stem.replace("-", "_").split("_") or stem == program:
            return program
    if "num_generations" in settings:
        return "grpo"
    return "sft" if "packing" in settings or "max_seq_length" in settings else ""


def trl_options(program: str) -> dict[str, OptionSpec]:
    """All options of a program: TRL's override those of TrainingArguments."""
    trainer = option_table("transformers", "TrainingArguments").options
    if not program:
        return dict(trainer)
    return {**trainer, **option_table("trl", "script").options, **option_table("trl", program).options}


def judge_option_names(
    advice: ConfigFindings,
    run: TRLConfig,
    trl: OptionTable,
    trainer: OptionTable,
    trainer_version: str,
    installed: dict[str, str],
) -> None:
    """Judges option names: known to TRL or transformers; an unknown name is judged by the more similar table."""
    in_trl, in_trainer = (trl.at(run.version) if run.program else {}), trainer.at(trainer_version)
    mine: list[ConfigSetting] = []
    theirs: list[ConfigSetting] = []
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
    consequence = "The parser exits with an error" + (
        "." if strict else ", unless the script has an option of this name."
    )
    for known, settings, version in ((trl, mine, run.version), (trainer, theirs, trainer_version)):
        form = option_tables.OptionSyntax("", consequence, known.framework not in installed, strict)
        option_tables.judge_options(advice, known, settings, version, form, strict)


def judge_trl_memory(advice: ConfigFindings, run: TRLConfig, folder: Path, gpu_gib: float | None) -> None:
    s = run.settings
    if "model_name_or_path" not in s:
        return
    shape = model_memory.find_model(s.text("model_name_or_path"), folder)
    at = run.place("model_name_or_path")
    if shape is None:
        advice.unchecked(
            "memory-model",
            "memory: the model's size is not known",
            "give a folder with its config.json, or a name that contains its size",
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
    batch = model_memory.BatchTokens(tokens, bool(s.flag("use_liger_kernel")))
    model_memory.judge_gpu_memory(
        advice, _training_states(run, shape), _engine_share(advice, run, shape, longest), batch, gpu_gib, at
    )


def _engine_share(
    advice: ConfigFindings, run: TRLConfig, shape: model_memory.ModelSize, longest: int
) -> model_memory.EngineShare | None:
    """An engine on the trainer's GPUs."""
    s = run.settings
    if run.program not in ONLINE or not s.flag("use_vllm") or vllm_mode(run) != "colocate":
        return None
    parallel, share = s.whole("vllm_tensor_parallel_size") or 1, s.number("vllm_gpu_memory_utilization") or 0.3
    judge_heads(advice, shape, parallel, "vllm_tensor_parallel_size", run.place("vllm_tensor_parallel_size"))
    if not 0 < share <= 1:
        return None
    sleeps, at = bool(s.flag("vllm_enable_sleep_mode")), run.place("vllm_gpu_memory_utilization", "use_vllm")
    return model_memory.EngineShare(
        shape, parallel, share, True, sleeps, longest or None, at, "vllm_gpu_memory_utilization"
    )


def _training_states(run: TRLConfig, shape: model_memory.ModelSize) -> model_memory.TrainingStates | None:
    stage = zero_stage(run)
    if stage is None and run.world != 1:
        return None
    optimizer, weights = (_is_offloaded(run, what) for what in ("optimizer", "param"))
    trainable = 0.02 if run.settings.flag("use_peft") else 1.0
    return model_memory.TrainingStates(shape, run.world, stage or 0, optimizer, weights, trainable)


def _is_offloaded(run: TRLConfig, what: str) -> bool:
    """`what`: optimizer or param."""
    device = None
    if run.deepspeed is not None:
        device = run.deepspeed.text(f"zero_optimization.offload_{what}.device")
    elif run.accelerate is not None:
        device = run.accelerate.text(f"deepspeed_config.offload_{what}_device")
    return device in ("cpu", "nvme")
