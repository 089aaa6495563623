"""verl's settings with interpolations resolved, and the memory and environment that follow from them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.doctor.configs import model_memory
from lockstep.doctor.configs.config_settings import (
    NO_LOCATION,
    ConfigFindings,
    ConfigLocation,
    ConfigSetting,
    ConfigSettings,
)
from lockstep.doctor.configs.shared_rules import RAY_ENVIRONMENT_SOURCE, judge_heads, judge_positions
from lockstep.doctor.configs.training_commands import TrainingCommand

ACTOR, ROLLOUT, REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


_SELECT = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)(?:,([^}]*))?\}")


@dataclass(slots=True)
class VerlConfig:
    """The settings of a training, with interpolations resolved and the defaults of one version."""

    settings: ConfigSettings
    version: str
    engine: str
    """Model engine: dp (FSDP), megatron, veomni, torchtitan."""
    location: ConfigLocation = NO_LOCATION

    def get(self, name: str, depth: int = 0) -> Any:
        """The value, or the one to which its interpolation refers."""
        value = self.settings.get(name)
        match = _SELECT.fullmatch(value) if isinstance(value, str) else None
        if match is None or depth > 8:
            return value
        referenced = self.get(match[1], depth + 1)
        return referenced if referenced is not None else match[2]

    def _resolved(self, name: str) -> ConfigSettings:
        return ConfigSettings({name: ConfigSetting(name, self.get(name), NO_LOCATION)})

    def integer(self, name: str) -> int | None:
        """See `ConfigSettings.integer`."""
        return self._resolved(name).integer(name)

    def number(self, name: str) -> float | None:
        """See `ConfigSettings.number`."""
        return self._resolved(name).number(name)

    def on(self, name: str) -> bool:
        """Whether a boolean is true."""
        return self._resolved(name).flag(name) is True

    def text(self, name: str) -> str | None:
        """See `ConfigSettings.text`."""
        return self._resolved(name).text(name)

    def has_value(self, name: str) -> bool:
        """Whether the value is not null; an unknown value counts as a value."""
        return (name in self.settings and self.settings.get(name) is not None) or self.get(name) not in (None, "null")

    def location_of(self, *names: str) -> ConfigLocation:
        """Location of the first of these options that is given, else of the program."""
        location = self.settings.location_of(*names)
        return location if location.file else self.location

    @property
    def gpus(self) -> int | None:
        """Number of GPUs of the trainer."""
        nodes, per_node = self.integer("trainer.nnodes"), self.integer("trainer.n_gpus_per_node")
        return nodes * per_node if nodes and per_node else None


VALIDATION_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/config.py"


def model_parallel_ranks(config: VerlConfig) -> int:
    """Number of ranks that process the same samples."""
    if config.engine == "megatron":
        sizes = [
            config.integer(f"{ACTOR}.megatron.{each}_parallel_size") or 1
            for each in ("tensor_model", "pipeline_model", "context")
        ]
        return sizes[0] * sizes[1] * sizes[2]
    return max(
        config.integer(f"{ACTOR}.ulysses_sequence_parallel_size") or 1,
        config.integer(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size") or 1,
    )


def verl_sequence_tokens(config: VerlConfig) -> int | None:
    """Maximum number of tokens of a prompt with its response; None if it is not known."""
    prompt, response = config.integer("data.max_prompt_length"), config.integer("data.max_response_length")
    return prompt + response if prompt and response else None


ULYSSES_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/models/transformers/monkey_patch.py"
VERL_PROGRAM = "verl.trainer.main_ppo"


def verl_engine(raw: ConfigSettings, config_name: str) -> str:
    """The model engine that the overrides or the name of the config select."""
    for name in ("megatron", "veomni", "torchtitan"):
        chosen = raw.text("model_engine") == name or raw.text(f"{ACTOR}.strategy") == name
        if chosen or name in config_name:
            return name
    return "dp"


def judge_engine_options(advice: ConfigFindings, config: VerlConfig, known: dict[str, Any]) -> None:
    """Reports options that only another model engine has."""
    for setting in config.settings:
        option = known.get(setting.name)
        if option is not None and option.only and config.engine not in option.only and not setting.forced:
            where = " or ".join(option.only)
            add = advice.error if config.engine == "dp" and f"{ACTOR}.strategy" not in config.settings else advice.warn
            add(
                "option-other-engine",
                f"{setting.name} exists only in the config of {where}",
                "Hydra fails with: key is not in struct.",
                f"model_engine={option.only[0]} or --config-name=ppo_{option.only[0]}_trainer",
                VALIDATION_SOURCE,
                setting.location,
            )


def judge_verl_memory(advice: ConfigFindings, config: VerlConfig, folder: Path, gpu_gib: float | None) -> None:
    path = "actor_rollout_ref.model.path"
    shape = model_memory.find_model(config.text(path) if path in config.settings else None, folder)
    if shape is None:
        advice.unchecked(
            "memory-model",
            "memory was not estimated: the model's size is not known",
            "name a folder with the model's config.json, or a model with its size in the name",
            config.location_of(path),
        )
        return
    tensor = config.integer(f"{ROLLOUT}.tensor_model_parallel_size") or 1
    judge_heads(
        advice,
        shape,
        tensor,
        f"{ROLLOUT}.tensor_model_parallel_size",
        config.location_of(f"{ROLLOUT}.tensor_model_parallel_size"),
    )
    ulysses = config.integer(f"{ACTOR}.ulysses_sequence_parallel_size") or 1
    judge_heads(
        advice,
        shape,
        ulysses,
        f"{ACTOR}.ulysses_sequence_parallel_size",
        config.location_of(f"{ACTOR}.ulysses_sequence_parallel_size"),
        ULYSSES_SOURCE,
    )
    longest = verl_sequence_tokens(config)
    judge_positions(
        advice,
        shape,
        config.integer(f"{ROLLOUT}.max_model_len") or longest,
        "sequences",
        config.location_of(f"{ROLLOUT}.max_model_len", "data.max_response_length"),
    )
    engine = _engine_share(advice, config, shape, longest)
    offloaded = config.on(f"{ACTOR}.fsdp_config.param_offload") and config.on(f"{ACTOR}.fsdp_config.optimizer_offload")
    fused = config.on("actor_rollout_ref.model.use_fused_kernels")
    batch = model_memory.BatchTokens(_micro_batch_tokens(config, longest) if shape.layers else None, fused)
    what = "the actor's training"
    model_memory.judge_gpu_memory(
        advice, _training_states(config, shape), engine, batch, gpu_gib, config.location_of(path), offloaded, what
    )


def _engine_share(
    advice: ConfigFindings, config: VerlConfig, shape: model_memory.ModelSize, longest: int | None
) -> model_memory.EngineShare | None:
    name = f"{ROLLOUT}.gpu_memory_utilization"
    share = config.number(name)
    if share is not None and not 0 < share <= 1:
        seen = f"{name}={share:g} is not a share of a GPU"
        advice.error(
            "engine-memory",
            seen,
            "",
            "a number above 0 and at most 1",
            model_memory.UTILIZATION_SOURCE,
            config.location_of(name),
        )
        return None
    if not share or config.text(f"{ROLLOUT}.name") == "hf":
        return None
    tensor = config.integer(f"{ROLLOUT}.tensor_model_parallel_size") or 1
    shared = (config.integer(f"{ROLLOUT}.nnodes") or 0) == 0
    sleeps = config.settings.flag(f"{ROLLOUT}.free_cache_engine") is not False
    at = config.location_of(name, f"{ROLLOUT}.tensor_model_parallel_size")
    return model_memory.EngineShare(shape, tensor, share, shared, sleeps, longest, at, name)


def _micro_batch_tokens(config: VerlConfig, longest: int | None) -> int | None:
    if config.on(f"{ACTOR}.use_dynamic_bsz"):
        return config.integer(f"{ACTOR}.ppo_max_token_len_per_gpu")
    micro = config.integer(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    return micro * longest if micro and longest else None


def _training_states(config: VerlConfig, shape: model_memory.ModelSize) -> model_memory.TrainingStates | None:
    """The states that FSDP keeps in `model_dtype` (float32 by default): weights, gradients and Adam's states."""
    if config.engine != "dp":
        return None
    size = config.integer(f"{ACTOR}.fsdp_config.fsdp_size") or -1
    bytes_per_value = 4 if (config.text(f"{ACTOR}.fsdp_config.model_dtype") or "fp32") in ("fp32", "float32") else 2
    on_cpu = config.on(f"{ACTOR}.fsdp_config.offload_policy")
    trainable = 0.02 if (config.integer("actor_rollout_ref.model.lora_rank") or 0) > 0 else 1.0
    ranks = size if size > 0 else config.gpus
    return model_memory.TrainingStates(
        shape, ranks, 3, on_cpu, on_cpu, trainable, bytes_per_value, bytes_per_value, 2 * bytes_per_value
    )


def judge_verl_environment(advice: ConfigFindings, job: TrainingCommand, raw: ConfigSettings) -> None:
    """Reports variables that the driver's shell exports but workers on other nodes do not get."""
    given = {setting.name.rpartition(".")[2] for setting in raw if ".runtime_env.env_vars." in setting.name} | set(
        job.workers
    )
    nodes = raw.integer("trainer.nnodes")
    missing = sorted(
        name
        for name in job.shell
        if name.startswith(("NCCL_", "TORCH_", "VLLM_", "GLOO_", "UCX_", "FI_")) and name not in given
    )
    if missing and (job.through_ray or (nodes or 1) > 1):
        prefix = "+ray_kwargs.ray_init.runtime_env.env_vars"
        advice.warn(
            "environment-driver-only",
            f"{', '.join(missing)}: set in the driver's shell, but not visible to workers on other nodes",
            "A worker gets the environment in which the raylet of its node was started.",
            " ".join(
                f"{prefix}.{name}='{job.shell[name].text if job.shell[name].known else '...'}'" for name in missing
            ),
            RAY_ENVIRONMENT_SOURCE,
            job.shell[missing[0]].location,
        )
