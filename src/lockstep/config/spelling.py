"""Finds the key somebody meant: a close spelling here, the same word elsewhere, another framework's name."""

import difflib
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

# What people who come from TRL, verl, OpenRLHF or transformers write, and where it is here.
FOREIGN_NAMES = {
    "learning_rate": "trainer.optimizer.lr",
    "actor_learning_rate": "trainer.optimizer.lr",
    "weight_decay": "trainer.optimizer.weight_decay",
    "warmup_steps": "trainer.schedule.warmup_steps",
    "lr_scheduler_type": "trainer.schedule.kind",
    "max_steps": "steps",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "torch_dtype": "model.dtype",
    "num_generations": "group_size",
    "n_samples_per_prompt": "group_size",
    "train_batch_size": "batch_size (sft) or prompts_per_step (grpo)",
    "per_device_train_batch_size": "batch_size (sft) or prompts_per_step (grpo), over all ranks",
    "rollout_batch_size": "prompts_per_step",
    "ppo_mini_batch_size": "minibatch_size",
    "num_iterations": "epochs",
    "num_ppo_epochs": "epochs",
    "ppo_epochs": "epochs",
    "max_completion_length": "rollout.sampling.max_tokens",
    "max_response_length": "rollout.sampling.max_tokens",
    "generate_max_len": "rollout.sampling.max_tokens",
    "max_new_tokens": "rollout.sampling.max_tokens",
    "temperature": "rollout.sampling.temperature",
    "top_p": "rollout.sampling.top_p",
    "beta": "loss.kl.coefficient",
    "kl_coef": "loss.kl.coefficient",
    "init_kl_coef": "loss.kl.coefficient",
    "epsilon_high": "loss.clip_high",
    "clip_ratio_low": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "entropy_coeff": "loss.entropy_coefficient",
    "loss_agg_mode": "loss.aggregation",
    "loss_type": "loss.kind and loss.aggregation",
    "loss_mode": "loss.kind",
    "importance_sampling_level": "loss.kind (gspo is the sequence's ratio)",
    "mask_truncated_completions": "loss.mask_truncated",
    "vllm_importance_sampling_mode": "loss.importance.kind and loss.importance.level",
    "vllm_importance_sampling_cap": "loss.importance.cap",
    "rollout_is": "loss.importance.level",
    "rollout_is_threshold": "loss.importance.cap",
    "staleness_threshold": "rollout.max_staleness",
    "async_queue_size": "rollout.max_staleness",
    "async_train": "rollout.max_staleness (1 or more)",
    "max_async_level": "rollout.max_staleness",
    "dynamic_sampling": "filter_groups",
    "dynamic_filtering": "filter_groups.enable",
    "adv_estimator": "advantage.kind",
    "advantage_estimator": "advantage.kind",
    "reward_funcs": "reward.terms",
    "custom_reward_function": "reward.terms: {kind: function, path: FILE.py:NAME}",
    "remote_rm_url": "reward.terms: {kind: http, url: ..., signature: openrlhf}",
    "report_to": "tracking: [{kind: wandb}], mlflow or prometheus",
    "logger": "tracking: [{kind: wandb}], mlflow or prometheus",
    "use_wandb": "tracking: [{kind: wandb}]",
    "wandb_project": "tracking: [{kind: wandb, project: ...}]",
    "max_grad_norm": "trainer.max_grad_norm",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "output_dir": "folder and name",
    "run_name": "name",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "eval_steps": "evaluation.every",
    "peft_config": "model.adapter",
    "use_peft": "model.adapter",
    "rank": "model.adapter.r",
    "load_in_4bit": "model.quantization.kind (nf4)",
    "load_in_8bit": "model.quantization.kind (int8)",
    "use_bnb_nested_quant": "model.quantization.double_quant",
    "lora_r": "model.adapter.r",
    "lora_rank": "model.adapter.r",
    "lora_target_modules": "model.adapter.target_modules",
    "use_dora": "model.adapter.kind (dora)",
    "lora_modules_to_save": "model.adapter.modules_to_save",
    "lora_adapter_path": "model.adapter.path",
    "adapter_name_or_path": "model.adapter.path",
    "actor_num_nodes": "placement.policy.nodes",
    "actor_num_gpus_per_node": "placement.policy.gpus_per_node",
    "nnodes": "placement.policy.nodes",
    "num_nodes": "placement.policy.nodes",
    "n_gpus_per_node": "placement.policy.gpus_per_node",
    "num_gpus_per_node": "placement.policy.gpus_per_node",
    "ref_num_nodes": "placement.policy.nodes (the reference is on the policy's ranks)",
    "ref_num_gpus_per_node": "placement.policy.gpus_per_node (the reference is on the policy's ranks)",
    "colocate_actor_ref": "placement.policy (the reference is always on its ranks)",
    "colocate_all_models": "placement.colocate (all)",
    "colocate_all": "placement.colocate (all)",
    "hybrid_engine": "placement.colocate (all)",
    "use_vllm": "rollout.engine.kind (vllm)",
    "vllm_mode": "placement.colocate (all, or leave it out for engines with GPUs of their own)",
    "vllm_num_engines": "rollout.engine.count",
    "num_engines": "rollout.engine.count",
    "vllm_tensor_parallel_size": "rollout.engine.tensor_parallel_size",
    "tensor_model_parallel_size": "rollout.engine.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "rollout.engine.gpu_memory_utilization",
    "vllm_enable_sleep": "placement.colocate (engines that share GPUs sleep)",
    "vllm_enable_sleep_mode": "placement.colocate (engines that share GPUs sleep)",
    "free_cache_engine": "placement.colocate (engines that share GPUs sleep)",
    "deepspeed_enable_sleep": "trainer.offload",
    "vllm_sync_backend": "weights.transport",
    "sync_backend": "weights.transport",
    "update_weights_bucket_megabytes": "weights.bucket_mb",
    "engine_kwargs": "rollout.engine.extra",
    "max_num_batched_tokens": "rollout.engine.extra",
    "nccl_timeout": "trainer.collective_timeout_s",
    "ddp_timeout": "trainer.collective_timeout_s",
    "ray_address": "cluster.address",
    "runtime_env": "cluster.env and cluster.forward_env",
    "zero_stage": "trainer.reshard_after_forward (true is ZeRO-3, false ZeRO-2)",
}


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The model classes in a field's annotation, through unions, Annotated and containers."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, Annotated, tuple, list):
        for inner in get_args(annotation):
            yield from models_in(inner)


def tag_of(model: type[BaseModel]) -> str | None:
    """The value of a model's discriminator (`kind` or `recipe`), None where it has none."""
    for name in ("kind", "recipe"):
        if name in model.model_fields:
            annotation = model.model_fields[name].annotation
            if get_origin(annotation) is Literal and len(get_args(annotation)) == 1:
                return str(get_args(annotation)[0])
    return None


def resolve(models: list[type[BaseModel]], location: tuple[int | str, ...]) -> tuple[list[type[BaseModel]], str]:
    """Follows a pydantic error location.

    Returns the models at its end and the dotted path as a user writes it (without the union tags pydantic adds).
    """
    path: list[str] = []
    for part in location:
        tagged = [model for model in models if tag_of(model) == part]
        if tagged and not any(part in model.model_fields for model in models):
            models = tagged
            continue
        path.append(str(part))
        if isinstance(part, int):
            continue
        found = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        models = [inner for annotation in found for inner in models_in(annotation)]
    return models, ".".join(path)


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key below a model."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in models_in(info.annotation):
            yield from leaves(inner, f"{prefix}{name}.")


def suggestion(key: str, here: list[type[BaseModel]], root: type[BaseModel], path: str = "") -> str:
    """What to write instead of the unknown `key`, or an empty string.

    Args:
        here: the models it was given to.
        path: where it was given, dotted.
    """
    names = sorted({name for model in here for name in model.model_fields})
    if path in leaves(root):
        return f"another kind has it; valid keys here: {', '.join(names)}"
    if key in FOREIGN_NAMES:
        return f"here it is called '{FOREIGN_NAMES[key]}'"
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    elsewhere = [path for path in dict.fromkeys(leaves(root)) if path.rsplit(".", 1)[-1] == key]
    if elsewhere:
        return f"did you mean '{elsewhere[0]}'?"
    similar = difflib.get_close_matches(key, {path.rsplit(".", 1)[-1] for path in leaves(root)}, n=1, cutoff=0.75)
    if similar:
        path = next(path for path in leaves(root) if path.rsplit(".", 1)[-1] == similar[0])
        return f"did you mean '{path}'?"
    return f"valid keys here: {', '.join(names)}" if names else ""
