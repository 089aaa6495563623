"""Loads a run's config: a YAML file and `section.key=value` overrides, checked."""

import difflib
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from lockstep.base.secrets import find_secrets, redact_text
from lockstep.config.errors import ConfigError, ConfigProblem
from lockstep.config.recipes import RECIPES
from lockstep.config.run_config import RunConfig

# Keys of TRL, verl, OpenRLHF and transformers, and their names here.
OTHER_FRAMEWORKS_KEYS = {
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
    """The model classes in a field's annotation, inside unions, Annotated and containers."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, Annotated, tuple, list):
        for inner in get_args(annotation):
            yield from models_in(inner)


def tag_of(model: type[BaseModel]) -> str | None:
    """The value of a model's discriminator (`kind` or `recipe`); None if it has none."""
    for name in ("kind", "recipe"):
        if name in model.model_fields:
            annotation = model.model_fields[name].annotation
            if get_origin(annotation) is Literal and len(get_args(annotation)) == 1:
                return str(get_args(annotation)[0])
    return None


def resolve_location(
    models: list[type[BaseModel]], location: tuple[int | str, ...]
) -> tuple[list[type[BaseModel]], str]:
    """Follows a pydantic error location.

    Returns the models at its end and the dotted path as users write it (without the union tags that pydantic adds).
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


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key below a model."""
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in models_in(info.annotation):
            yield from dotted_keys(inner, f"{prefix}{name}.")


def suggest_key(key: str, here: list[type[BaseModel]], root: type[BaseModel], path: str = "") -> str:
    """What to write instead of an unknown key; may be empty.

    Args:
        here: the models that do not have the key.
        path: its dotted path.
    """
    names = sorted({name for model in here for name in model.model_fields})
    if path in dotted_keys(root):
        return f"another kind has this key; valid keys here: {', '.join(names)}"
    if key in OTHER_FRAMEWORKS_KEYS:
        return f"here it is called '{OTHER_FRAMEWORKS_KEYS[key]}'"
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    elsewhere = [path for path in dict.fromkeys(dotted_keys(root)) if path.rsplit(".", 1)[-1] == key]
    if elsewhere:
        return f"did you mean '{elsewhere[0]}'?"
    similar = difflib.get_close_matches(key, {path.rsplit(".", 1)[-1] for path in dotted_keys(root)}, n=1, cutoff=0.75)
    if similar:
        path = next(path for path in dotted_keys(root) if path.rsplit(".", 1)[-1] == similar[0])
        return f"did you mean '{path}'?"
    return f"valid keys here: {', '.join(names)}" if names else ""


_SECRET_HINT = (
    "a run's config is written to files: put the secret into the environment, and name the variable where a field asks"
)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads and checks a run's file.

    Raises:
        ConfigError: unreadable file, malformed YAML (with line), unknown keys, wrong types, fields that contradict each
            other; all problems are reported at once.
    """
    return check_config(apply_overrides(read_yaml(path), overrides), source=str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML mapping; ConfigError if there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [ConfigProblem("file", f"cannot be read: {error}")]) from error
    try:
        values = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(str(path), [ConfigProblem("file", f"is not valid YAML: {error}")]) from error
    if not isinstance(values, dict):
        found = "an empty file" if values is None else type(values).__name__
        raise ConfigError(str(path), [ConfigProblem("file", f"expected a mapping of keys to values, found {found}")])
    return values


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `values` with each `a.b.c=value` set; values are read as YAML, numbers index lists."""
    result = yaml.safe_load(yaml.safe_dump(values))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError("command line", [ConfigProblem(override, "expected section.key=value")])
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError("command line", [ConfigProblem(key, f"{text!r} is not a YAML value: {error}")]) from error
        _set_override(result, key.strip().split("."), value, override)
    return dict(result)


def check_config(values: dict[str, Any], source: str) -> RunConfig:
    """Validates a mapping; `source` is named in the errors."""
    recipe = values.get("recipe")
    if recipe not in RECIPES:
        hint = f"one of {', '.join(RECIPES)}"
        message = "is missing" if recipe is None else f"{recipe!r} is unknown"
        raise ConfigError(source, [ConfigProblem("recipe", message, hint)])
    secrets = [
        ConfigProblem(path, f"contains what looks like {kind}", _SECRET_HINT) for path, kind in find_secrets(values)
    ]
    if secrets:
        raise ConfigError(source, secrets)
    try:
        config = RECIPES[recipe].model_validate(values)
        config.check_roles()
    except ValidationError as error:
        items = error.errors()
        roots = [item for item in items if not _is_follow_up(item, items)]
        raise ConfigError(source, [_to_problem(item, RECIPES[recipe]) for item in roots]) from error
    except ValueError as error:
        raise ConfigError(source, [ConfigProblem("", str(error))]) from error
    return config


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _set_override(values: Any, path: list[str], value: Any, override: str) -> None:
    for index, part in enumerate(path):
        key: Any = part
        if isinstance(values, list):
            if not part.isdigit() or int(part) >= len(values):
                where = ".".join(path[:index])
                raise ConfigError("command line", [ConfigProblem(override, f"{where} has no item {part!r}")])
            key = int(part)
        elif not isinstance(values, dict):
            raise ConfigError("command line", [ConfigProblem(override, f"{'.'.join(path[:index])} has no keys")])
        if index == len(path) - 1:
            values[key] = value
        elif isinstance(values, dict) and not isinstance(values.get(key), (dict, list)):
            given = values.get(key)
            values[key] = {"kind": given} if isinstance(given, str) else {}
        values = values[key]


def _is_follow_up(item: Any, items: Sequence[Any]) -> bool:
    """Whether a list is only too short because its items were refused."""
    inside = [other for other in items if other["loc"][: len(item["loc"])] == item["loc"]]
    return item["type"] == "too_short" and len(inside) > 1


def _to_problem(item: Any, root: type[BaseModel]) -> ConfigProblem:
    """Converts a pydantic error to the terms of the file."""
    location, kind, given = tuple(item["loc"]), item["type"], item["input"]
    if kind == "extra_forbidden":
        here, _ = resolve_location([root], location[:-1])
        _, path = resolve_location([root], location)
        return ConfigProblem(path, "unknown key", suggest_key(str(location[-1]), here, root, path))
    _, path = resolve_location([root], location)
    if kind == "missing":
        return ConfigProblem(path, "is required")
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    shown = repr(given)
    if isinstance(given, dict) or len(shown) > 80:
        return ConfigProblem(path, message)
    return ConfigProblem(path, f"{redact_text(shown)}: {message}")
