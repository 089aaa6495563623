"""Rules for OpenRLHF's train_ppo_ray: placement, batches, algorithm, engines, lengths."""

from pathlib import Path

from lockstep.doctor.configs import model_memory, option_tables, shared_rules
from lockstep.doctor.configs.config_settings import ConfigFindings, ConfigSettings
from lockstep.doctor.configs.openrlhf_settings import (
    BATCH_SOURCE,
    OpenRLHFConfig,
    judge_openrlhf_environment,
    judge_openrlhf_memory,
    judge_openrlhf_version,
    judge_supervised_memory,
    openrlhf_sequence_tokens,
)
from lockstep.doctor.configs.option_tables import option_programs, option_table
from lockstep.doctor.configs.training_commands import TrainingCommand, add_arguments

PARSER_SOURCE = "https://github.com/OpenRLHF/OpenRLHF/blob/v0.11.2/openrlhf/cli/train_ppo_ray.py"


GROUPED = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")


def _check_placement(advice: ConfigFindings, config: OpenRLHFConfig, job: TrainingCommand) -> None:
    """Checks which roles share GPUs, and how many."""
    actor, ref = config.gpus("actor"), config.gpus("ref")
    engines, parallel = config.integer("vllm.num_engines"), config.integer("vllm.tensor_parallel_size") or 1
    all_together, asynchronous = config.on("train.colocate_all"), config.on("train.async_enable")
    kl = config.settings.number(config.name("algo.kl.init_coef"))
    if all_together and not asynchronous and actor and engines and engines * parallel != actor:
        advice.error(
            "placement-colocate",
            f"{config.shown('train.colocate_all')}: engines use {engines} x {parallel} GPUs, the actor has {actor}",
            "OpenRLHF asserts that they are equal.",
            f"{config.shown('vllm.num_engines')} {max(1, actor // parallel)}",
            PARSER_SOURCE,
            config.location_of("vllm.num_engines", "train.colocate_all", job=job),
        )
    if (all_together or config.on("train.colocate_actor_ref")) and kl and actor and ref and actor != ref:
        advice.error(
            "placement-colocate",
            f"actor and reference share GPUs but have {actor} and {ref}",
            "OpenRLHF asserts that they are equal.",
            "the same nodes and GPUs for both",
            PARSER_SOURCE,
            config.location_of("ref.num_gpus_per_node", "actor.num_gpus_per_node", job=job),
        )
    critic, reward = config.gpus("critic"), config.gpus("reward")
    if config.on("train.colocate_critic_reward") and critic and reward and critic != reward and _needs_critic(config):
        advice.error(
            "placement-colocate",
            f"critic and reward model share GPUs but have {critic} and {reward}",
            "OpenRLHF asserts that they are equal.",
            "the same nodes and GPUs for both",
            PARSER_SOURCE,
            config.location_of("critic.num_gpus_per_node", job=job),
        )
    _check_asynchronous(advice, config, job)
    ring, tensor = config.integer("ds.ring_attn_size") or 1, config.integer("ds.tensor_parallel_size") or 1
    if actor and actor % (ring * tensor):
        advice.error(
            "parallel-sizes",
            f"{actor} GPUs of the actor are not a multiple of ring attention {ring} x tensor parallel {tensor}",
            "The device mesh cannot be created.",
            "sizes whose product divides the number of GPUs",
            BATCH_SOURCE,
            config.location_of("ds.ring_attn_size", "ds.tensor_parallel_size", job=job),
        )


def _check_asynchronous(advice: ConfigFindings, config: OpenRLHFConfig, job: TrainingCommand) -> None:
    """Checks options about shared GPUs that asynchronous generation excludes."""
    all_together, asynchronous = config.on("train.colocate_all"), config.on("train.async_enable")
    engines, parallel = config.integer("vllm.num_engines"), config.integer("vllm.tensor_parallel_size") or 1
    if all_together and asynchronous:
        advice.note(
            "placement-async",
            f"{config.shown('train.colocate_all')} with {config.shown('train.async_enable')} does not colocate the"
            f" engines: they need {(engines or 0) * parallel} GPUs of their own",
            "Ray waits forever if the cluster does not have these GPUs.",
            "provide GPUs for the engines in addition to the trainer's",
            PARSER_SOURCE,
            config.location_of("train.async_enable", job=job),
        )
    if config.on("vllm.enable_sleep") and not all_together:
        advice.note(
            "engine-sleep",
            f"{config.shown('vllm.enable_sleep')} is ignored without {config.shown('train.colocate_all')}",
            source=PARSER_SOURCE,
            at=config.location_of("vllm.enable_sleep", job=job),
        )
    if config.on("vllm.enable_sleep") and all_together and asynchronous:
        advice.error(
            "engine-sleep",
            f"{config.shown('vllm.enable_sleep')} with {config.shown('train.async_enable')}",
            "OpenRLHF fails with an assertion.",
            f"drop {config.shown('vllm.enable_sleep')}",
            PARSER_SOURCE,
            config.location_of("vllm.enable_sleep", job=job),
        )


def _needs_critic(config: OpenRLHFConfig) -> bool:
    return (config.text("algo.advantage.estimator") or "gae") == "gae"


def _data_parallel_ranks(config: OpenRLHFConfig) -> int | None:
    actor = config.gpus("actor")
    parts = (config.integer("ds.ring_attn_size") or 1) * (config.integer("ds.tensor_parallel_size") or 1)
    return actor // parts if actor and actor >= parts else None


def _check_batches(advice: ConfigFindings, config: OpenRLHFConfig, job: TrainingCommand) -> None:
    ranks, train, micro = (
        _data_parallel_ranks(config),
        config.integer("train.batch_size"),
        config.integer("train.micro_batch_size"),
    )
    dynamic = config.on("train.dynamic_batch_enable")
    if ranks and train and micro and not dynamic and train % (micro * ranks):
        advice.error(
            "batch-accumulation",
            f"{config.shown('train.batch_size')} {train} is not a multiple of {config.shown('train.micro_batch_size')} "
            f"{micro} x"
            f" {ranks} data-parallel ranks",
            "DeepSpeed asserts train batch = micro batch x accumulation x ranks.",
            f"a multiple of {micro * ranks}",
            BATCH_SOURCE,
            config.location_of("train.batch_size", "train.micro_batch_size", job=job),
        )
    _check_rollout_batches(advice, config, job)


def _check_rollout_batches(advice: ConfigFindings, config: OpenRLHFConfig, job: TrainingCommand) -> None:
    """Checks how the samples of a step divide into ranks and optimizer batches."""
    ranks, train = _data_parallel_ranks(config), config.integer("train.batch_size")
    prompts, samples = config.integer("rollout.batch_size"), config.integer("rollout.n_samples_per_prompt")
    rollout_micro = config.integer("rollout.micro_batch_size")
    if not (prompts and samples):
        return
    rollout = prompts * samples
    if ranks and rollout_micro and rollout // rollout_micro < ranks:
        advice.error(
            "batch-ranks",
            f"{rollout} samples in micro-batches of {rollout_micro} are fewer than {ranks} ranks",
            "OpenRLHF asserts that each rank gets one.",
            f"a larger {config.shown('rollout.batch_size')} or a smaller {config.shown('rollout.micro_batch_size')}",
            PARSER_SOURCE,
            config.location_of("rollout.batch_size", "rollout.micro_batch_size", job=job),
        )
    if ranks and rollout % ranks:
        advice.warn(
            "batch-uneven",
            f"{prompts} prompts x {samples} samples = {rollout} are not divisible by {ranks} ranks",
            "Ranks get different numbers of samples; those that run out wait in a collective, or samples are dropped.",
            f"{config.shown('rollout.batch_size')} so that prompts x samples is a multiple of {ranks}",
            BATCH_SOURCE,
            config.location_of("rollout.batch_size", "rollout.n_samples_per_prompt", job=job),
        )
    if train:
        _check_optimizer_batches(advice, config, job, rollout, train)
    at_once = config.integer("rollout.vllm_generate_batch_size")
    if at_once and at_once > prompts and not config.on("train.async_enable"):
        advice.error(
            "batch-oversampling",
            f"{config.shown('rollout.vllm_generate_batch_size')} {at_once} is more than"
            f" {config.shown('rollout.batch_size')} {prompts}",
            "More prompts than one step uses are only possible with asynchronous training.",
            config.shown("train.async_enable"),
            PARSER_SOURCE,
            config.location_of("rollout.vllm_generate_batch_size", job=job),
        )


def _check_optimizer_batches(
    advice: ConfigFindings, config: OpenRLHFConfig, job: TrainingCommand, rollout: int, train: int
) -> None:
    """Checks how the samples of a step divide into batches of the optimizer."""
    if rollout < train:
        advice.warn(
            "batch-train",
            f"a step generates {rollout} samples, but {config.shown('train.batch_size')} is {train}",
            "Each rollout has too few samples for an optimizer step, so gradients accumulate over several rollouts.",
            f"{config.shown('train.batch_size')} of at most {rollout}",
            BATCH_SOURCE,
            config.location_of("train.batch_size", job=job),
        )
    elif rollout % train and not config.on("train.dynamic_batch_enable"):
        advice.warn(
            "batch-train",
            f"{rollout} samples of a step are not a multiple of {config.shown('train.batch_size')} {train}",
            "The remainder is dropped, or its gradients go into the next step.",
            f"{config.shown('train.batch_size')} that divides {rollout}",
            BATCH_SOURCE,
            config.location_of("train.batch_size", job=job),
        )


def _check_algorithm(advice: ConfigFindings, config: OpenRLHFConfig, job: TrainingCommand) -> None:
    estimator = config.text("algo.advantage.estimator") or "gae"
    samples = config.integer("rollout.n_samples_per_prompt")
    if estimator in GROUPED and samples == 1:
        advice.error(
            "algorithm-group",
            f"{estimator} with one sample per prompt",
            "This estimator compares the samples of a prompt: with a single sample all advantages are 0.",
            f"{config.shown('rollout.n_samples_per_prompt')} 8",
            PARSER_SOURCE,
            config.location_of("rollout.n_samples_per_prompt", "algo.advantage.estimator", job=job),
        )
    remote, agent = config.text("reward.remote_url"), config.text("train.agent_func_path")
    source_is_unknown = any(
        name in config.settings for name in (config.name("reward.remote_url"), config.name("train.agent_func_path"))
    )
    if not (remote or agent or source_is_unknown or config.name("reward.model_name_or_path") in config.settings):
        advice.error(
            "algorithm-reward",
            "there is no reward: neither a reward model, nor a remote one, nor an agent",
            "",
            f"{config.shown('reward.model_name_or_path')}, {config.shown('reward.remote_url')} or"
            f" {config.shown('train.agent_func_path')}",
            PARSER_SOURCE,
            job.location,
        )
    if config.on("train.partial_rollout_enable") and not config.on("train.async_enable"):
        advice.error(
            "algorithm-async",
            f"{config.shown('train.partial_rollout_enable')} without {config.shown('train.async_enable')}",
            "OpenRLHF fails with an assertion.",
            config.shown("train.async_enable"),
            PARSER_SOURCE,
            config.location_of("train.partial_rollout_enable", job=job),
        )
    _check_filtering(advice, config, job, bool(remote or agent or source_is_unknown))
    if config.name("eval.dataset") in config.settings and not (remote or agent or source_is_unknown):
        advice.error(
            "algorithm-reward",
            f"{config.shown('eval.dataset')} needs a remote reward or an agent",
            "OpenRLHF fails with an assertion.",
            config.shown("reward.remote_url"),
            PARSER_SOURCE,
            config.location_of("eval.dataset", job=job),
        )


def _check_filtering(advice: ConfigFindings, config: OpenRLHFConfig, job: TrainingCommand, has_reward: bool) -> None:
    """Checks DAPO's dynamic filtering.

    Args:
        has_reward: whether there is a remote reward or an agent.
    """
    samples = config.integer("rollout.n_samples_per_prompt")
    if config.on("algo.dynamic_filtering_enable"):
        if samples == 1:
            advice.error(
                "algorithm-group",
                "dynamic filtering with one sample per prompt",
                "OpenRLHF fails with an assertion: it filters groups by the spread of their rewards.",
                f"{config.shown('rollout.n_samples_per_prompt')} 8",
                PARSER_SOURCE,
                config.location_of("algo.dynamic_filtering_enable", job=job),
            )
        if not has_reward:
            advice.error(
                "algorithm-reward",
                "dynamic filtering needs a remote reward or an agent",
                "OpenRLHF fails with an assertion.",
                f"{config.shown('reward.remote_url')} or {config.shown('train.agent_func_path')}",
                PARSER_SOURCE,
                config.location_of("algo.dynamic_filtering_enable", job=job),
            )


def _check_engines(advice: ConfigFindings, config: OpenRLHFConfig, job: TrainingCommand) -> None:
    engines = config.integer("vllm.num_engines")
    if config.name("vllm.num_engines") in config.settings and engines is None:
        return
    if config.on("ds.packing_samples") and not engines:
        advice.error(
            "engine-missing",
            f"{config.shown('ds.packing_samples')} needs vLLM engines",
            "OpenRLHF fails with an assertion.",
            f"{config.shown('vllm.num_engines')} 1 or more",
            PARSER_SOURCE,
            config.location_of("ds.packing_samples", job=job),
        )
    elif not engines and config.integer("ds.zero_stage") == 3:
        advice.warn(
            "zero3-generation",
            "ZeRO-3 without vLLM engines: each generated token gathers all weights on every rank",
            "It is slow, and the job hangs if ranks that finish early stop taking part in the gathers.",
            f"{config.shown('vllm.num_engines')}",
            PARSER_SOURCE,
            config.location_of("ds.zero_stage", job=job),
        )
    utilization = config.settings.number(config.name("vllm.gpu_memory_utilization"))
    if utilization is not None and not 0 < utilization <= 1:
        advice.error(
            "engine-memory",
            f"{config.shown('vllm.gpu_memory_utilization')} {utilization:g} is not a share of a GPU",
            "",
            "a number above 0 and at most 1",
            model_memory.UTILIZATION_SOURCE,
            config.location_of("vllm.gpu_memory_utilization", job=job),
        )
    if config.text("vllm.sync_backend") == "gloo":
        advice.warn(
            "engine-sync",
            f"{config.shown('vllm.sync_backend')} gloo sends all weights through host memory in every step",
            "",
            f"{config.shown('vllm.sync_backend')} nccl",
            PARSER_SOURCE,
            config.location_of("vllm.sync_backend", job=job),
        )


def _check_lengths(advice: ConfigFindings, config: OpenRLHFConfig, job: TrainingCommand) -> None:
    longest = openrlhf_sequence_tokens(config)
    new = (
        config.integer("rollout.max_new_tokens")
        if config.nested
        else config.settings.integer("generate_max_len") or config.settings.integer("max_new_tokens")
    )
    prompt = config.settings.integer("prompt_max_len")
    at = config.location_of("data.max_len", "rollout.max_new_tokens", job=job)
    if longest and new and new >= longest:
        advice.error(
            "length-engine",
            f"completions of {new} tokens leave no room for a prompt in {config.shown('data.max_len')} {longest}",
            "The engine's maximum length includes prompt and completion.",
            f"{config.shown('data.max_len')} of more than {new} and the longest prompt",
            PARSER_SOURCE,
            at,
        )
    elif longest and new and prompt and prompt + new > longest:
        advice.warn(
            "length-engine",
            f"prompts of {prompt} and completions of {new} tokens are longer than {config.shown('data.max_len')}"
            f" {longest}",
            "vLLM refuses or truncates longer sequences.",
            f"{config.shown('data.max_len')} {prompt + new}",
            PARSER_SOURCE,
            at,
        )
    tokens = config.integer("train.max_tokens_per_gpu")
    ranks_per_sequence = (config.integer("ds.ring_attn_size") or 1) * (config.integer("ds.tensor_parallel_size") or 1)
    if config.on("train.dynamic_batch_enable") and tokens and longest and tokens * ranks_per_sequence < longest:
        advice.warn(
            "length-budget",
            f"{config.shown('train.max_tokens_per_gpu')} {tokens} is less than a sequence of {longest} tokens",
            "A longer sequence becomes a micro-batch of its own, which needs more memory than the limit allows for.",
            f"{config.shown('train.max_tokens_per_gpu')} {longest} or more",
            PARSER_SOURCE,
            config.location_of("train.max_tokens_per_gpu", job=job),
        )


OPENRLHF_RULES = (_check_placement, _check_batches, _check_algorithm, _check_engines, _check_lengths)


def judge_openrlhf(
    advice: ConfigFindings, job: TrainingCommand, folder: Path, gpu_gib: float | None, installed: str | None
) -> None:
    """Judges the options of an OpenRLHF program, and the memory and environment that follow from them."""
    if job.program not in option_programs("openrlhf"):
        advice.unchecked("program-unknown", f"the options of {job.program} are not known", at=job.location)
        return
    options = option_table("openrlhf", job.program)
    raw = ConfigSettings()
    add_arguments(raw, job.words, options.options, hyphens=False)
    version = options.version_for([setting.name for setting in raw], installed)
    known = options.at(version)
    settings = ConfigSettings(defaults={name: option.default for name, option in known.items()})
    for word in add_arguments(settings, job.words, known, hyphens=False):
        if word.known and word.text not in ("-h",):
            advice.error(
                "option-unknown",
                f"'{word.text}' belongs to no option",
                "argparse exits with an error. Is a backslash or a quote missing before this word?",
                "",
                at=word.location,
            )
    judge_openrlhf_version(advice, options, settings, version, installed, job)
    option_tables.judge_options(advice, options, settings, version, option_tables.OptionPolicy())
    if job.program == "openrlhf.cli.train_ppo_ray":
        config = OpenRLHFConfig(settings, version, nested="actor.num_nodes" in known)
        for rule in OPENRLHF_RULES:
            rule(advice, config, job)
        judge_openrlhf_memory(advice, config, job, folder, gpu_gib)
    elif job.program != "openrlhf.cli.batch_inference":
        judge_supervised_memory(advice, settings, job, folder, gpu_gib)
    variables = {**job.shell, **job.workers}
    shared_rules.judge_openrlhf_timeout(advice, variables)
    judge_openrlhf_environment(advice, job)
