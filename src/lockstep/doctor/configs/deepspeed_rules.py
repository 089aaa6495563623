"""Rules for DeepSpeed's JSON file, used alone or with transformers' Trainer, which replaces its "auto" values."""

from lockstep.doctor.configs import option_tables
from lockstep.doctor.configs.config_files import ConfigDocument, leaves
from lockstep.doctor.configs.config_settings import ConfigFindings, ConfigLocation, ConfigSetting, ConfigSettings
from lockstep.doctor.configs.option_tables import OptionTable, option_table

CONFIG_SOURCE = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/config.py"
MODELS_SOURCE = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/config.py"
STRICT_SOURCE = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/config_utils.py"
TRAINER_DEEPSPEED_SOURCE = (
    "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/integrations/deepspeed.py"
)
SAVE_SOURCE = "https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html"
ZERO_SECTION = "zero_optimization"
_SECTIONS = (ZERO_SECTION, "fp16", "bf16")
_AUTO_FILLED = {
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
    "gradient_clipping",
    "fp16.enabled",
    "bf16.enabled",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.eps",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
    f"{ZERO_SECTION}.reduce_bucket_size",
    f"{ZERO_SECTION}.stage3_prefetch_bucket_size",
    f"{ZERO_SECTION}.stage3_param_persistence_threshold",
}
"""Keys for which the Trainer replaces "auto"."""
_DEFAULT_FOR_AUTO = (f"{ZERO_SECTION}.", "fp16.", "bf16.")
"""Prefixes of keys for which DeepSpeed itself takes "auto" as the default."""


def load_deepspeed(document: ConfigDocument) -> ConfigSettings:
    """Converts nested sections to settings with dotted names."""
    settings = ConfigSettings()
    for name, value in leaves(document.tree or {}):
        settings.add(ConfigSetting(name, value, document.locations.get(name, ConfigLocation(document.file, 0))))
    return settings


def judge_deepspeed(
    advice: ConfigFindings,
    document: ConfigDocument,
    settings: ConfigSettings,
    world_size: int | None,
    filled_by_trainer: bool,
) -> None:
    """Judges a DeepSpeed file.

    Args:
        world_size: number of ranks; None if it is not known.
        filled_by_trainer: whether transformers' Trainer reads the file and replaces "auto".
    """
    for name, location in document.duplicates:
        advice.error(
            "deepspeed-doubled",
            f"{name} is set twice",
            "DeepSpeed raises an error.",
            "keep one of them",
            STRICT_SOURCE,
            location,
        )
    options = option_table("deepspeed", "config")
    removed = _report_removed(advice, options, settings)
    settings = ConfigSettings({name: setting for name, setting in settings.given.items() if name not in removed})
    strict_sections = [each for each in settings if each.name.startswith(tuple(f"{section}." for section in _SECTIONS))]
    option_tables.judge_options(
        advice,
        options,
        strict_sections,
        options.versions[-1],
        option_tables.OptionPolicy(prefix="", consequence="DeepSpeed refuses unknown keys in this section."),
    )
    others = [each for each in settings if each not in strict_sections]
    option_tables.judge_options(
        advice,
        options,
        others,
        options.versions[-1],
        option_tables.OptionPolicy(
            prefix="", consequence="DeepSpeed ignores unknown keys: the setting has no effect.", refuses_unknown=False
        ),
    )
    _check_auto_values(advice, settings, filled_by_trainer)
    _check_batch_sizes(advice, settings, world_size, filled_by_trainer)
    _check_precision(advice, settings)
    _check_zero(advice, settings)


def _report_removed(advice: ConfigFindings, options: OptionTable, settings: ConfigSettings) -> set[str]:
    """Reports sections and keys that DeepSpeed no longer accepts; returns the names of the settings inside them."""
    removed: set[str] = set()
    for name, renamed in options.renamed.items():
        within = [each.name for each in settings if each.name == name or each.name.startswith(f"{name}.")]
        if not renamed.refused or not within:
            continue
        instead = f"; use {' and '.join(renamed.to)} instead" if renamed.to else ""
        seen = f"{name} was removed from DeepSpeed{instead}"
        advice.error(
            "option-gone",
            seen,
            "DeepSpeed raises an error that names the key.",
            f"remove {name}",
            CONFIG_SOURCE,
            settings.location_of(*within),
        )
        removed.update(within)
    return removed


def _check_auto_values(advice: ConfigFindings, settings: ConfigSettings, filled_by_trainer: bool) -> None:
    for setting in settings:
        if setting.value != "auto" or setting.name in ("data_types.grad_accum_dtype",):
            continue
        if setting.name in _AUTO_FILLED and not filled_by_trainer:
            if not setting.name.startswith(_DEFAULT_FOR_AUTO):
                advice.warn(
                    "deepspeed-auto",
                    f'{setting.name} is "auto"',
                    'Only transformers\' Trainer and accelerate replace "auto"; DeepSpeed itself fails with this'
                    " text as a value.",
                    "write a number, unless a Trainer reads this file",
                    TRAINER_DEEPSPEED_SOURCE,
                    setting.location,
                )
        elif setting.name not in _AUTO_FILLED and not setting.name.startswith(_DEFAULT_FOR_AUTO):
            advice.error(
                "deepspeed-auto",
                f'{setting.name} is "auto"',
                "Neither the Trainer nor DeepSpeed replaces it.",
                "write a value",
                TRAINER_DEEPSPEED_SOURCE,
                setting.location,
            )


def _check_batch_sizes(
    advice: ConfigFindings, settings: ConfigSettings, world_size: int | None, filled_by_trainer: bool
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, accumulation = (settings.integer(name) for name in names)
    at = settings.location_of(*names)
    if not any(name in settings for name in names[:2]):
        if not filled_by_trainer:
            advice.error(
                "deepspeed-batch",
                "neither train_batch_size nor train_micro_batch_size_per_gpu is set",
                "DeepSpeed needs one of them.",
                '"train_micro_batch_size_per_gpu": 1',
                CONFIG_SOURCE,
                at,
            )
        return
    if train:
        _check_batch_product(advice, train, micro, accumulation, world_size, at)


def _check_batch_product(
    advice: ConfigFindings,
    train: int,
    micro: int | None,
    accumulation: int | None,
    world_size: int | None,
    at: ConfigLocation,
) -> None:
    """Checks that the batch is the product of micro-batch, accumulation and ranks, as far as they are known."""
    if world_size and (micro or accumulation) and train % (world_size * (micro or 1) * (accumulation or 1)):
        advice.error(
            "deepspeed-batch",
            f"train_batch_size {train} is not a multiple of micro-batch {micro or 1}"
            f" x accumulation {accumulation or 1} x {world_size} ranks",
            "DeepSpeed asserts that they are equal.",
            "remove one of the three settings; it follows from the others",
            CONFIG_SOURCE,
            at,
        )
    elif micro and accumulation and train % (micro * accumulation):
        advice.error(
            "deepspeed-batch",
            f"train_batch_size {train} is not a multiple of micro-batch {micro} x accumulation {accumulation}",
            "No number of ranks makes them equal.",
            "remove one of the three settings; it follows from the others",
            CONFIG_SOURCE,
            at,
        )
    elif micro and accumulation:
        ranks = train // (micro * accumulation)
        if world_size and ranks != world_size:
            advice.error(
                "deepspeed-batch",
                f"train_batch_size {train} = {micro} x {accumulation} x {ranks} ranks, but there are {world_size}",
                "DeepSpeed asserts that they are equal.",
                "remove train_batch_size",
                CONFIG_SOURCE,
                at,
            )
        elif not world_size:
            advice.note(
                "deepspeed-batch",
                f"train_batch_size {train} = {micro} x {accumulation} x {ranks}: this only runs on {ranks} ranks",
                "",
                "remove train_batch_size",
                CONFIG_SOURCE,
                at,
            )


def _check_precision(advice: ConfigFindings, settings: ConfigSettings) -> None:
    fp16, bf16 = settings.flag("fp16.enabled"), settings.flag("bf16.enabled")
    if fp16 and bf16:
        advice.error(
            "deepspeed-precision",
            "fp16 and bf16 are both on",
            "DeepSpeed allows only one of them.",
            '"fp16": {"enabled": false}',
            CONFIG_SOURCE,
            settings.location_of("fp16.enabled"),
        )
    if bf16 and settings.integer("fp16.loss_scale"):
        advice.note(
            "deepspeed-precision", "the loss scale is ignored with bf16", at=settings.location_of("fp16.loss_scale")
        )
    if settings.has_value("gradient_clipping") is False and settings.number("optimizer.params.max_grad_norm"):
        advice.warn(
            "deepspeed-clipping",
            "nothing reads optimizer.params.max_grad_norm",
            "",
            '"gradient_clipping": 1.0',
            CONFIG_SOURCE,
            settings.location_of("optimizer.params.max_grad_norm"),
        )


def _check_zero(advice: ConfigFindings, settings: ConfigSettings) -> None:
    stage = settings.integer(f"{ZERO_SECTION}.stage")
    if stage is not None and not 0 <= stage <= 3:
        advice.error(
            "deepspeed-stage",
            f"{ZERO_SECTION}.stage {stage}: stages are 0 to 3",
            "",
            "",
            MODELS_SOURCE,
            settings.location_of(f"{ZERO_SECTION}.stage"),
        )
        return
    _check_offload_devices(advice, settings, stage or 0)
    if stage == 3:
        _check_full_sharding(advice, settings)
    else:
        _check_partial_sharding(advice, settings, stage)


def _check_partial_sharding(advice: ConfigFindings, settings: ConfigSettings, stage: int | None) -> None:
    """Checks what has no effect, or is refused, without sharded parameters."""
    effective_stage = stage or 0
    param = settings.text(f"{ZERO_SECTION}.offload_param.device")
    if param in ("cpu", "nvme"):
        advice.warn(
            "deepspeed-offload",
            f"offload_param has no effect with stage {effective_stage}",
            "Only stage 3 offloads parameters.",
            f'"stage": 3, or remove {ZERO_SECTION}.offload_param',
            MODELS_SOURCE,
            settings.location_of(f"{ZERO_SECTION}.offload_param.device"),
        )
    unused = [setting.name for setting in settings if setting.name.startswith(f"{ZERO_SECTION}.stage3_")]
    if unused and stage is not None:
        advice.note(
            "deepspeed-stage",
            f"{', '.join(each.partition('.')[2] for each in unused)} have no effect with stage {effective_stage}",
            source=MODELS_SOURCE,
            at=settings.location_of(*unused),
        )
    if (settings.number(f"{ZERO_SECTION}.offload_optimizer.ratio") or 1.0) < 1.0:
        advice.error(
            "deepspeed-offload",
            f"offload_optimizer.ratio below 1 with stage {effective_stage}",
            "DeepSpeed requires stage 3 for this.",
            '"ratio": 1.0',
            MODELS_SOURCE,
            settings.location_of(f"{ZERO_SECTION}.offload_optimizer.ratio"),
        )


def _check_full_sharding(advice: ConfigFindings, settings: ConfigSettings) -> None:
    """Checks what stage 3 needs and does not know."""
    if (
        settings.flag(f"{ZERO_SECTION}.stage3_gather_16bit_weights_on_model_save") is not True
        and f"{ZERO_SECTION}.stage3_gather_fp16_weights_on_model_save" not in settings
    ):
        advice.warn(
            "zero3-save",
            "stage 3 without stage3_gather_16bit_weights_on_model_save",
            "save_model writes only shards for zero_to_fp32.py, which cannot be loaded as weights.",
            f'"stage3_gather_16bit_weights_on_model_save": true in {ZERO_SECTION}; saving gathers the weights, which'
            " requires a long enough timeout",
            SAVE_SOURCE,
            settings.location_of(f"{ZERO_SECTION}.stage"),
        )
    if settings.text("gradient_allreduce_op") == "sum":
        advice.error(
            "deepspeed-allreduce",
            "gradient_allreduce_op sum with stage 3",
            "DeepSpeed raises an error.",
            '"mean"',
            CONFIG_SOURCE,
            settings.location_of("gradient_allreduce_op"),
        )


def _check_offload_devices(advice: ConfigFindings, settings: ConfigSettings, stage: int) -> None:
    """Checks the devices to which parameters and optimizer states are offloaded."""
    param, optimizer = (settings.text(f"{ZERO_SECTION}.offload_{what}.device") for what in ("param", "optimizer"))
    for what, device in (("param", param), ("optimizer", optimizer)):
        if device == "nvme" and not settings.has_value(f"{ZERO_SECTION}.offload_{what}.nvme_path"):
            advice.error(
                "deepspeed-offload",
                f"offload_{what} to nvme without nvme_path",
                "",
                f'"nvme_path" in {ZERO_SECTION}.offload_{what}',
                MODELS_SOURCE,
                settings.location_of(f"{ZERO_SECTION}.offload_{what}.device"),
            )
        if device is not None and device not in ("cpu", "nvme", "none", "auto"):
            advice.error(
                "deepspeed-offload",
                f"{ZERO_SECTION}.offload_{what}.device {device} is not one of none, cpu, nvme",
                "",
                "",
                MODELS_SOURCE,
                settings.location_of(f"{ZERO_SECTION}.offload_{what}.device"),
            )
    if stage == 0 and optimizer in ("cpu", "nvme"):
        advice.warn(
            "deepspeed-offload",
            "offload_optimizer has no effect without ZeRO",
            "",
            '"stage": 1 or more',
            MODELS_SOURCE,
            settings.location_of(f"{ZERO_SECTION}.offload_optimizer.device"),
        )
