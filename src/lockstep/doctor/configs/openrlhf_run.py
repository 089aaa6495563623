"""OpenRLHF's settings under the names of one version."""

from dataclasses import dataclass

from lockstep.doctor.configs.programs import Job
from lockstep.doctor.configs.settings import Place, Settings

FLAT = {
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
class Run:
    """A command line with the names of one version."""

    settings: Settings
    version: str
    nested: bool

    def name(self, today: str) -> str:
        """The spelling of this version."""
        return today if self.nested else FLAT.get(today, today)

    def whole(self, today: str) -> int | None:
        """See `Settings.whole`."""
        return self.settings.whole(self.name(today))

    def on(self, today: str) -> bool:
        """Of a flag."""
        return self.settings.flag(self.name(today)) is True

    def text(self, today: str) -> str | None:
        """See `Settings.text`."""
        return self.settings.text(self.name(today))

    def shown(self, today: str) -> str:
        """As it is written on the command line."""
        return f"--{self.name(today)}"

    def at(self, *today: str, job: Job) -> Place:
        """Where the first of them is set, else the program."""
        place = self.settings.place(*(self.name(each) for each in today))
        return place if place.file else job.place

    def gpus(self, role: str) -> int | None:
        """Of `actor`, `ref`, `critic` or `reward`."""
        nodes, each = self.whole(f"{role}.num_nodes"), self.whole(f"{role}.num_gpus_per_node")
        return nodes * each if nodes and each else None
