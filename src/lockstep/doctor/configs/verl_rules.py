"""Rules for verl's main_ppo: batches, algorithm, parallel sizes, lengths."""

from pathlib import Path

from lockstep.doctor.configs import option_tables, shared_rules
from lockstep.doctor.configs.config_settings import ConfigFindings, ConfigLocation, ConfigSettings
from lockstep.doctor.configs.option_tables import option_table
from lockstep.doctor.configs.shell_scripts import ShellWord
from lockstep.doctor.configs.verl_settings import (
    ACTOR,
    REFERENCE,
    ROLLOUT,
    VALIDATION_SOURCE,
    VERL_PROGRAM,
    VerlConfig,
    judge_engine_options,
    judge_verl_memory,
    model_parallel_ranks,
    verl_engine,
    verl_sequence_tokens,
)

ACTOR_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/config/actor.py"


ROLLOUT_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/config/rollout.py"


WORKERS_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/engine_workers.py"


BALANCING_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/seqlen_balancing.py"


SERVER_SOURCE = (
    "https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/rollout/vllm_rollout/vllm_async_server.py"
)


ADVANTAGE_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/trainer/ppo/core_algos.py"


GROUPED = (
    "grpo",
    "rloo",
    "grpo_passk",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
    "rloo_vectorized",
    "grpo_vectorized",
)


def _check_batches(advice: ConfigFindings, config: VerlConfig) -> None:
    gpus, train, samples = config.gpus, config.integer("data.train_batch_size"), config.integer(f"{ROLLOUT}.n") or 1
    model_parallel = model_parallel_ranks(config)
    if gpus and gpus % model_parallel:
        advice.error(
            "parallel-sizes",
            f"{gpus} GPUs are not a multiple of the {model_parallel} that process the same samples (sequence, tensor,"
            " pipeline and context parallel)",
            "The device mesh cannot be created.",
            "sizes whose product divides the number of GPUs",
            VALIDATION_SOURCE,
            config.location_of(
                f"{ACTOR}.ulysses_sequence_parallel_size",
                f"{ACTOR}.megatron.tensor_model_parallel_size",
                "trainer.n_gpus_per_node",
            ),
        )
        return
    ranks = gpus // model_parallel if gpus else None
    if train and gpus and not config.on(f"{ACTOR}.use_dynamic_bsz"):
        least = (
            ranks * (config.integer(f"{ACTOR}.ppo_micro_batch_size_per_gpu") or 1)
            if config.engine == "megatron" and ranks
            else gpus
        )
        if train * samples % least:
            advice.error(
                "batch-ranks",
                f"{train} prompts x {samples} samples = {train * samples} are not a multiple of {least}, the smallest"
                f" batch of {gpus} GPUs",
                "verl fails with an assertion at startup.",
                f"data.train_batch_size such that data.train_batch_size x {samples} is a multiple of {least}",
                VALIDATION_SOURCE,
                config.location_of("data.train_batch_size", f"{ROLLOUT}.n", "trainer.n_gpus_per_node"),
            )
    _check_optimizer_batches(advice, config)
    _check_mini_batches(advice, config, ranks)


def _check_optimizer_batches(advice: ConfigFindings, config: VerlConfig) -> None:
    train, mini = config.integer("data.train_batch_size"), config.integer(f"{ACTOR}.ppo_mini_batch_size")
    if train and mini and train < mini and not config.on(f"{ACTOR}.use_dynamic_bsz"):
        advice.error(
            "batch-mini",
            f"data.train_batch_size {train} is less than ppo_mini_batch_size {mini}",
            "verl raises an error.",
            f"{ACTOR}.ppo_mini_batch_size={train} or less",
            ACTOR_SOURCE,
            config.location_of(f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"),
        )
    elif train and mini and train % mini:
        advice.warn(
            "batch-mini",
            f"data.train_batch_size {train} is not a multiple of ppo_mini_batch_size {mini}",
            "The last optimizer step of each batch is smaller than the others, is padded, or fails.",
            f"{ACTOR}.ppo_mini_batch_size that divides {train}",
            ACTOR_SOURCE,
            config.location_of(f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"),
        )


def _check_mini_batches(advice: ConfigFindings, config: VerlConfig, ranks: int | None) -> None:
    """Checks each rank's share of a mini-batch."""
    mini, samples = config.integer(f"{ACTOR}.ppo_mini_batch_size"), config.integer(f"{ROLLOUT}.n") or 1
    dynamic = config.on(f"{ACTOR}.use_dynamic_bsz")
    if mini and ranks and mini * samples % ranks:
        advice.error(
            "batch-mini-ranks",
            f"ppo_mini_batch_size {mini} x {samples} samples = {mini * samples} are not divisible by {ranks}"
            " data-parallel ranks",
            "Workers assert that each rank gets the same number.",
            f"{ACTOR}.ppo_mini_batch_size such that ppo_mini_batch_size x {samples} is a multiple of {ranks}",
            WORKERS_SOURCE,
            config.location_of(f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n"),
        )
        return
    micro = config.integer(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if mini and ranks and micro and not dynamic and mini * samples // ranks % micro:
        advice.error(
            "batch-micro",
            f"each rank's {mini * samples // ranks} samples of a mini-batch are not a multiple of"
            f" ppo_micro_batch_size_per_gpu {micro}",
            "The workers fail with an assertion.",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu that divides {mini * samples // ranks}",
            WORKERS_SOURCE,
            config.location_of(f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_mini_batch_size"),
        )


def _check_micro_batches(advice: ConfigFindings, config: VerlConfig) -> None:
    if config.on(f"{ACTOR}.use_dynamic_bsz"):
        _check_token_budget(advice, config)
        return
    groups = [(ACTOR, "ppo_micro_batch_size"), (ROLLOUT, "log_prob_micro_batch_size")]
    if config.on(f"{ACTOR}.use_kl_loss") or config.on("algorithm.use_kl_in_reward"):
        groups.append((REFERENCE, "log_prob_micro_batch_size"))
    for group, name in groups:
        old, new = f"{group}.{name}", f"{group}.{name}_per_gpu"
        given = [each for each in (old, new) if config.has_value(each)]
        if len(given) == 2:
            advice.error(
                "batch-micro-both",
                f"{name} and {name}_per_gpu are both set in {group}",
                "verl raises an error; the first option is deprecated.",
                f"remove {old}",
                VALIDATION_SOURCE,
                config.location_of(old),
            )
        elif not given:
            advice.error(
                "batch-micro-missing",
                f"neither {name} nor {name}_per_gpu is set in {group}",
                "verl raises an error unless use_dynamic_bsz is on.",
                f"{new}=1 or more",
                VALIDATION_SOURCE,
                config.location,
            )
        elif given == [old]:
            advice.warn(
                "batch-micro-old",
                f"{old} is deprecated: it is the total of all GPUs",
                "",
                f"{new}",
                VALIDATION_SOURCE,
                config.location_of(old),
            )


def _check_token_budget(advice: ConfigFindings, config: VerlConfig) -> None:
    longest, model_parallel = verl_sequence_tokens(config), model_parallel_ranks(config) if config.engine == "dp" else 1
    for name in (
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        f"{REFERENCE}.log_prob_max_token_len_per_gpu",
    ):
        budget = config.integer(name)
        if (
            budget
            and longest
            and budget * model_parallel < longest
            and (name in config.settings or name.startswith(ACTOR))
        ):
            advice.error(
                "length-budget",
                f"{name} {budget} x sequence parallel {model_parallel} is less than prompt + response = {longest}"
                " tokens",
                "verl asserts that the longest sequence fits into a micro-batch.",
                f"{name}={-(-longest // model_parallel)} or more",
                BALANCING_SOURCE,
                config.location_of(name, "data.max_response_length"),
            )


def _check_algorithm(advice: ConfigFindings, config: VerlConfig) -> None:
    estimator = config.text("algorithm.adv_estimator") or "gae"
    samples = config.integer(f"{ROLLOUT}.n")
    if estimator in GROUPED and samples == 1:
        advice.warn(
            "algorithm-group",
            f"algorithm.adv_estimator={estimator} with {ROLLOUT}.n=1",
            "The estimator compares the samples of a prompt. With a single sample, the advantage is the reward itself,"
            " without a baseline.",
            f"{ROLLOUT}.n=8",
            ADVANTAGE_SOURCE,
            config.location_of(f"{ROLLOUT}.n", "algorithm.adv_estimator"),
        )
    if estimator == "gae" and "critic.model.path" not in config.settings and config.settings.given:
        state = "is gae" if "algorithm.adv_estimator" in config.settings else "is not set, and its default is gae"
        advice.warn(
            "algorithm-critic",
            f"algorithm.adv_estimator {state}, and critic.model.path is not set: the critic is"
            f" {config.get('critic.model.path')}",
            "",
            "critic.model.path=..., or algorithm.adv_estimator=grpo",
            VALIDATION_SOURCE,
            config.location_of("algorithm.adv_estimator"),
        )
    if config.on("algorithm.use_kl_in_reward") and config.on(f"{ACTOR}.use_kl_loss"):
        advice.warn(
            "algorithm-kl",
            "the KL penalty is in the reward and in the loss",
            "verl applies both.",
            f"{ACTOR}.use_kl_loss=False or algorithm.use_kl_in_reward=False",
            VALIDATION_SOURCE,
            config.location_of(f"{ACTOR}.use_kl_loss"),
        )
    _check_rollout(advice, config)


def _check_rollout(advice: ConfigFindings, config: VerlConfig) -> None:
    numbers = tuple(int(part) for part in config.version.split(".")[:2])
    if config.text(f"{ROLLOUT}.mode") == "sync" and numbers >= (0, 7):
        advice.error(
            "rollout-mode",
            f"{ROLLOUT}.mode=sync was removed",
            "verl raises an error.",
            f"{ROLLOUT}.mode=async",
            ROLLOUT_SOURCE,
            config.location_of(f"{ROLLOUT}.mode"),
        )
    if numbers >= (0, 7) and f"{ROLLOUT}.name" not in config.settings:
        advice.error(
            "rollout-name",
            f"{ROLLOUT}.name has no default in verl {config.version}",
            "Hydra fails with: missing mandatory value.",
            f"{ROLLOUT}.name=vllm",
            ROLLOUT_SOURCE,
            config.location,
        )
    if config.on(f"{ROLLOUT}.val_kwargs.do_sample") and config.number(f"{ROLLOUT}.temperature") == 0:
        advice.error(
            "rollout-sampling",
            f"{ROLLOUT}.val_kwargs.do_sample with temperature 0",
            "verl asserts that the temperature is positive.",
            f"{ROLLOUT}.temperature=1.0",
            VALIDATION_SOURCE,
            config.location_of(f"{ROLLOUT}.temperature"),
        )


def _check_parallel_sizes(advice: ConfigFindings, config: VerlConfig) -> None:
    tensor, data, pipeline = (
        config.integer(f"{ROLLOUT}.{each}_parallel_size") or 1 for each in ("tensor_model", "data", "pipeline_model")
    )
    gpus, engine = config.gpus, tensor * data * pipeline
    standalone = (config.integer(f"{ROLLOUT}.nnodes") or 0) > 0
    if gpus and gpus % engine and not standalone:
        advice.error(
            "parallel-engine",
            f"{gpus} GPUs are not a multiple of the engine's tensor {tensor} x data {data} x pipeline {pipeline}"
            + ("" if f"{ROLLOUT}.tensor_model_parallel_size" in config.settings else " (2 is verl's default)"),
            "The workers fail with an assertion.",
            f"{ROLLOUT}.tensor_model_parallel_size that divides {gpus}",
            WORKERS_SOURCE,
            config.location_of(f"{ROLLOUT}.tensor_model_parallel_size", "trainer.n_gpus_per_node"),
        )
    if pipeline > 1:
        advice.error(
            "parallel-engine",
            f"{ROLLOUT}.pipeline_model_parallel_size={pipeline}: verl's engines do not support it",
            "It raises NotImplementedError.",
            f"{ROLLOUT}.pipeline_model_parallel_size=1",
            ROLLOUT_SOURCE,
            config.location_of(f"{ROLLOUT}.pipeline_model_parallel_size"),
        )
    expert = config.integer(f"{ROLLOUT}.expert_parallel_size") or 1
    if expert > 1 and expert != tensor * data and config.text(f"{ROLLOUT}.name") != "trtllm":
        advice.error(
            "parallel-engine",
            f"{ROLLOUT}.expert_parallel_size {expert} is not tensor {tensor} x data {data}",
            "verl asserts that they are equal.",
            f"{ROLLOUT}.expert_parallel_size={tensor * data}",
            ROLLOUT_SOURCE,
            config.location_of(f"{ROLLOUT}.expert_parallel_size"),
        )
    _check_actor_sizes(advice, config)


def _check_actor_sizes(advice: ConfigFindings, config: VerlConfig) -> None:
    ulysses = f"{ACTOR}.ulysses_sequence_parallel_size"
    if (config.integer(ulysses) or 1) > 1 and not config.on("actor_rollout_ref.model.use_remove_padding"):
        advice.error(
            "parallel-ulysses",
            f"{ulysses}={config.integer(ulysses)} without actor_rollout_ref.model.use_remove_padding",
            "verl raises an error.",
            "actor_rollout_ref.model.use_remove_padding=True",
            ACTOR_SOURCE,
            config.location_of(ulysses),
        )
    size = config.integer(f"{ACTOR}.fsdp_config.fsdp_size")
    if config.gpus and size and size > 0 and config.gpus % size:
        advice.error(
            "parallel-sizes",
            f"{ACTOR}.fsdp_config.fsdp_size={size} does not divide {config.gpus} GPUs",
            "The device mesh cannot be created.",
            "a divisor, or -1",
            WORKERS_SOURCE,
            config.location_of(f"{ACTOR}.fsdp_config.fsdp_size"),
        )


def _check_lengths(advice: ConfigFindings, config: VerlConfig) -> None:
    longest, model = verl_sequence_tokens(config), config.integer(f"{ROLLOUT}.max_model_len")
    if longest and model and model < longest:
        advice.warn(
            "length-engine",
            f"{ROLLOUT}.max_model_len {model} is less than prompt {config.integer('data.max_prompt_length')} + response"
            f" {config.integer('data.max_response_length')} = {longest}",
            "Responses are truncated, or prompts rejected, without any message.",
            f"{ROLLOUT}.max_model_len={longest}",
            SERVER_SOURCE,
            config.location_of(f"{ROLLOUT}.max_model_len"),
        )
    batched = config.integer(f"{ROLLOUT}.max_num_batched_tokens")
    chunked = config.settings.flag(f"{ROLLOUT}.enable_chunked_prefill")
    needed = model or longest
    if chunked is False and batched and needed and batched < needed:
        advice.error(
            "length-prefill",
            f"{ROLLOUT}.max_num_batched_tokens {batched} is less than {needed}, and chunked prefill is off",
            "verl raises an error: a prompt must fit into one batch.",
            f"{ROLLOUT}.enable_chunked_prefill=True or {ROLLOUT}.max_num_batched_tokens={needed}",
            SERVER_SOURCE,
            config.location_of(f"{ROLLOUT}.max_num_batched_tokens", f"{ROLLOUT}.enable_chunked_prefill"),
        )


VERL_RULES = (_check_batches, _check_micro_batches, _check_algorithm, _check_parallel_sizes, _check_lengths)


def judge_verl(
    advice: ConfigFindings,
    raw: ConfigSettings,
    program: str,
    config_name: str,
    at: ConfigLocation,
    variables: dict[str, ShellWord],
    folder: Path,
    gpu_gib: float | None,
    installed: str | None,
    other_defaults: bool,
) -> None:
    """Judges verl's settings.

    Args:
        raw: the given settings.
        config_name: Hydra's option `--config-name`; empty without it.
        at: location of the command or file.
        other_defaults: whether the defaults are not main_ppo's, so that unknown options may be valid.
    """
    if program != VERL_PROGRAM and "main_ppo" not in program:
        advice.unchecked(
            "program-unknown",
            f"the options of {program} are not known; only those that it shares with main_ppo were checked",
            at=at,
        )
        other_defaults = True
    options = option_table("verl", VERL_PROGRAM)
    names = [setting.name for setting in raw if not setting.forced]
    version = options.version_for(names, installed)
    known = options.at(version)
    engine = verl_engine(raw, config_name)
    defaults = {name: option.default for name, option in known.items()}
    config = VerlConfig(ConfigSettings(raw.given, defaults), version, engine, at)
    groups = [setting for setting in raw if "@" not in setting.name and setting.name not in ("model_engine",)]
    option_tables.judge_options(
        advice,
        options,
        groups,
        version,
        option_tables.OptionPolicy("", "Hydra fails with: key is not in struct.", not installed, not other_defaults),
        strict=not other_defaults,
    )
    judge_engine_options(advice, config, known)
    version_source = f"{installed} is installed" if installed else "the version that knows most of the options"
    advice.add("version", "ok", f"options judged by those of verl {version} ({version_source})", at=at)
    for rule in VERL_RULES:
        rule(advice, config)
    judge_verl_memory(advice, config, folder, gpu_gib)
    shared_rules.judge_verl_timeout(advice, config.settings, variables, version, engine)
