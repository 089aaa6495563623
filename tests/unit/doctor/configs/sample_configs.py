"""Small correct configs in each framework's format, and findings about changed ones."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lockstep.doctor.configs.config_advisor import advise_configs
from lockstep.doctor.output.findings import CheckReport, Finding

Options = dict[str, Any]

OPENRLHF: Options = {
    "actor.num_nodes": 1, "actor.num_gpus_per_node": 8, "ref.num_nodes": 1, "ref.num_gpus_per_node": 8,
    "vllm.num_engines": 4, "vllm.tensor_parallel_size": 2, "vllm.gpu_memory_utilization": 0.6,
    "vllm.enable_sleep": True, "ds.enable_sleep": True, "train.colocate_all": True,
    "train.batch_size": 128, "train.micro_batch_size": 4,
    "rollout.batch_size": 128, "rollout.micro_batch_size": 4, "rollout.n_samples_per_prompt": 4,
    "rollout.max_new_tokens": 1024, "data.max_len": 2048, "ds.zero_stage": 3, "algo.advantage.estimator": "group_norm",
    "actor.model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "reward.remote_url": "http://rewards:5000/get_reward",
}  # fmt: skip
FLAT: Options = {
    "actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "ref_num_nodes": 1, "ref_num_gpus_per_node": 8,
    "vllm_num_engines": 4, "vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.6, "async_queue_size": 1,
    "vllm_enable_sleep": True, "deepspeed_enable_sleep": True, "colocate_all_models": True, "train_batch_size": 128,
    "micro_train_batch_size": 4, "rollout_batch_size": 128, "micro_rollout_batch_size": 4, "n_samples_per_prompt": 4,
    "max_new_tokens": 1024, "max_len": 2048, "zero_stage": 3, "advantage_estimator": "group_norm",
    "pretrain": "Qwen/Qwen2.5-7B-Instruct", "remote_rm_url": "http://rewards:5000/get_reward",
}  # fmt: skip
VERL: Options = {
    "algorithm.adv_estimator": "grpo", "data.train_batch_size": 256, "data.max_prompt_length": 1024,
    "data.max_response_length": 1024, "data.train_files": "train.parquet",
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct", "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 64, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.fsdp_config.param_offload": True,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
    "actor_rollout_ref.rollout.name": "vllm", "actor_rollout_ref.rollout.n": 5,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
    "trainer.n_gpus_per_node": 8, "trainer.nnodes": 1, "trainer.logger": "['console']",
}  # fmt: skip
TRL: Options = {
    "model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "num_generations": 8, "max_completion_length": 1024, "learning_rate": 1e-6, "use_vllm": True,
    "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": True,
    "vllm_max_model_length": 2048, "report_to": "none",
}  # fmt: skip
ACCELERATE: Options = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "mixed_precision": "bf16",
    "num_machines": 1, "num_processes": 8, "machine_rank": 0, "main_training_function": "main",
    "deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True, "zero3_save_16bit_model": True,
                         "offload_optimizer_device": "none", "offload_param_device": "none"},
}  # fmt: skip
DEEPSPEED: Options = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto",
                          "stage3_prefetch_bucket_size": "auto", "stage3_gather_16bit_weights_on_model_save": True},
}  # fmt: skip


def changed(base: Options, changes: Mapping[str, Any]) -> Options:
    """`base` with other values; None removes an option; `a.b` names a key of a section unless `base` has that name."""
    result = json.loads(json.dumps(base))
    for name, value in changes.items():
        inside, leaf = result, name
        while "." in leaf and leaf not in inside and isinstance(inside.get(leaf.partition(".")[0]), dict):
            section, _, leaf = leaf.partition(".")
            inside = inside[section]
        if value is None:
            inside.pop(leaf, None)
        else:
            inside[leaf] = value
    return result


def openrlhf(options: Options, before: str = "", around: str = "ray job submit --address=http://head:8265 -- ") -> str:
    """A script like the project's examples, with each option on its own line."""
    words = [
        f"--{name}" if value is True else f"--{name} {value}" for name, value in options.items() if value is not False
    ]
    lines = " \\\n   ".join(words)
    return f"set -x\n{before}\n{around}python3 -m openrlhf.cli.train_ppo_ray \\\n   {lines}\n"


def verl(options: Options, before: str = "", program: str = "verl.trainer.main_ppo", more: str = "") -> str:
    """A script with Hydra overrides."""
    lines = " \\\n    ".join(f'{name}="{value}"' for name, value in options.items())
    return f"set -x\n{before}\npython3 -m {program} \\\n    {lines} {more}$@\n"


class ConfigWriter:
    """Writes config files and returns the findings about them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, content: str | Options) -> Path:
        """Writes a script as it is, and a tree as JSON or YAML according to the suffix."""
        path = self.folder / name
        if not isinstance(content, str):
            content = (
                json.dumps(content, indent=2) if name.endswith(".json") else yaml.safe_dump(content, sort_keys=False)
            )
        path.write_text(content, encoding="utf-8")
        return path

    def report(
        self, gpu_gib: float | None = None, versions: Mapping[str, str] | None = None, **files: str | Options
    ) -> CheckReport:
        """The findings about files; a keyword names each: `run_sh`, `grpo_yaml`, `zero3_json`."""
        paths = [self.write(".".join(name.rsplit("_", 1)), content) for name, content in files.items()]
        return advise_configs(paths, gpu_gib, versions or {})

    def findings(
        self, gpu_gib: float | None = None, versions: Mapping[str, str] | None = None, **files: str | Options
    ) -> list[Finding]:
        """All findings except those about correct settings."""
        return [each for each in self.report(gpu_gib, versions, **files).findings if each.severity != "ok"]


def bad(findings: list[Finding]) -> list[tuple[str, str]]:
    """Id and severity of each error and warning."""
    return [(each.id, each.severity) for each in findings if each.severity in ("error", "warning")]
