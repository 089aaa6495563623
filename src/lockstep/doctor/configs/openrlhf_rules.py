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


def _placement(advice: ConfigFindings, run: OpenRLHFConfig, job: TrainingCommand) -> None:
    actor, ref = run.gpus("actor"), run.gpus("ref")
    engines, parallel = run.whole("vllm.num_engines"), run.whole("vllm.tensor_parallel_size") or 1
    all_together, asynchronous = run.on("train.colocate_all"), run.on("train.async_enable")
    kl = run.settings.number(run.name("algo.kl.init_coef"))
    if all_together and not asynchronous and actor and engines and engines * parallel != actor:
        advice.error(
            "placement-colocate",
            f"{run.shown('train.colocate_all')}: engines use {engines} x {parallel} GPUs, the actor has {actor}",
            "OpenRLHF asserts that they are equal.",
            f"{run.shown('vllm.num_engines')} {max(1, actor // parallel)}",
            PARSER_SOURCE,
            run.at("vllm.num_engines", "train.colocate_all", job=job),
        )
    if (all_together or run.on("train.colocate_actor_ref")) and kl and actor and ref and actor != ref:
        advice.error(
            "placement-colocate",
            f"actor and reference share GPUs but have {actor} and {ref}",
            "OpenRLHF asserts that they are equal.",
            "the same nodes and GPUs for both",
            PARSER_SOURCE,
            run.at("ref.num_gpus_per_node", "actor.num_gpus_per_node", job=job),
        )
    critic, reward = run.gpus("critic"), run.gpus("reward")
    if run.on("train.colocate_critic_reward") and critic and reward and critic != reward and _needs_critic(run):
        advice.error(
            "placement-colocate",
            f"critic and reward model share GPUs but have {critic} and {reward}",
            "OpenRLHF asserts that they are equal.",
            "the same nodes and GPUs for both",
            PARSER_SOURCE,
            run.at("critic.num_gpus_per_node", job=job),
        )
    _asynchronous(advice, run, job)
    ring, tensor = run.whole("ds.ring_attn_size") or 1, run.whole("ds.tensor_parallel_size") or 1
    if actor and actor % (ring * tensor):
        advice.error(
            "parallel-sizes",
            f"{actor} GPUs of the actor are not a multiple of ring attention {ring} x tensor parallel {tensor}",
            "The device mesh cannot be created.",
            "sizes whose product divides the GPUs",
            BATCH_SOURCE,
            run.at("ds.ring_attn_size", "ds.tensor_parallel_size", job=job),
        )


def _asynchronous(advice: ConfigFindings, run: OpenRLHFConfig, job: TrainingCommand) -> None:
    """Judges shared GPUs when generation runs asynchronously."""
    all_together, asynchronous = run.on("train.colocate_all"), run.on("train.async_enable")
    engines, parallel = run.whole("vllm.num_engines"), run.whole("vllm.tensor_parallel_size") or 1
    if all_together and asynchronous:
        advice.note(
            "placement-async",
            f"{run.shown('train.colocate_all')} with {run.shown('train.async_enable')} does not colocate the engines:"
            f" they need {(engines or 0) * parallel} GPUs of their own",
            "Ray waits forever for GPUs that do not exist.",
            "include them in the cluster's GPUs",
            PARSER_SOURCE,
            run.at("train.async_enable", job=job),
        )
    if run.on("vllm.enable_sleep") and not all_together:
        advice.note(
            "engine-sleep",
            f"{run.shown('vllm.enable_sleep')} is ignored without {run.shown('train.colocate_all')}",
            source=PARSER_SOURCE,
            at=run.at("vllm.enable_sleep", job=job),
        )
    if run.on("vllm.enable_sleep") and all_together and asynchronous:
        advice.error(
            "engine-sleep",
            f"{run.shown('vllm.enable_sleep')} with {run.shown('train.async_enable')}",
            "OpenRLHF asserts that they are not combined.",
            f"drop {run.shown('vllm.enable_sleep')}",
            PARSER_SOURCE,
            run.at("vllm.enable_sleep", job=job),
        )


def _needs_critic(run: OpenRLHFConfig) -> bool:
    return (run.text("algo.advantage.estimator") or "gae") == "gae"


def _data_parallel(run: OpenRLHFConfig) -> int | None:
    actor = run.gpus("actor")
    parts = (run.whole("ds.ring_attn_size") or 1) * (run.whole("ds.tensor_parallel_size") or 1)
    return actor // parts if actor and actor >= parts else None


def _batches(advice: ConfigFindings, run: OpenRLHFConfig, job: TrainingCommand) -> None:
    ranks, train, micro = _data_parallel(run), run.whole("train.batch_size"), run.whole("train.micro_batch_size")
    dynamic = run.on("train.dynamic_batch_enable")
    if ranks and train and micro and not dynamic and train % (micro * ranks):
        advice.error(
            "batch-accumulation",
            f"{run.shown('train.batch_size')} {train} is not a multiple of {run.shown('train.micro_batch_size')} "
            f"{micro} x"
            f" {ranks} data-parallel ranks",
            "DeepSpeed asserts train batch = micro batch x accumulation x ranks.",
            f"a multiple of {micro * ranks}",
            BATCH_SOURCE,
            run.at("train.batch_size", "train.micro_batch_size", job=job),
        )
    _rollout_batches(advice, run, job)


def _rollout_batches(advice: ConfigFindings, run: OpenRLHFConfig, job: TrainingCommand) -> None:
    """Compares the samples of a step with ranks and optimizer batches."""
    ranks, train = _data_parallel(run), run.whole("train.batch_size")
    prompts, samples = run.whole("rollout.batch_size"), run.whole("rollout.n_samples_per_prompt")
    rollout_micro, dynamic = run.whole("rollout.micro_batch_size"), run.on("train.dynamic_batch_enable")
    if not (prompts and samples):
        return
    rollout = prompts * samples
    if ranks and rollout_micro and rollout // rollout_micro < ranks:
        advice.error(
            "batch-ranks",
            f"{rollout} samples in micro-batches of {rollout_micro} are fewer than {ranks} ranks",
            "OpenRLHF asserts that each rank gets one.",
            f"a larger {run.shown('rollout.batch_size')} or a smaller {run.shown('rollout.micro_batch_size')}",
            PARSER_SOURCE,
            run.at("rollout.batch_size", "rollout.micro_batch_size", job=job),
        )
    if ranks and rollout % ranks:
        advice.warn(
            "batch-uneven",
            f"{prompts} prompts x {samples} samples = {rollout} are not divisible by {ranks} ranks",
            "Ranks get different numbers of samples; those that run out wait in a collective, or samples are dropped.",
            f"{run.shown('rollout.batch_size')} so that {rollout} is a multiple of {ranks}",
            BATCH_SOURCE,
            run.at("rollout.batch_size", "rollout.n_samples_per_prompt", job=job),
        )
    if train and rollout < train:
        advice.warn(
            "batch-train",
            f"a step generates {rollout} samples, but {run.shown('train.batch_size')} is {train}",
            "A step has not enough samples for an optimizer step: gradients accumulate over several rollouts.",
            f"{run.shown('train.batch_size')} of at most {rollout}",
            BATCH_SOURCE,
            run.at("train.batch_size", job=job),
        )
    elif train and rollout % train and not dynamic:
        advice.warn(
            "batch-train",
            f"{rollout} samples of a step are not a multiple of {run.shown('train.batch_size')} {train}",
            "The remainder is dropped, or its gradients go into the next step.",
            f"{run.shown('train.batch_size')} that divides {rollout}",
            BATCH_SOURCE,
            run.at("train.batch_size", job=job),
        )
    at_once = run.whole("rollout.vllm_generate_batch_size")
    if at_once and at_once > prompts and not run.on("train.async_enable"):
        advice.error(
            "batch-oversampling",
            f"{run.shown('rollout.vllm_generate_batch_size')} {at_once} is more than {run.shown('rollout.batch_size')}"
            f" {prompts}",
            "That requires the queue of asynchronous training.",
            run.shown("train.async_enable"),
            PARSER_SOURCE,
            run.at("rollout.vllm_generate_batch_size", job=job),
        )


def _algorithm(advice: ConfigFindings, run: OpenRLHFConfig, job: TrainingCommand) -> None:
    estimator = run.text("algo.advantage.estimator") or "gae"
    samples = run.whole("rollout.n_samples_per_prompt")
    if estimator in GROUPED and samples == 1:
        advice.error(
            "algorithm-group",
            f"{estimator} with one sample per prompt",
            "It compares samples of one prompt: all advantages would be 0.",
            f"{run.shown('rollout.n_samples_per_prompt')} 8",
            PARSER_SOURCE,
            run.at("rollout.n_samples_per_prompt", "algo.advantage.estimator", job=job),
        )
    remote, agent = run.text("reward.remote_url"), run.text("train.agent_func_path")
    unknown_source = any(
        name in run.settings for name in (run.name("reward.remote_url"), run.name("train.agent_func_path"))
    )
    if not (remote or agent or unknown_source or run.name("reward.model_name_or_path") in run.settings):
        advice.error(
            "algorithm-reward",
            "there is no reward: neither a reward model, nor a remote one, nor an agent",
            "",
            f"{run.shown('reward.model_name_or_path')}, {run.shown('reward.remote_url')} or"
            f" {run.shown('train.agent_func_path')}",
            PARSER_SOURCE,
            job.place,
        )
    if run.on("train.partial_rollout_enable") and not run.on("train.async_enable"):
        advice.error(
            "algorithm-async",
            f"{run.shown('train.partial_rollout_enable')} without {run.shown('train.async_enable')}",
            "OpenRLHF asserts this.",
            run.shown("train.async_enable"),
            PARSER_SOURCE,
            run.at("train.partial_rollout_enable", job=job),
        )
    _filtering(advice, run, job, bool(remote or agent or unknown_source))
    if run.name("eval.dataset") in run.settings and not (remote or agent or unknown_source):
        advice.error(
            "algorithm-reward",
            f"{run.shown('eval.dataset')} needs a remote reward or an agent",
            "OpenRLHF asserts this.",
            run.shown("reward.remote_url"),
            PARSER_SOURCE,
            run.at("eval.dataset", job=job),
        )


def _filtering(advice: ConfigFindings, run: OpenRLHFConfig, job: TrainingCommand, rewarded: bool) -> None:
    """Judges DAPO's dynamic filtering."""
    samples = run.whole("rollout.n_samples_per_prompt")
    if run.on("algo.dynamic_filtering_enable"):
        if samples == 1:
            advice.error(
                "algorithm-group",
                "dynamic filtering with one sample per prompt",
                "OpenRLHF asserts this: groups are filtered by their rewards.",
                f"{run.shown('rollout.n_samples_per_prompt')} 8",
                PARSER_SOURCE,
                run.at("algo.dynamic_filtering_enable", job=job),
            )
        if not rewarded:
            advice.error(
                "algorithm-reward",
                "dynamic filtering needs a remote reward or an agent",
                "OpenRLHF asserts this.",
                f"{run.shown('reward.remote_url')} or {run.shown('train.agent_func_path')}",
                PARSER_SOURCE,
                run.at("algo.dynamic_filtering_enable", job=job),
            )


def _engines(advice: ConfigFindings, run: OpenRLHFConfig, job: TrainingCommand) -> None:
    engines = run.whole("vllm.num_engines")
    if run.name("vllm.num_engines") in run.settings and engines is None:
        return
    if run.on("ds.packing_samples") and not engines:
        advice.error(
            "engine-missing",
            f"{run.shown('ds.packing_samples')} needs vLLM engines",
            "OpenRLHF asserts this.",
            f"{run.shown('vllm.num_engines')} 1 or more",
            PARSER_SOURCE,
            run.at("ds.packing_samples", job=job),
        )
    elif not engines and run.whole("ds.zero_stage") == 3:
        advice.warn(
            "zero3-generation",
            "ZeRO-3 without vLLM engines: each generated token gathers all weights on every rank",
            "It is slow, and ranks that finish early must keep gathering with the others, else the job hangs.",
            f"{run.shown('vllm.num_engines')}",
            PARSER_SOURCE,
            run.at("ds.zero_stage", job=job),
        )
    utilization = run.settings.number(run.name("vllm.gpu_memory_utilization"))
    if utilization is not None and not 0 < utilization <= 1:
        advice.error(
            "engine-memory",
            f"{run.shown('vllm.gpu_memory_utilization')} {utilization:g} is not a share of a GPU",
            "",
            "a number between 0 and 1",
            model_memory.UTILIZATION_SOURCE,
            run.at("vllm.gpu_memory_utilization", job=job),
        )
    if run.text("vllm.sync_backend") == "gloo":
        advice.warn(
            "engine-sync",
            f"{run.shown('vllm.sync_backend')} gloo sends all weights through the hosts' memory every step",
            "",
            f"{run.shown('vllm.sync_backend')} nccl",
            PARSER_SOURCE,
            run.at("vllm.sync_backend", job=job),
        )


def _lengths(advice: ConfigFindings, run: OpenRLHFConfig, job: TrainingCommand) -> None:
    longest = openrlhf_sequence_tokens(run)
    new = (
        run.whole("rollout.max_new_tokens")
        if run.nested
        else run.settings.whole("generate_max_len") or run.settings.whole("max_new_tokens")
    )
    prompt = run.settings.whole("prompt_max_len")
    at = run.at("data.max_len", "rollout.max_new_tokens", job=job)
    if longest and new and new >= longest:
        advice.error(
            "length-engine",
            f"completions of {new} tokens leave no room for a prompt in {run.shown('data.max_len')} {longest}",
            "The engine's maximum length includes prompt and completion.",
            f"{run.shown('data.max_len')} of more than {new} and the longest prompt",
            PARSER_SOURCE,
            at,
        )
    elif longest and new and prompt and prompt + new > longest:
        advice.warn(
            "length-engine",
            f"prompts of {prompt} and completions of {new} tokens are longer than {run.shown('data.max_len')}"
            f" {longest}",
            "vLLM refuses or truncates longer sequences.",
            f"{run.shown('data.max_len')} {prompt + new}",
            PARSER_SOURCE,
            at,
        )
    tokens = run.whole("train.max_tokens_per_gpu")
    same = (run.whole("ds.ring_attn_size") or 1) * (run.whole("ds.tensor_parallel_size") or 1)
    if run.on("train.dynamic_batch_enable") and tokens and longest and tokens * same < longest:
        advice.warn(
            "length-budget",
            f"{run.shown('train.max_tokens_per_gpu')} {tokens} is less than a sequence of {longest} tokens",
            "A longer sequence becomes a micro-batch of its own, above the budget that limits memory.",
            f"{run.shown('train.max_tokens_per_gpu')} {longest} or more",
            PARSER_SOURCE,
            run.at("train.max_tokens_per_gpu", job=job),
        )


OPENRLHF_RULES = (_placement, _batches, _algorithm, _engines, _lengths)


def judge_openrlhf(
    advice: ConfigFindings, job: TrainingCommand, folder: Path, gpu_gib: float | None, installed: str | None
) -> None:
    """Judges the options of an OpenRLHF program."""
    if job.program not in option_programs("openrlhf"):
        advice.unchecked("program-unknown", f"{job.program}: its options are not known", at=job.place)
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
                "argparse refuses it; is a backslash or a quote missing before it?",
                "",
                at=word.place,
            )
    judge_openrlhf_version(advice, options, settings, version, installed, job)
    option_tables.judge_options(advice, options, settings, version, option_tables.OptionSyntax())
    if job.program == "openrlhf.cli.train_ppo_ray":
        run = OpenRLHFConfig(settings, version, nested="actor.num_nodes" in known)
        for rule in OPENRLHF_RULES:
            rule(advice, run, job)
        judge_openrlhf_memory(advice, run, job, folder, gpu_gib)
    else:
        judge_supervised_memory(advice, settings, job, folder, gpu_gib)
    variables = {**job.shell, **job.workers}
    shared_rules.judge_openrlhf_timeout(advice, variables)
    judge_openrlhf_environment(advice, job)
