"""OpenRLHF's settings under one version's names, and what they imply for memory and the workers' environment."""

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


@dataclass(slots=True)
class OpenRLHFConfig:
    """A command line with the option names of one version."""

    settings: ConfigSettings
    version: str
    nested: bool

    def name(self, today: str) -> str:
        """The name in this version."""
        return today if self.nested else FLAT_NAMES.get(today, today)

    def whole(self, today: str) -> int | None:
        """See `ConfigSettings.whole`."""
        return self.settings.whole(self.name(today))

    def on(self, today: str) -> bool:
        """Whether a flag is on."""
        return self.settings.flag(self.name(today)) is True

    def text(self, today: str) -> str | None:
        """See `ConfigSettings.text`."""
        return self.settings.text(self.name(today))

    def shown(self, today: str) -> str:
        """The name as written on the command line."""
        return f"--{self.name(today)}"

    def at(self, *today: str, job: TrainingCommand) -> ConfigLocation:
        """Location of the first of these that is set, else of the program."""
        place = self.settings.place(*(self.name(each) for each in today))
        return place if place.file else job.place

    def gpus(self, role: str) -> int | None:
        """GPUs of `actor`, `ref`, `critic` or `reward`."""
        nodes, each = self.whole(f"{role}.num_nodes"), self.whole(f"{role}.num_gpus_per_node")
        return nodes * each if nodes and each else None


BATCH_SOURCE = "https://github.com/OpenRLHF/OpenRLHF/blob/v0.11.2/openrlhf/utils/deepspeed/deepspeed.py"


def openrlhf_sequence_tokens(run: OpenRLHFConfig) -> int | None:
    """Tokens of a prompt with its completion."""
    if run.nested or "max_len" in run.settings or "prompt_max_len" not in run.settings.defaults:
        return run.whole("data.max_len")
    prompt, completion = run.settings.whole("prompt_max_len"), run.settings.whole("generate_max_len")
    return prompt + completion if prompt and completion else None


_REACHES_WORKERS = (
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

"""Current names by the names of 0.9 and before."""


def judge_openrlhf_version(
    advice: ConfigFindings,
    options: OptionTable,
    settings: ConfigSettings,
    version: str,
    installed: str | None,
    job: TrainingCommand,
) -> None:
    how = f"{installed} is installed" if installed else "the version with most of its options"
    newest = options.versions[-1]
    old = [setting.name for setting in settings if setting.name not in options.at(newest)]
    if version != newest and old:
        advice.warn(
            "version-old",
            f"this command line is for OpenRLHF {version} or similar ({how}): {newest} refuses {len(old)} of its"
            " options",
            "Names became nested after 0.10.0: --actor.num_nodes for --actor_num_nodes.",
            f"pip install 'openrlhf=={version}', or use the new names below",
            options.source,
            job.place,
        )
    else:
        advice.add("version", "ok", f"options judged by OpenRLHF {version} ({how})", at=job.place)


def judge_openrlhf_memory(
    advice: ConfigFindings, run: OpenRLHFConfig, job: TrainingCommand, folder: Path, gpu_gib: float | None
) -> None:
    shape = model_memory.find_model(run.text("actor.model_name_or_path"), folder)
    if shape is None:
        advice.unchecked(
            "memory-model",
            "memory: the model's size is not known",
            "give a folder with its config.json, or a name that contains its size",
            run.at("actor.model_name_or_path", job=job),
        )
        return
    parallel = run.whole("vllm.tensor_parallel_size") or 1
    judge_heads(
        advice, shape, parallel, run.shown("vllm.tensor_parallel_size"), run.at("vllm.tensor_parallel_size", job=job)
    )
    longest, micro = openrlhf_sequence_tokens(run), run.whole("train.micro_batch_size")
    tokens = (
        run.whole("train.max_tokens_per_gpu")
        if run.on("train.dynamic_batch_enable")
        else micro * longest
        if micro and longest
        else None
    )
    training = model_memory.TrainingStates(
        shape,
        run.gpus("actor"),
        run.whole("ds.zero_stage") or 0,
        run.on("ds.adam_offload"),
        trainable=0.02 if run.whole("ds.lora.rank") else 1.0,
    )
    utilization = run.settings.number(run.name("vllm.gpu_memory_utilization"))
    engine = None
    if run.whole("vllm.num_engines") and utilization and 0 < utilization <= 1:
        shares = run.on("train.colocate_all") and not run.on("train.async_enable")
        engine = model_memory.EngineShare(
            shape,
            parallel,
            utilization,
            shares,
            run.on("vllm.enable_sleep"),
            longest,
            run.at("vllm.gpu_memory_utilization", "vllm.num_engines", job=job),
            run.shown("vllm.gpu_memory_utilization"),
        )
    model_memory.judge_gpu_memory(
        advice,
        training,
        engine,
        model_memory.BatchTokens(tokens if shape.layers else None, run.on("ds.use_liger_kernel")),
        gpu_gib,
        run.at("actor.model_name_or_path", job=job),
        offloaded_while_generating=run.on("ds.enable_sleep"),
        what="the actor's training",
    )


def judge_supervised_memory(
    advice: ConfigFindings, settings: ConfigSettings, job: TrainingCommand, folder: Path, gpu_gib: float | None
) -> None:
    """Judges train_sft, train_dpo and train_rm."""
    world = job.launcher.world
    names = {
        "batch": ("train.batch_size", "train_batch_size"),
        "micro": ("train.micro_batch_size", "micro_train_batch_size"),
    }
    batch, micro = (
        next((settings.whole(name) for name in pair if settings.whole(name)), None) for pair in names.values()
    )
    if world and batch and micro and batch % (micro * world):
        advice.error(
            "batch-accumulation",
            f"a batch of {batch} is not a multiple of micro-batch {micro} x {world} ranks",
            "DeepSpeed asserts train batch = micro batch x accumulation x ranks.",
            f"a multiple of {micro * world}",
            BATCH_SOURCE,
            settings.place(*names["batch"], *names["micro"]),
        )
    name = (
        settings.text("model.model_name_or_path")
        or settings.text("pretrain")
        or settings.text("actor.model_name_or_path")
    )
    shape = model_memory.find_model(name, folder)
    if shape is not None and world:
        stage = (
            settings.whole("ds.zero_stage") if "ds.zero_stage" in settings.defaults else settings.whole("zero_stage")
        )
        offload = settings.flag("ds.adam_offload") or settings.flag("adam_offload")
        training = model_memory.TrainingStates(shape, world, stage or 0, bool(offload))
        model_memory.judge_gpu_memory(advice, training, None, model_memory.BatchTokens(None), gpu_gib, job.place)


def judge_openrlhf_environment(advice: ConfigFindings, job: TrainingCommand) -> None:
    """Reports exported variables of the submitting shell, which do not reach a Ray cluster's workers."""
    if not job.through_ray:
        return
    lost = [
        name
        for name in job.shell
        if name.startswith(_REACHES_WORKERS)
        and name not in job.workers
        and name not in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", *shared_rules.UNREAD_VARIABLES)
    ]
    if lost:
        listed = ", ".join(
            f'"{name}": "{job.shell[name].text if job.shell[name].known else "..."}"' for name in sorted(lost)
        )
        advice.warn(
            "environment-driver-only",
            f"{', '.join(sorted(lost))}: set in the submitting shell, but not visible to Ray's workers",
            "ray job submit starts the driver on the cluster; workers get the raylets' environment and runtime_env.",
            f"--runtime-env-json='{{\"env_vars\": {{{listed}}}}}'",
            RAY_ENVIRONMENT_SOURCE,
            job.shell[lost[0]].place,
        )
