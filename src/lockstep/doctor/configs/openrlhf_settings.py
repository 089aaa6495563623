"""OpenRLHF's settings under the option names of any version, and the memory and environment that follow from them."""

from dataclasses import dataclass
from pathlib import Path

from lockstep.doctor.configs import model_memory, shared_rules
from lockstep.doctor.configs.config_settings import ConfigFindings, ConfigLocation, ConfigSettings
from lockstep.doctor.configs.option_tables import OptionTable
from lockstep.doctor.configs.shared_rules import RAY_ENVIRONMENT_SOURCE, judge_heads
from lockstep.doctor.configs.training_commands import TrainingCommand

FLAT_NAMES = {
    "actor.num_nodes": "actor_num_nodes",
    "actor.num_gpus_per_node": "actor_num_gpus_per_node",
    "ref.num_nodes": "ref_num_nodes",
    "ref.num_gpus_per_node": "ref_num_gpus_per_node",
    "critic.num_nodes": "critic_num_nodes",
    "critic.num_gpus_per_node": "critic_num_gpus_per_node",
    "reward.num_nodes": "reward_num_nodes",
    "reward.num_gpus_per_node": "reward_num_gpus_per_node",
    "train.colocate_all": "colocate_all_models",
    "train.colocate_actor_ref": "colocate_actor_ref",
    "train.colocate_critic_reward": "colocate_critic_reward",
    "train.async_enable": "async_train",
    "train.partial_rollout_enable": "partial_rollout",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "train.agent_func_path": "agent_func_path",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.max_new_tokens": "max_new_tokens",
    "rollout.vllm_generate_batch_size": "vllm_generate_batch_size",
    "vllm.num_engines": "vllm_num_engines",
    "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "vllm.enable_sleep": "vllm_enable_sleep",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "vllm.sync_backend": "vllm_sync_backend",
    "ds.zero_stage": "zero_stage",
    "ds.adam_offload": "adam_offload",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.packing_samples": "packing_samples",
    "ds.use_liger_kernel": "use_liger_kernel",
    "ds.ring_attn_size": "ring_attn_size",
    "ds.tensor_parallel_size": "ds_tensor_parallel_size",
    "ds.lora.rank": "lora_rank",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "actor.model_name_or_path": "pretrain",
    "reward.model_name_or_path": "reward_pretrain",
    "reward.remote_url": "remote_rm_url",
    "data.max_len": "max_len",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.dynamic_filtering_enable": "dynamic_filtering",
    "eval.dataset": "eval_dataset",
}
"""The option names of releases with flat names, by the current nested name."""


@dataclass(slots=True)
class OpenRLHFConfig:
    """The settings of a command line. Methods take the current name of an option, whatever the version calls it."""

    settings: ConfigSettings
    version: str
    nested: bool
    """Whether this version has nested names, such as `actor.num_nodes`."""

    def name(self, current: str) -> str:
        """The name of an option in this version."""
        return current if self.nested else FLAT_NAMES.get(current, current)

    def integer(self, current: str) -> int | None:
        """See `ConfigSettings.integer`."""
        return self.settings.integer(self.name(current))

    def on(self, current: str) -> bool:
        """Whether a flag is on."""
        return self.settings.flag(self.name(current)) is True

    def text(self, current: str) -> str | None:
        """See `ConfigSettings.text`."""
        return self.settings.text(self.name(current))

    def shown(self, current: str) -> str:
        """The name as written on the command line."""
        return f"--{self.name(current)}"

    def location_of(self, *current: str, job: TrainingCommand) -> ConfigLocation:
        """Location of the first of these options that is given, else of the program."""
        location = self.settings.location_of(*(self.name(each) for each in current))
        return location if location.file else job.location

    def gpus(self, role: str) -> int | None:
        """Number of GPUs of `actor`, `ref`, `critic` or `reward`."""
        nodes, per_node = self.integer(f"{role}.num_nodes"), self.integer(f"{role}.num_gpus_per_node")
        return nodes * per_node if nodes and per_node else None


BATCH_SOURCE = "https://github.com/OpenRLHF/OpenRLHF/blob/v0.11.2/openrlhf/utils/deepspeed/deepspeed.py"


def openrlhf_sequence_tokens(config: OpenRLHFConfig) -> int | None:
    """Maximum number of tokens of a prompt with its completion; None if it is not known."""
    if config.nested or "max_len" in config.settings or "prompt_max_len" not in config.settings.defaults:
        return config.integer("data.max_len")
    prompt, completion = config.settings.integer("prompt_max_len"), config.settings.integer("generate_max_len")
    return prompt + completion if prompt and completion else None


_WORKER_VARIABLE_PREFIXES = (
    "NCCL_",
    "TORCH_",
    "VLLM_",
    "CUDA_",
    "GLOO_",
    "HF_",
    "PYTORCH_",
    "UCX_",
    "FI_",
    "OMP_",
    "RAY_",
    "DEEPSPEED_",
    "DS_",
)


def judge_openrlhf_version(
    advice: ConfigFindings,
    options: OptionTable,
    settings: ConfigSettings,
    version: str,
    installed: str | None,
    job: TrainingCommand,
) -> None:
    version_source = f"{installed} is installed" if installed else "the version that knows most of the options"
    newest = options.versions[-1]
    removed = [setting.name for setting in settings if setting.name not in options.at(newest)]
    if version != newest and removed:
        advice.warn(
            "version-old",
            f"this command line is for OpenRLHF {version} or similar ({version_source}): {newest} refuses"
            f" {len(removed)} of its options",
            "After 0.10.0 the option names are nested: --actor.num_nodes instead of --actor_num_nodes.",
            f"pip install 'openrlhf=={version}', or use the new names below",
            options.source,
            job.location,
        )
    else:
        advice.add(
            "version", "ok", f"options judged by those of OpenRLHF {version} ({version_source})", at=job.location
        )


def judge_openrlhf_memory(
    advice: ConfigFindings, config: OpenRLHFConfig, job: TrainingCommand, folder: Path, gpu_gib: float | None
) -> None:
    shape = model_memory.find_model(config.text("actor.model_name_or_path"), folder)
    if shape is None:
        advice.unchecked(
            "memory-model",
            "memory was not estimated: the model's size is not known",
            "name a folder with the model's config.json, or a model with its size in the name",
            config.location_of("actor.model_name_or_path", job=job),
        )
        return
    parallel = config.integer("vllm.tensor_parallel_size") or 1
    judge_heads(
        advice,
        shape,
        parallel,
        config.shown("vllm.tensor_parallel_size"),
        config.location_of("vllm.tensor_parallel_size", job=job),
    )
    longest, micro = openrlhf_sequence_tokens(config), config.integer("train.micro_batch_size")
    tokens = (
        config.integer("train.max_tokens_per_gpu")
        if config.on("train.dynamic_batch_enable")
        else micro * longest
        if micro and longest
        else None
    )
    training = model_memory.TrainingStates(
        shape,
        config.gpus("actor"),
        config.integer("ds.zero_stage") or 0,
        config.on("ds.adam_offload"),
        trainable=0.02 if config.integer("ds.lora.rank") else 1.0,
    )
    model_memory.judge_gpu_memory(
        advice,
        training,
        _engine_share(config, job, shape, longest),
        model_memory.BatchTokens(tokens if shape.layers else None, config.on("ds.use_liger_kernel")),
        gpu_gib,
        config.location_of("actor.model_name_or_path", job=job),
        offloaded_while_generating=config.on("ds.enable_sleep"),
        what="the actor's training",
    )


def _engine_share(
    config: OpenRLHFConfig, job: TrainingCommand, shape: model_memory.ModelSize, longest: int | None
) -> model_memory.EngineShare | None:
    """What an engine takes of a GPU; None if no engine is started, or how much is unknown."""
    utilization = config.settings.number(config.name("vllm.gpu_memory_utilization"))
    if not (config.integer("vllm.num_engines") and utilization and 0 < utilization <= 1):
        return None
    return model_memory.EngineShare(
        shape,
        config.integer("vllm.tensor_parallel_size") or 1,
        utilization,
        config.on("train.colocate_all") and not config.on("train.async_enable"),
        config.on("vllm.enable_sleep"),
        longest,
        config.location_of("vllm.gpu_memory_utilization", "vllm.num_engines", job=job),
        config.shown("vllm.gpu_memory_utilization"),
    )


def judge_supervised_memory(
    advice: ConfigFindings, settings: ConfigSettings, job: TrainingCommand, folder: Path, gpu_gib: float | None
) -> None:
    """Judges batch sizes and memory of train_sft, train_dpo and train_rm."""
    world_size = job.launcher.world_size
    names = {
        "batch": ("train.batch_size", "train_batch_size"),
        "micro": ("train.micro_batch_size", "micro_train_batch_size"),
    }
    batch, micro = (
        next((settings.integer(name) for name in pair if settings.integer(name)), None) for pair in names.values()
    )
    if world_size and batch and micro and batch % (micro * world_size):
        advice.error(
            "batch-accumulation",
            f"a batch of {batch} is not a multiple of micro-batch {micro} x {world_size} ranks",
            "DeepSpeed asserts train batch = micro batch x accumulation x ranks.",
            f"a multiple of {micro * world_size}",
            BATCH_SOURCE,
            settings.location_of(*names["batch"], *names["micro"]),
        )
    name = (
        settings.text("model.model_name_or_path")
        or settings.text("pretrain")
        or settings.text("actor.model_name_or_path")
    )
    shape = model_memory.find_model(name, folder)
    if shape is not None and world_size:
        stage = (
            settings.integer("ds.zero_stage")
            if "ds.zero_stage" in settings.defaults
            else settings.integer("zero_stage")
        )
        offload = settings.flag("ds.adam_offload") or settings.flag("adam_offload")
        training = model_memory.TrainingStates(shape, world_size, stage or 0, bool(offload))
        model_memory.judge_gpu_memory(advice, training, None, model_memory.BatchTokens(None), gpu_gib, job.location)


def judge_openrlhf_environment(advice: ConfigFindings, job: TrainingCommand) -> None:
    """Reports variables that the submitting shell exports but Ray's workers do not get."""
    if not job.through_ray:
        return
    missing = [
        name
        for name in job.shell
        if name.startswith(_WORKER_VARIABLE_PREFIXES)
        and name not in job.workers
        and name not in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", *shared_rules.UNREAD_VARIABLES)
    ]
    if missing:
        listed = ", ".join(
            f'"{name}": "{job.shell[name].text if job.shell[name].known else "..."}"' for name in sorted(missing)
        )
        advice.warn(
            "environment-driver-only",
            f"{', '.join(sorted(missing))}: set in the submitting shell, but not visible to Ray's workers",
            "ray job submit starts the driver on the cluster; workers get the raylets' environment and runtime_env.",
            f"--runtime-env-json='{{\"env_vars\": {{{listed}}}}}'",
            RAY_ENVIRONMENT_SOURCE,
            job.shell[missing[0]].location,
        )
