"""Rules for TRL's trainers: groups of completions, the Trainer, and agreement with DeepSpeed's file."""

from pathlib import Path

from lockstep.doctor.configs import shared_rules
from lockstep.doctor.configs.config_settings import ConfigFindings, ConfigSettings
from lockstep.doctor.configs.deepspeed_rules import TRAINER_DEEPSPEED_SOURCE
from lockstep.doctor.configs.option_tables import option_table
from lockstep.doctor.configs.trl_engine_rules import GRPO_SOURCE, judge_engine
from lockstep.doctor.configs.trl_settings import ONLINE, TRLConfig, judge_option_names, judge_trl_memory

TRAINER_SOURCE = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/training_args.py"


def judge_groups(advice: ConfigFindings, config: TRLConfig) -> None:
    """Checks that batches consist of whole groups of completions."""
    settings = config.settings
    group = settings.integer("num_generations")
    generation_batch, steps = settings.integer("generation_batch_size"), settings.integer("steps_per_generation")
    at = config.location_of("num_generations", "per_device_train_batch_size", "generation_batch_size")
    if group is not None and group < 2:
        advice.error(
            "algorithm-group",
            f"num_generations {group}",
            "GRPO and RLOO compare the completions of a prompt; TRL requires at least 2.",
            "num_generations: 8",
            GRPO_SOURCE,
            at,
        )
        return
    both_given = "steps_per_generation" in settings and "generation_batch_size" in settings
    if both_given and generation_batch is not None and steps is not None:
        advice.error(
            "batch-generation",
            "generation_batch_size and steps_per_generation are both set",
            "TRL raises an error.",
            "keep one",
            GRPO_SOURCE,
            config.location_of("generation_batch_size"),
        )
        return
    generation_batch = _generation_batch(advice, config)
    if generation_batch is not None and group and generation_batch % group:
        advice.error(
            "batch-groups",
            f"{generation_batch} completions of a generation are not a multiple of num_generations {group}",
            "TRL raises an error: groups must be whole. A generation is per_device_train_batch_size x processes x"
            " steps_per_generation (by default gradient_accumulation_steps).",
            f"a num_generations that divides {generation_batch}",
            GRPO_SOURCE,
            at,
        )
    elif generation_batch is None and group:
        advice.unchecked(
            "batch-groups",
            f"cannot tell whether num_generations {group} divides the generation batch: the number of processes is not"
            " known",
            "also give accelerate's YAML or the launch command",
            at,
        )
    _check_group_options(advice, config, group)


def _generation_batch(advice: ConfigFindings, config: TRLConfig) -> int | None:
    """Returns the completions of a generation; None if that depends on an unknown number of processes. Checks that the
    processes can divide them."""
    settings, world_size = config.settings, config.world_size
    per_device = settings.integer("per_device_train_batch_size")
    accumulation = settings.integer("gradient_accumulation_steps") or 1
    generation_batch, steps = settings.integer("generation_batch_size"), settings.integer("steps_per_generation")
    if generation_batch is None and per_device and world_size:
        # Versions of TRL without generation_batch_size generate one micro-batch at a time.
        micro_batches = (steps or accumulation) if "generation_batch_size" in settings.defaults else 1
        generation_batch = per_device * world_size * micro_batches
    elif generation_batch is not None and per_device and world_size and generation_batch % (per_device * world_size):
        advice.error(
            "batch-generation",
            f"generation_batch_size {generation_batch} is not a multiple of per_device_train_batch_size {per_device}"
            f" x {world_size} processes",
            "TRL raises an error.",
            f"a multiple of {per_device * world_size}",
            GRPO_SOURCE,
            config.location_of("generation_batch_size"),
        )
    return generation_batch


def _check_group_options(advice: ConfigFindings, config: TRLConfig, group: int | None) -> None:
    """Checks the batches of evaluation, and options that cannot be combined with groups."""
    settings = config.settings
    evaluates = settings.text("eval_strategy") not in (None, "no", "False", "None")
    eval_batch, per_prompt = (
        settings.integer("per_device_eval_batch_size"),
        settings.integer("num_generations_eval") or group,
    )
    if evaluates and eval_batch and config.world_size and per_prompt and eval_batch * config.world_size % per_prompt:
        advice.error(
            "batch-groups",
            f"per_device_eval_batch_size {eval_batch} x {config.world_size} processes is not a multiple of"
            f" num_generations {per_prompt}",
            "TRL raises an error.",
            f"a per_device_eval_batch_size for which the product is a multiple of {per_prompt}",
            GRPO_SOURCE,
            config.location_of("per_device_eval_batch_size", "eval_strategy"),
        )
    if settings.flag("auto_find_batch_size"):
        advice.error(
            "batch-groups",
            "auto_find_batch_size with groups of completions",
            "TRL raises an error: halving a batch would split groups.",
            "auto_find_batch_size: false",
            GRPO_SOURCE,
            config.location_of("auto_find_batch_size"),
        )
    if settings.flag("sync_ref_model") and settings.number("beta") == 0:
        advice.error(
            "algorithm-kl",
            "sync_ref_model with beta 0",
            "TRL raises an error: with beta 0 there is no reference model.",
            "beta: 0.04, or sync_ref_model: false",
            GRPO_SOURCE,
            config.location_of("sync_ref_model"),
        )


def judge_trainer(advice: ConfigFindings, config: TRLConfig) -> None:
    """Checks the options of transformers' Trainer."""
    settings = config.settings
    if settings.flag("fp16") and settings.flag("bf16"):
        advice.error(
            "trainer-precision",
            "fp16 and bf16 are both on",
            "The Trainer raises an error.",
            "bf16: true, without fp16",
            TRAINER_SOURCE,
            config.location_of("fp16"),
        )
    _check_uneven_batches(advice, config)
    _check_best_model(advice, config)
    if (
        config.program == "sft"
        and settings.flag("packing")
        and (settings.text("attn_implementation") or "flash") in ("eager", "sdpa")
        and settings.text("packing_strategy") != "wrapped"
    ):
        advice.warn(
            "trainer-packing",
            f"packing with attn_implementation {settings.text('attn_implementation')}",
            "Samples in a packed row attend to each other.",
            "attn_implementation: flash_attention_2",
            "https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/sft_trainer.py",
            config.location_of("packing"),
        )


def _check_best_model(advice: ConfigFindings, config: TRLConfig) -> None:
    """Checks that each checkpoint has an evaluation, by which the best one is chosen."""
    settings = config.settings
    if settings.flag("load_best_model_at_end") and settings.text("save_strategy") != "best":
        evaluated = settings.text("eval_strategy") or settings.text("evaluation_strategy") or "no"
        saved = settings.text("save_strategy") or "steps"
        if evaluated != saved:
            advice.error(
                "trainer-best",
                f"load_best_model_at_end with eval_strategy {evaluated} and save_strategy {saved}",
                "They must be the same.",
                f"eval_strategy: {saved}",
                TRAINER_SOURCE,
                config.location_of("load_best_model_at_end"),
            )
        elif saved == "steps":
            save, every = (
                settings.integer("save_steps"),
                settings.integer("eval_steps") or settings.integer("logging_steps"),
            )
            if save and every and save % every:
                advice.error(
                    "trainer-best",
                    f"save_steps {save} is not a multiple of eval_steps {every} with load_best_model_at_end",
                    "The Trainer raises an error.",
                    f"save_steps: {every * max(1, save // every)}",
                    TRAINER_SOURCE,
                    config.location_of("save_steps"),
                )


def _check_uneven_batches(advice: ConfigFindings, config: TRLConfig) -> None:
    """Reports settings with which ranks get different numbers of batches."""
    settings = config.settings
    accelerator_config = settings.get("accelerator_config")
    even = accelerator_config.get("even_batches") if isinstance(accelerator_config, dict) else None
    if even is False and not settings.flag("dataloader_drop_last"):
        advice.warn(
            "batch-uneven",
            "accelerator_config.even_batches is false without dataloader_drop_last",
            "The last batches are distributed unevenly: ranks that run out do not join the collectives of the others.",
            "dataloader_drop_last: true, or even_batches: true",
            TRAINER_SOURCE,
            config.location_of("accelerator_config"),
        )


def judge_deepspeed_match(advice: ConfigFindings, config: TRLConfig, deepspeed: ConfigSettings) -> None:
    """Reports values in the DeepSpeed file that are neither "auto" nor equal to the Trainer's."""
    settings = config.settings
    per_device, accumulation = (
        settings.integer("per_device_train_batch_size"),
        settings.integer("gradient_accumulation_steps"),
    )
    total = per_device * accumulation * config.world_size if per_device and accumulation and config.world_size else None
    pairs: list[tuple[str, str, float | None]] = [
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", per_device),
        ("gradient_accumulation_steps", "gradient_accumulation_steps", accumulation),
        ("train_batch_size", "per_device_train_batch_size x gradient_accumulation_steps x processes", total),
        ("gradient_clipping", "max_grad_norm", settings.number("max_grad_norm")),
        ("optimizer.params.lr", "learning_rate", settings.number("learning_rate")),
        ("optimizer.params.weight_decay", "weight_decay", settings.number("weight_decay")),
        ("scheduler.params.warmup_max_lr", "learning_rate", settings.number("learning_rate")),
    ]
    for deepspeed_name, trainer_name, trainer_value in pairs:
        value = deepspeed.number(deepspeed_name)
        given = deepspeed_name in deepspeed and value is not None
        if given and trainer_value is not None and value != trainer_value:
            default = "" if trainer_name in settings or " x " in trainer_name else " (its default)"
            advice.error(
                "deepspeed-mismatch",
                f"{deepspeed_name} is {value:g}, the Trainer's {trainer_name} is {trainer_value:g}{default}",
                "The Trainer refuses different values.",
                f'"{deepspeed_name.rpartition(".")[2]}": "auto"',
                TRAINER_DEEPSPEED_SOURCE,
                deepspeed.location_of(deepspeed_name),
            )
    for kind in ("fp16", "bf16"):
        enabled = deepspeed.get(f"{kind}.enabled")
        if (
            enabled in (True, False)
            and kind in settings
            and settings.flag(kind) is not None
            and settings.flag(kind) != enabled
        ):
            advice.error(
                "deepspeed-mismatch",
                f"{kind}.enabled is {enabled}, {kind} is {settings.flag(kind)}",
                "The Trainer refuses different values.",
                '"enabled": "auto"',
                TRAINER_DEEPSPEED_SOURCE,
                deepspeed.location_of(f"{kind}.enabled"),
            )


def judge_accelerate_match(advice: ConfigFindings, config: TRLConfig, accelerate: ConfigSettings) -> None:
    """Reports a gradient accumulation in accelerate's file that differs from the Trainer's."""
    name = "deepspeed_config.gradient_accumulation_steps"
    value, trainer_value = accelerate.integer(name), config.settings.integer("gradient_accumulation_steps")
    if value and trainer_value and value != trainer_value:
        advice.warn(
            "deepspeed-mismatch",
            f"gradient_accumulation_steps is {value} in this file and {trainer_value} for the Trainer",
            "The Trainer counts its steps by one value, DeepSpeed by the other.",
            f"gradient_accumulation_steps: {trainer_value}",
            TRAINER_DEEPSPEED_SOURCE,
            accelerate.location_of(name),
        )


def judge_trl(
    advice: ConfigFindings, config: TRLConfig, folder: Path, gpu_gib: float | None, installed: dict[str, str]
) -> None:
    """Judges the options of a TRL training."""
    names = [setting.name for setting in config.settings]
    trl = option_table("trl", config.program or "sft", "script")
    trainer = option_table("transformers", "TrainingArguments")
    config.version = trl.version_for(names, installed.get("trl"))
    trainer_version = trainer.version_for(names, installed.get("transformers"))
    known = {**trainer.at(trainer_version), **(trl.at(config.version) if config.program else {})}
    config.settings.defaults = {name: option.default for name, option in known.items()}
    judge_option_names(advice, config, trl, trainer, trainer_version, installed)
    version_source = "installed" if installed.get("trl") else "the versions that know most of the options"
    trl_text = f"TRL {config.version} and " if config.program else ""
    advice.add(
        "version",
        "ok",
        f"options judged by those of {trl_text}transformers {trainer_version} ({version_source})",
        at=config.location,
    )
    if config.program in ONLINE:
        judge_groups(advice, config)
        judge_engine(advice, config)
    judge_trainer(advice, config)
    if config.deepspeed is not None:
        judge_deepspeed_match(advice, config, config.deepspeed)
    elif config.accelerate is not None:
        judge_accelerate_match(advice, config, config.accelerate)
    shared_rules.judge_transformers_timeout(advice, config.settings, config.variables, _uses_deepspeed(config))
    judge_trl_memory(advice, config, folder, gpu_gib)


def _uses_deepspeed(config: TRLConfig) -> bool:
    """Whether the training runs on DeepSpeed."""
    return config.deepspeed is not None or (
        config.accelerate is not None and config.accelerate.text("distributed_type") == "DEEPSPEED"
    )
