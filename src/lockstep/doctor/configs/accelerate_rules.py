"""Rules for accelerate's YAML file."""

from lockstep.doctor.configs import option_tables
from lockstep.doctor.configs.config_files import ConfigDocument
from lockstep.doctor.configs.config_settings import ConfigFindings, ConfigSettings
from lockstep.doctor.configs.deepspeed_rules import load_deepspeed
from lockstep.doctor.configs.option_tables import option_table

CONFIG_SOURCE = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/commands/config/config_args.py"
PLUGIN_SOURCE = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py"
LAUNCH_SOURCE = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/commands/launch.py"
DEEPSPEED_SECTION = "deepspeed_config"
_EXCLUDED_BY_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)
"""Settings of deepspeed_config that accelerate refuses together with deepspeed_config_file."""
_TYPES = (
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
    "DEEPSPEED",
    "FSDP",
    "XLA",
    "MEGATRON_LM",
)


def judge_accelerate(advice: ConfigFindings, document: ConfigDocument) -> ConfigSettings:
    """Checks the file, adds findings to `advice`, and returns the settings in the file."""
    settings, options = load_deepspeed(document), option_table("accelerate", "config")
    top = [each for each in settings if "." not in each.name]
    within = [each for each in settings if "." in each.name]
    version = options.versions[-1]
    option_tables.judge_options(
        advice,
        options,
        top,
        version,
        option_tables.OptionPolicy(prefix="", consequence="accelerate refuses a file with unknown keys."),
    )
    option_tables.judge_options(
        advice,
        options,
        within,
        version,
        option_tables.OptionPolicy(
            prefix="", consequence="The launcher ignores it: the setting has no effect.", refuses_unknown=False
        ),
    )
    _check_processes(advice, settings, document)
    _check_deepspeed(advice, settings)
    _check_fsdp(advice, settings)
    return settings


def accelerate_zero_stage(settings: ConfigSettings) -> int | None:
    """The ZeRO stage that the file selects, or the stage that shards the same states as its FSDP strategy."""
    kind = settings.text("distributed_type")
    if kind == "DEEPSPEED":
        return (
            settings.integer(f"{DEEPSPEED_SECTION}.zero_stage")
            if not settings.has_value(f"{DEEPSPEED_SECTION}.deepspeed_config_file")
            else None
        )
    if kind == "FSDP":
        strategy = (
            settings.text("fsdp_config.fsdp_sharding_strategy")
            or settings.text("fsdp_config.fsdp_reshard_after_forward")
            or "FULL_SHARD"
        ).upper()
        return {
            "FULL_SHARD": 3,
            "1": 3,
            "TRUE": 3,
            "HYBRID_SHARD": 3,
            "SHARD_GRAD_OP": 2,
            "2": 2,
            "FALSE": 2,
            "NO_SHARD": 0,
            "3": 0,
        }.get(strategy)
    return 0 if kind in ("MULTI_GPU", "NO") else None


def _check_processes(advice: ConfigFindings, settings: ConfigSettings, document: ConfigDocument) -> None:
    kind = settings.text("distributed_type")
    if "distributed_type" not in settings:
        advice.error(
            "accelerate-type",
            "distributed_type is missing",
            "accelerate refuses such a file.",
            "distributed_type: MULTI_GPU",
            CONFIG_SOURCE,
            settings.location_of("num_processes"),
        )
    elif kind is not None and kind.upper() not in _TYPES:
        advice.error(
            "accelerate-type",
            f"distributed_type {kind} is not one of {', '.join(_TYPES)}",
            "",
            "",
            CONFIG_SOURCE,
            settings.location_of("distributed_type"),
        )
    processes, machines = settings.integer("num_processes"), settings.integer("num_machines") or 1
    if processes and processes > 0 and machines > 0 and processes % machines:
        advice.error(
            "accelerate-processes",
            f"num_processes {processes} is not a multiple of num_machines {machines}",
            "num_processes is the total of all machines, and each machine starts the same number.",
            f"num_processes: {machines * max(1, round(processes / machines))}",
            LAUNCH_SOURCE,
            settings.location_of("num_processes"),
        )
    if processes and processes > 1 and kind == "NO":
        advice.warn(
            "accelerate-type",
            f"{processes} processes with distributed_type NO",
            "Only one process is started.",
            "distributed_type: MULTI_GPU",
            LAUNCH_SOURCE,
            settings.location_of("distributed_type"),
        )
    _check_machines(advice, settings, machines)
    if settings.text("gpu_ids") not in (None, "all") and processes:
        ids = str(settings.get("gpu_ids")).count(",") + 1
        if ids * machines != processes:
            advice.warn(
                "accelerate-processes",
                f"gpu_ids names {ids} GPUs per machine, num_processes is {processes}",
                "",
                f"num_processes: {ids * machines}",
                LAUNCH_SOURCE,
                settings.location_of("gpu_ids"),
            )


def _check_machines(advice: ConfigFindings, settings: ConfigSettings, machines: int) -> None:
    """Checks the address of the first machine."""
    if machines > 1:
        address = settings.text("main_process_ip")
        if not address:
            advice.error(
                "accelerate-address",
                f"{machines} machines without main_process_ip",
                "The other machines cannot find the first one.",
                "main_process_ip: the first machine's address",
                LAUNCH_SOURCE,
                settings.location_of("num_machines"),
            )
        elif address in ("127.0.0.1", "localhost", "0.0.0.0", "::1"):
            advice.error(
                "accelerate-address",
                f"main_process_ip {address} with {machines} machines",
                "Each machine takes it for its own address, so each waits for the others.",
                "main_process_ip: the first machine's address",
                LAUNCH_SOURCE,
                settings.location_of("main_process_ip"),
            )
        if settings.integer("main_process_port") is None:
            advice.note(
                "accelerate-address",
                "main_process_port is not set: the default 29500 is used",
                at=settings.location_of("main_process_ip"),
            )


def _check_deepspeed(advice: ConfigFindings, settings: ConfigSettings) -> None:
    given = [each.name for each in settings if each.name.startswith(f"{DEEPSPEED_SECTION}.")]
    if given and settings.text("distributed_type") not in ("DEEPSPEED", None):
        advice.warn(
            "accelerate-section",
            f"deepspeed_config is ignored with distributed_type {settings.text('distributed_type')}",
            "",
            "distributed_type: DEEPSPEED",
            LAUNCH_SOURCE,
            settings.location_of(*given),
        )
    if settings.has_value(f"{DEEPSPEED_SECTION}.deepspeed_config_file"):
        both = [name for name in _EXCLUDED_BY_FILE if f"{DEEPSPEED_SECTION}.{name}" in settings]
        if both:
            advice.error(
                "accelerate-deepspeed-file",
                f"{', '.join(both)} together with deepspeed_config_file",
                "accelerate refuses them: they belong in the DeepSpeed file.",
                f"remove {', '.join(both)}",
                PLUGIN_SOURCE,
                settings.location_of(f"{DEEPSPEED_SECTION}.{both[0]}"),
            )
        if settings.has_value("mixed_precision") and settings.text("mixed_precision") not in ("no", "auto"):
            advice.error(
                "accelerate-deepspeed-file",
                "mixed_precision together with deepspeed_config_file",
                "accelerate refuses it: the DeepSpeed file sets the precision.",
                "remove mixed_precision",
                PLUGIN_SOURCE,
                settings.location_of("mixed_precision"),
            )
        return
    _check_zero(advice, settings)


def _check_zero(advice: ConfigFindings, settings: ConfigSettings) -> None:
    zero = settings.integer(f"{DEEPSPEED_SECTION}.zero_stage")
    if zero is not None and zero != 3:
        for name in ("zero3_init_flag", "zero3_save_16bit_model"):
            if settings.flag(f"{DEEPSPEED_SECTION}.{name}"):
                advice.warn(
                    "accelerate-zero3",
                    f"{name} with zero_stage {zero}",
                    "It only applies to stage 3.",
                    f"{name}: false",
                    PLUGIN_SOURCE,
                    settings.location_of(f"{DEEPSPEED_SECTION}.{name}"),
                )
        if settings.text(f"{DEEPSPEED_SECTION}.offload_param_device") in ("cpu", "nvme"):
            advice.warn(
                "deepspeed-offload",
                f"offload_param_device has no effect with zero_stage {zero}",
                "Only stage 3 offloads parameters.",
                "offload_param_device: none",
                PLUGIN_SOURCE,
                settings.location_of(f"{DEEPSPEED_SECTION}.offload_param_device"),
            )
    if zero == 3 and settings.flag(f"{DEEPSPEED_SECTION}.zero3_save_16bit_model") is not True:
        advice.warn(
            "zero3-save",
            "zero_stage 3 without zero3_save_16bit_model",
            "save_model writes only shards for zero_to_fp32.py, which cannot be loaded as weights.",
            "zero3_save_16bit_model: true",
            PLUGIN_SOURCE,
            settings.location_of(f"{DEEPSPEED_SECTION}.zero_stage"),
        )


def _check_fsdp(advice: ConfigFindings, settings: ConfigSettings) -> None:
    given = [each.name for each in settings if each.name.startswith("fsdp_config.")]
    if given and settings.text("distributed_type") not in ("FSDP", None):
        advice.warn(
            "accelerate-section",
            f"fsdp_config is ignored with distributed_type {settings.text('distributed_type')}",
            "",
            "distributed_type: FSDP",
            LAUNCH_SOURCE,
            settings.location_of(*given),
        )
    if (
        settings.flag("fsdp_config.fsdp_cpu_ram_efficient_loading")
        and "fsdp_config.fsdp_sync_module_states" in settings
        and not settings.flag("fsdp_config.fsdp_sync_module_states")
    ):
        advice.error(
            "accelerate-fsdp",
            "fsdp_cpu_ram_efficient_loading without fsdp_sync_module_states",
            "Only rank 0 loads the weights, and the other ranks do not get them.",
            "fsdp_sync_module_states: true",
            LAUNCH_SOURCE,
            settings.location_of("fsdp_config.fsdp_sync_module_states"),
        )
    if settings.integer("fsdp_config.fsdp_version") == 2 and settings.flag("fsdp_config.fsdp_forward_prefetch"):
        advice.error(
            "accelerate-fsdp",
            "fsdp_forward_prefetch with fsdp_version 2",
            "accelerate raises an error.",
            "fsdp_forward_prefetch: false",
            PLUGIN_SOURCE,
            settings.location_of("fsdp_config.fsdp_forward_prefetch"),
        )
    if (
        settings.text("fsdp_config.fsdp_state_dict_type") == "FULL_STATE_DICT"
        and (settings.integer("num_processes") or 0) > 8
    ):
        advice.note(
            "accelerate-fsdp",
            "with FULL_STATE_DICT, rank 0 gathers all weights at each checkpoint while the other ranks wait",
            "The timeout must be longer than that wait.",
            "fsdp_state_dict_type: SHARDED_STATE_DICT",
            LAUNCH_SOURCE,
            settings.location_of("fsdp_config.fsdp_state_dict_type"),
        )
