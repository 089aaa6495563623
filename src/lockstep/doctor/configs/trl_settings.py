"""TRL's settings with the launch configuration, and the memory that follows from them."""

from dataclasses import dataclass, field
from pathlib import Path

from lockstep.doctor.configs import model_memory, option_tables
from lockstep.doctor.configs.accelerate_rules import accelerate_zero_stage
from lockstep.doctor.configs.config_settings import ConfigFindings, ConfigLocation, ConfigSetting, ConfigSettings
from lockstep.doctor.configs.option_tables import OptionSpec, OptionTable, option_table
from lockstep.doctor.configs.shared_rules import judge_heads, judge_positions
from lockstep.doctor.configs.shell_scripts import ShellWord
from lockstep.doctor.configs.training_commands import TRL_COMMANDS

ONLINE = ("grpo", "rloo")


@dataclass(slots=True)
class TRLConfig:
    """The settings of a training, and how it is launched."""

    program: str
    """grpo, rloo, sft, dpo, online_dpo, kto, reward, or "" if not known."""
    settings: ConfigSettings
    location: ConfigLocation
    world_size: int | None = None
    variables: dict[str, ShellWord] = field(default_factory=dict)
    accelerate: ConfigSettings | None = None
    deepspeed: ConfigSettings | None = None
    own_script: bool = False
    """Whether the script is the user's, so that it may have options that TRL does not know."""
    version: str = ""

    def location_of(self, *names: str) -> ConfigLocation:
        """Location of the first of these options that is given, else of the program."""
        location = self.settings.location_of(*names)
        return location if location.file else self.location


def vllm_mode(config: TRLConfig) -> str | None:
    """The mode of vLLM; None for versions without this option, in which vLLM needs a GPU of its own."""
    if "vllm_mode" in config.settings:
        return config.settings.text("vllm_mode")
    if "vllm_mode" not in config.settings.defaults:
        return None
    return "server" if config.version.startswith("0.") else "colocate"


def zero_stage(config: TRLConfig) -> int | None:
    """The ZeRO stage, or the stage that shards the same states as FSDP; None if it is not known."""
    if config.deepspeed is not None:
        return config.deepspeed.integer("zero_optimization.stage")
    return accelerate_zero_stage(config.accelerate) if config.accelerate is not None else None


TRL_PARSER_SOURCE = "https://github.com/huggingface/trl/blob/v1.16.0/trl/scripts/utils.py"


def trl_program(name: str, settings: ConfigSettings) -> str:
    """The trainer that a script's name or options indicate; empty if they indicate none."""
    stem = name.removesuffix(".py").rpartition(".")[2].lower()
    parts = stem.replace("-", "_").split("_")
    if "online" in parts and "dpo" in parts:
        return "online_dpo"
    for program in TRL_COMMANDS:
        if program in parts:
            return program
    if "num_generations" in settings:
        return "grpo"
    return "sft" if "packing" in settings or "max_seq_length" in settings else ""


def trl_options(program: str) -> dict[str, OptionSpec]:
    """All options of a program, in all versions; TRL's override those of TrainingArguments."""
    trainer = option_table("transformers", "TrainingArguments").options
    if not program:
        return dict(trainer)
    return {**trainer, **option_table("trl", "script").options, **option_table("trl", program).options}


def judge_option_names(
    advice: ConfigFindings,
    config: TRLConfig,
    trl: OptionTable,
    trainer: OptionTable,
    trainer_version: str,
    installed: dict[str, str],
) -> None:
    """Judges option names by the table of TRL or of transformers, whichever knows the name or a similar one."""
    in_trl, in_trainer = (trl.at(config.version) if config.program else {}), trainer.at(trainer_version)
    trl_settings: list[ConfigSetting] = []
    trainer_settings: list[ConfigSetting] = []
    for setting in config.settings:
        if setting.name in ("config", "local_rank", "local-rank", "env"):
            continue
        if setting.name in in_trl:
            trl_settings.append(setting)
        elif setting.name in in_trainer or setting.name in trainer.options or setting.name in trainer.renamed:
            trainer_settings.append(setting)
        elif config.program and (
            setting.name in trl.options or setting.name in trl.renamed or trl.nearest(setting.name, config.version)
        ):
            trl_settings.append(setting)
        else:
            trainer_settings.append(setting)
    strict = not config.own_script
    consequence = "The parser exits with an error" + (
        "." if strict else ", unless the script has an option of this name."
    )
    for table, settings, version in ((trl, trl_settings, config.version), (trainer, trainer_settings, trainer_version)):
        policy = option_tables.OptionPolicy("", consequence, table.framework not in installed, strict)
        option_tables.judge_options(advice, table, settings, version, policy, strict)


def judge_trl_memory(advice: ConfigFindings, config: TRLConfig, folder: Path, gpu_gib: float | None) -> None:
    settings = config.settings
    if "model_name_or_path" not in settings:
        return
    shape = model_memory.find_model(settings.text("model_name_or_path"), folder)
    at = config.location_of("model_name_or_path")
    if shape is None:
        advice.unchecked(
            "memory-model",
            "memory was not estimated: the model's size is not known",
            "name a folder with the model's config.json, or a model with its size in the name",
            at,
        )
        return
    completion, prompt = settings.integer("max_completion_length") or 0, settings.integer("max_prompt_length") or 0
    longest = (
        (completion + prompt)
        if config.program in ONLINE
        else settings.integer("max_length") or settings.integer("max_seq_length") or 0
    )
    judge_positions(advice, shape, longest, "sequences", config.location_of("max_length", "max_completion_length"))
    per_device = settings.integer("per_device_train_batch_size")
    tokens = per_device * longest if per_device and longest and shape.layers and config.program not in ONLINE else None
    batch = model_memory.BatchTokens(tokens, bool(settings.flag("use_liger_kernel")))
    model_memory.judge_gpu_memory(
        advice, _training_states(config, shape), _engine_share(advice, config, shape, longest), batch, gpu_gib, at
    )


def _engine_share(
    advice: ConfigFindings, config: TRLConfig, shape: model_memory.ModelSize, longest: int
) -> model_memory.EngineShare | None:
    """The engine that shares the trainer's GPUs; None if there is none."""
    settings = config.settings
    if config.program not in ONLINE or not settings.flag("use_vllm") or vllm_mode(config) != "colocate":
        return None
    parallel, share = (
        settings.integer("vllm_tensor_parallel_size") or 1,
        settings.number("vllm_gpu_memory_utilization") or 0.3,
    )
    judge_heads(advice, shape, parallel, "vllm_tensor_parallel_size", config.location_of("vllm_tensor_parallel_size"))
    if not 0 < share <= 1:
        return None
    sleeps, at = (
        bool(settings.flag("vllm_enable_sleep_mode")),
        config.location_of("vllm_gpu_memory_utilization", "use_vllm"),
    )
    return model_memory.EngineShare(
        shape, parallel, share, True, sleeps, longest or None, at, "vllm_gpu_memory_utilization"
    )


def _training_states(config: TRLConfig, shape: model_memory.ModelSize) -> model_memory.TrainingStates | None:
    stage = zero_stage(config)
    if stage is None and config.world_size != 1:
        return None
    optimizer, weights = (_is_offloaded(config, what) for what in ("optimizer", "param"))
    trainable = 0.02 if config.settings.flag("use_peft") else 1.0
    return model_memory.TrainingStates(shape, config.world_size, stage or 0, optimizer, weights, trainable)


def _is_offloaded(config: TRLConfig, what: str) -> bool:
    """Whether `what` (`optimizer` or `param`) is offloaded to the host or to disk."""
    device = None
    if config.deepspeed is not None:
        device = config.deepspeed.text(f"zero_optimization.offload_{what}.device")
    elif config.accelerate is not None:
        device = config.accelerate.text(f"deepspeed_config.offload_{what}_device")
    return device in ("cpu", "nvme")
