"""Rules about the generation of a job of TRL: vLLM in the same processes or as a server, or none."""

from lockstep.doctor.configs.config_settings import ConfigFindings
from lockstep.doctor.configs.trl_settings import TRLConfig, vllm_mode, zero_stage

GRPO_SOURCE = "https://github.com/huggingface/trl/blob/v1.16.0/trl/trainer/grpo_config.py"
ENGINE_SOURCE = "https://github.com/huggingface/trl/blob/v1.16.0/trl/generation/vllm_generation.py"


def judge_engine(advice: ConfigFindings, config: TRLConfig) -> None:
    """Checks how completions are generated: by vLLM, in which mode, or by transformers."""
    settings = config.settings
    if not settings.flag("use_vllm"):
        _check_generation_without_vllm(advice, config)
        return
    mode = vllm_mode(config)
    parallel = settings.integer("vllm_tensor_parallel_size") or 1
    if mode == "colocate":
        if config.world_size and config.world_size % parallel:
            advice.error(
                "parallel-engine",
                f"vllm_tensor_parallel_size {parallel} does not divide {config.world_size} processes",
                "TRL raises an error.",
                f"a divisor of {config.world_size}",
                ENGINE_SOURCE,
                config.location_of("vllm_tensor_parallel_size"),
            )
        server_options = [each.name for each in settings if each.name.startswith("vllm_server_")]
        if server_options:
            advice.warn(
                "engine-mode",
                f"{', '.join(server_options)} have no effect with vllm_mode colocate"
                + ("" if "vllm_mode" in settings else " (colocate is the default since TRL 1.0)"),
                "",
                "vllm_mode: server",
                GRPO_SOURCE,
                config.location_of(*server_options),
            )
    elif mode == "server":
        _check_server_engine(advice, config)
    if settings.flag("ds3_gather_for_generation") is False:
        advice.note(
            "zero3-generation",
            "ds3_gather_for_generation has no effect with vLLM",
            at=config.location_of("ds3_gather_for_generation"),
        )
    _check_engine_lengths(advice, config)


def _check_generation_without_vllm(advice: ConfigFindings, config: TRLConfig) -> None:
    """Reports vLLM's options without vLLM, and slow generation."""
    settings = config.settings
    unused = [each.name for each in settings if each.name.startswith("vllm_")]
    if unused and settings.get("use_vllm") is not None and "use_vllm" not in settings:
        advice.warn(
            "engine-unused",
            f"{', '.join(unused)} have no effect without use_vllm: transformers generates the completions",
            "transformers is several times slower.",
            "use_vllm: true",
            GRPO_SOURCE,
            config.location_of(*unused),
        )
    if zero_stage(config) == 3:
        advice.warn(
            "zero3-generation",
            "ZeRO-3 without vLLM: weights are gathered on every GPU, or layer by layer for each token",
            "It is slow, needs memory for the whole model on each GPU (ds3_gather_for_generation), and ranks that"
            " finish early must keep taking part.",
            "use_vllm: true",
            GRPO_SOURCE,
            config.location_of("use_vllm"),
        )


def _check_server_engine(advice: ConfigFindings, config: TRLConfig) -> None:
    """Checks the options of an engine in a separate server."""
    settings = config.settings
    engine_options = [
        name
        for name in (
            "vllm_gpu_memory_utilization",
            "vllm_tensor_parallel_size",
            "vllm_max_model_length",
            "vllm_enable_sleep_mode",
        )
        if name in settings
    ]
    if engine_options:
        advice.warn(
            "engine-mode",
            f"{', '.join(engine_options)} have no effect with vllm_mode server",
            "The server has its own options.",
            "trl vllm-serve --gpu_memory_utilization ... --tensor_parallel_size ...",
            GRPO_SOURCE,
            config.location_of(*engine_options),
        )
    host = settings.text("vllm_server_host")
    machines = config.accelerate.integer("num_machines") if config.accelerate is not None else None
    if (
        (machines or 1) > 1
        and host in ("0.0.0.0", "localhost", "127.0.0.1", None)
        and not settings.has_value("vllm_server_base_url")
    ):
        advice.warn(
            "engine-address",
            f"vllm_server_host is {host or '0.0.0.0, its default'} with {machines} machines",
            "Rank 0 calls the server and sends it the weights, so it must reach the server at this address.",
            "vllm_server_host: the server's address",
            GRPO_SOURCE,
            config.location_of("vllm_server_host"),
        )


def _check_engine_lengths(advice: ConfigFindings, config: TRLConfig) -> None:
    settings = config.settings
    prompt, completion = settings.integer("max_prompt_length"), settings.integer("max_completion_length")
    longest = settings.integer("vllm_max_model_length") or settings.integer("vllm_max_model_len")
    if longest and completion and completion + (prompt or 1) > longest:
        advice.error(
            "length-engine",
            f"vllm_max_model_length {longest} is less than a prompt{f' of {prompt}' if prompt else ''} with"
            f" max_completion_length {completion}",
            "vLLM rejects such prompts, or truncates completions.",
            f"vllm_max_model_length: {completion + (prompt or 1024)}",
            GRPO_SOURCE,
            config.location_of("vllm_max_model_length", "max_completion_length"),
        )
