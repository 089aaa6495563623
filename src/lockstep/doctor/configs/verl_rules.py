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


def _batches(advice: ConfigFindings, run: VerlConfig) -> None:
    gpus, train, samples = run.gpus, run.whole("data.train_batch_size"), run.whole(f"{ROLLOUT}.n") or 1
    mini, dynamic = run.whole(f"{ACTOR}.ppo_mini_batch_size"), run.on(f"{ACTOR}.use_dynamic_bsz")
    same = model_parallel_ranks(run)
    if gpus and gpus % same:
        advice.error(
            "parallel-sizes",
            f"{gpus} GPUs are not a multiple of the {same} that share samples (sequence, tensor, pipeline and context"
            " parallel)",
            "The device mesh cannot be created.",
            "sizes whose product divides the GPUs",
            VALIDATION_SOURCE,
            run.at(
                f"{ACTOR}.ulysses_sequence_parallel_size",
                f"{ACTOR}.megatron.tensor_model_parallel_size",
                "trainer.n_gpus_per_node",
            ),
        )
        return
    ranks = gpus // same if gpus else None
    if train and gpus and not dynamic:
        least = (
            ranks * (run.whole(f"{ACTOR}.ppo_micro_batch_size_per_gpu") or 1)
            if run.engine == "megatron" and ranks
            else gpus
        )
        if train * samples % least:
            advice.error(
                "batch-ranks",
                f"{train} prompts x {samples} samples = {train * samples} are not a multiple of {least}, the smallest"
                f" batch of {gpus} GPUs",
                "verl asserts this at startup.",
                f"data.train_batch_size so that times {samples} it is a multiple of {least}",
                VALIDATION_SOURCE,
                run.at("data.train_batch_size", f"{ROLLOUT}.n", "trainer.n_gpus_per_node"),
            )
    if train and mini and train < mini and not dynamic:
        advice.error(
            "batch-mini",
            f"data.train_batch_size {train} is less than ppo_mini_batch_size {mini}",
            "verl refuses it.",
            f"{ACTOR}.ppo_mini_batch_size={train} or less",
            ACTOR_SOURCE,
            run.at(f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"),
        )
    elif train and mini and train % mini:
        advice.warn(
            "batch-mini",
            f"data.train_batch_size {train} is not a multiple of ppo_mini_batch_size {mini}",
            "The last optimizer step of each batch is smaller than the others, is padded, or fails.",
            f"{ACTOR}.ppo_mini_batch_size that divides {train}",
            ACTOR_SOURCE,
            run.at(f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size"),
        )
    _mini_batches(advice, run, ranks)


def _mini_batches(advice: ConfigFindings, run: VerlConfig, ranks: int | None) -> None:
    """Judges each rank's share of a mini-batch."""
    mini, samples = run.whole(f"{ACTOR}.ppo_mini_batch_size"), run.whole(f"{ROLLOUT}.n") or 1
    dynamic = run.on(f"{ACTOR}.use_dynamic_bsz")
    if mini and ranks and mini * samples % ranks:
        advice.error(
            "batch-mini-ranks",
            f"ppo_mini_batch_size {mini} x {samples} samples = {mini * samples} are not divisible by {ranks}"
            " data-parallel ranks",
            "Workers assert that each rank gets the same number.",
            f"{ACTOR}.ppo_mini_batch_size so that times {samples} it is a multiple of {ranks}",
            WORKERS_SOURCE,
            run.at(f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n"),
        )
        return
    micro = run.whole(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    if mini and ranks and micro and not dynamic and mini * samples // ranks % micro:
        advice.error(
            "batch-micro",
            f"each rank's {mini * samples // ranks} samples of a mini-batch are not a multiple of"
            f" ppo_micro_batch_size_per_gpu {micro}",
            "Workers assert this.",
            f"{ACTOR}.ppo_micro_batch_size_per_gpu that divides {mini * samples // ranks}",
            WORKERS_SOURCE,
            run.at(f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_mini_batch_size"),
        )


def _micro_batches(advice: ConfigFindings, run: VerlConfig) -> None:
    if run.on(f"{ACTOR}.use_dynamic_bsz"):
        _token_budget(advice, run)
        return
    groups = [(ACTOR, "ppo_micro_batch_size"), (ROLLOUT, "log_prob_micro_batch_size")]
    if run.on(f"{ACTOR}.use_kl_loss") or run.on("algorithm.use_kl_in_reward"):
        groups.append((REFERENCE, "log_prob_micro_batch_size"))
    for group, name in groups:
        old, new = f"{group}.{name}", f"{group}.{name}_per_gpu"
        given = [each for each in (old, new) if run.set(each)]
        if len(given) == 2:
            advice.error(
                "batch-micro-both",
                f"{name} and {name}_per_gpu are both set in {group}",
                "verl refuses it; the first one is deprecated.",
                f"remove {old}",
                VALIDATION_SOURCE,
                run.at(old),
            )
        elif not given:
            advice.error(
                "batch-micro-missing",
                f"neither {name} nor {name}_per_gpu is set in {group}",
                "verl refuses it unless use_dynamic_bsz is on.",
                f"{new}=1 or more",
                VALIDATION_SOURCE,
                run.at_start,
            )
        elif given == [old]:
            advice.warn(
                "batch-micro-old",
                f"{old} is deprecated: it counts over all GPUs",
                "",
                f"{new}",
                VALIDATION_SOURCE,
                run.at(old),
            )


def _token_budget(advice: ConfigFindings, run: VerlConfig) -> None:
    longest, same = verl_sequence_tokens(run), model_parallel_ranks(run) if run.engine == "dp" else 1
    for name in (
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
        f"{REFERENCE}.log_prob_max_token_len_per_gpu",
    ):
        budget = run.whole(name)
        if budget and longest and budget * same < longest and (name in run.settings or name.startswith(ACTOR)):
            advice.error(
                "length-budget",
                f"{name} {budget} x sequence parallel {same} is less than prompt + response = {longest} tokens",
                "verl asserts that the longest sequence fits into a micro-batch.",
                f"{name}={-(-longest // same)} or more",
                BALANCING_SOURCE,
                run.at(name, "data.max_response_length"),
            )


def _algorithm(advice: ConfigFindings, run: VerlConfig) -> None:
    estimator = run.text("algorithm.adv_estimator") or "gae"
    samples = run.whole(f"{ROLLOUT}.n")
    if estimator in GROUPED and samples == 1:
        advice.warn(
            "algorithm-group",
            f"algorithm.adv_estimator={estimator} with {ROLLOUT}.n=1",
            "It compares samples of one prompt; with a single sample the reward itself is the advantage, without a"
            " baseline.",
            f"{ROLLOUT}.n=8",
            ADVANTAGE_SOURCE,
            run.at(f"{ROLLOUT}.n", "algorithm.adv_estimator"),
        )
    if estimator == "gae" and "critic.model.path" not in run.settings and run.settings.given:
        how = "is gae" if "algorithm.adv_estimator" in run.settings else "is not set, which is gae"
        advice.warn(
            "algorithm-critic",
            f"algorithm.adv_estimator {how}, and critic.model.path is not set: {run.get('critic.model.path')} is"
            " loaded",
            "",
            "critic.model.path=..., or algorithm.adv_estimator=grpo",
            VALIDATION_SOURCE,
            run.at("algorithm.adv_estimator"),
        )
    if run.on("algorithm.use_kl_in_reward") and run.on(f"{ACTOR}.use_kl_loss"):
        advice.warn(
            "algorithm-kl",
            "KL is in the reward and in the loss",
            "verl applies both.",
            f"{ACTOR}.use_kl_loss=False or algorithm.use_kl_in_reward=False",
            VALIDATION_SOURCE,
            run.at(f"{ACTOR}.use_kl_loss"),
        )
    _rollout(advice, run)


def _rollout(advice: ConfigFindings, run: VerlConfig) -> None:
    numbers = tuple(int(part) for part in run.version.split(".")[:2])
    if run.text(f"{ROLLOUT}.mode") == "sync" and numbers >= (0, 7):
        advice.error(
            "rollout-mode",
            f"{ROLLOUT}.mode=sync was removed",
            "verl refuses it.",
            f"{ROLLOUT}.mode=async",
            ROLLOUT_SOURCE,
            run.at(f"{ROLLOUT}.mode"),
        )
    if numbers >= (0, 7) and f"{ROLLOUT}.name" not in run.settings:
        advice.error(
            "rollout-name",
            f"{ROLLOUT}.name has no default in verl {run.version}",
            "Hydra fails with: missing mandatory value.",
            f"{ROLLOUT}.name=vllm",
            ROLLOUT_SOURCE,
            run.at_start,
        )
    if run.on(f"{ROLLOUT}.val_kwargs.do_sample") and run.number(f"{ROLLOUT}.temperature") == 0:
        advice.error(
            "rollout-sampling",
            f"{ROLLOUT}.val_kwargs.do_sample with temperature 0",
            "verl asserts that the temperature is positive.",
            f"{ROLLOUT}.temperature=1.0",
            VALIDATION_SOURCE,
            run.at(f"{ROLLOUT}.temperature"),
        )


def _parallel(advice: ConfigFindings, run: VerlConfig) -> None:
    tensor, data, pipeline = (
        run.whole(f"{ROLLOUT}.{each}_parallel_size") or 1 for each in ("tensor_model", "data", "pipeline_model")
    )
    gpus, engine = run.gpus, tensor * data * pipeline
    standalone = (run.whole(f"{ROLLOUT}.nnodes") or 0) > 0
    if gpus and gpus % engine and not standalone:
        advice.error(
            "parallel-engine",
            f"{gpus} GPUs are not a multiple of the engine's tensor {tensor} x data {data} x pipeline {pipeline}"
            + ("" if f"{ROLLOUT}.tensor_model_parallel_size" in run.settings else " (2 is verl's default)"),
            "Workers assert this.",
            f"{ROLLOUT}.tensor_model_parallel_size that divides {gpus}",
            WORKERS_SOURCE,
            run.at(f"{ROLLOUT}.tensor_model_parallel_size", "trainer.n_gpus_per_node"),
        )
    if pipeline > 1:
        advice.error(
            "parallel-engine",
            f"{ROLLOUT}.pipeline_model_parallel_size={pipeline}: verl's engines do not support it",
            "It raises NotImplementedError.",
            f"{ROLLOUT}.pipeline_model_parallel_size=1",
            ROLLOUT_SOURCE,
            run.at(f"{ROLLOUT}.pipeline_model_parallel_size"),
        )
    expert = run.whole(f"{ROLLOUT}.expert_parallel_size") or 1
    if expert > 1 and expert != tensor * data and run.text(f"{ROLLOUT}.name") != "trtllm":
        advice.error(
            "parallel-engine",
            f"{ROLLOUT}.expert_parallel_size {expert} is not tensor {tensor} x data {data}",
            "verl asserts that they are equal.",
            f"{ROLLOUT}.expert_parallel_size={tensor * data}",
            ROLLOUT_SOURCE,
            run.at(f"{ROLLOUT}.expert_parallel_size"),
        )
    ulysses = f"{ACTOR}.ulysses_sequence_parallel_size"
    if (run.whole(ulysses) or 1) > 1 and not run.on("actor_rollout_ref.model.use_remove_padding"):
        advice.error(
            "parallel-ulysses",
            f"{ulysses}={run.whole(ulysses)} without actor_rollout_ref.model.use_remove_padding",
            "verl refuses it.",
            "actor_rollout_ref.model.use_remove_padding=True",
            ACTOR_SOURCE,
            run.at(ulysses),
        )
    size = run.whole(f"{ACTOR}.fsdp_config.fsdp_size")
    if gpus and size and size > 0 and gpus % size:
        advice.error(
            "parallel-sizes",
            f"{ACTOR}.fsdp_config.fsdp_size={size} does not divide {gpus} GPUs",
            "The device mesh cannot be created.",
            "a divisor, or -1",
            WORKERS_SOURCE,
            run.at(f"{ACTOR}.fsdp_config.fsdp_size"),
        )


def _lengths(advice: ConfigFindings, run: VerlConfig) -> None:
    longest, model = verl_sequence_tokens(run), run.whole(f"{ROLLOUT}.max_model_len")
    if longest and model and model < longest:
        advice.warn(
            "length-engine",
            f"{ROLLOUT}.max_model_len {model} is less than prompt {run.whole('data.max_prompt_length')} + response"
            f" {run.whole('data.max_response_length')} = {longest}",
            "Responses are truncated, or prompts refused, without any message.",
            f"{ROLLOUT}.max_model_len={longest}",
            SERVER_SOURCE,
            run.at(f"{ROLLOUT}.max_model_len"),
        )
    batched = run.whole(f"{ROLLOUT}.max_num_batched_tokens")
    chunked = run.settings.flag(f"{ROLLOUT}.enable_chunked_prefill")
    needed = model or longest
    if chunked is False and batched and needed and batched < needed:
        advice.error(
            "length-prefill",
            f"{ROLLOUT}.max_num_batched_tokens {batched} is less than {needed}, and chunked prefill is off",
            "verl refuses it: a prompt must fit into one batch.",
            f"{ROLLOUT}.enable_chunked_prefill=True or {ROLLOUT}.max_num_batched_tokens={needed}",
            SERVER_SOURCE,
            run.at(f"{ROLLOUT}.max_num_batched_tokens", f"{ROLLOUT}.enable_chunked_prefill"),
        )


VERL_RULES = (_batches, _micro_batches, _algorithm, _parallel, _lengths)


def judge_verl(
    advice: ConfigFindings,
    raw: ConfigSettings,
    program: str,
    config: str,
    at: ConfigLocation,
    variables: dict[str, ShellWord],
    folder: Path,
    gpu_gib: float | None,
    installed: str | None,
    other: bool,
) -> None:
    if program != VERL_PROGRAM and "main_ppo" not in program:
        advice.unchecked(
            "program-unknown",
            f"{program}: its options are not known; only those that it shares with main_ppo were checked",
            at=at,
        )
        other = True
    options = option_table("verl", VERL_PROGRAM)
    names = [setting.name for setting in raw if not setting.forced]
    version = options.version_for(names, installed)
    known = options.at(version)
    engine = verl_engine(raw, config)
    defaults = {name: option.default for name, option in known.items()}
    run = VerlConfig(ConfigSettings(raw.given, defaults), version, engine, at)
    groups = [setting for setting in raw if "@" not in setting.name and setting.name not in ("model_engine",)]
    option_tables.judge_options(
        advice,
        options,
        groups,
        version,
        option_tables.OptionSyntax("", "Hydra fails with: key is not in struct.", not installed, not other),
        strict=not other,
    )
    judge_engine_options(advice, run, known)
    how = f"{installed} is installed" if installed else "the version with most of its options"
    advice.add("version", "ok", f"options judged by verl {version} ({how})", at=at)
    for rule in VERL_RULES:
        rule(advice, run)
    judge_verl_memory(advice, run, folder, gpu_gib)
    shared_rules.judge_verl_timeout(advice, run.settings, variables, version, engine)
