"""verl's settings with interpolations resolved, and what they imply for memory and the workers' environment."""

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
from lockstep.doctor.configs.shared_rules import judge_heads, judge_positions
from lockstep.doctor.configs.training_commands import TrainingCommand

ACTOR, ROLLOUT, REFERENCE = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"


_SELECT = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)(?:,([^}]*))?\}")


@dataclass(slots=True)
class VerlConfig:
    """Settings of one version, with interpolations resolved."""

    settings: ConfigSettings
    version: str
    engine: str
    """Model engine: dp (FSDP), megatron, veomni, torchtitan."""
    at_start: ConfigLocation = NO_LOCATION

    def get(self, name: str, depth: int = 0) -> Any:
        """The value after interpolation."""
        value = self.settings.get(name)
        match = _SELECT.fullmatch(value) if isinstance(value, str) else None
        if match is None or depth > 8:
            return value
        taken = self.get(match[1], depth + 1)
        return taken if taken is not None else match[2]

    def _plain(self, name: str) -> ConfigSettings:
        return ConfigSettings({name: ConfigSetting(name, self.get(name), NO_LOCATION)})

    def whole(self, name: str) -> int | None:
        """See `ConfigSettings.whole`."""
        return self._plain(name).whole(name)

    def number(self, name: str) -> float | None:
        """See `ConfigSettings.number`."""
        return self._plain(name).number(name)

    def on(self, name: str) -> bool:
        """Whether a boolean is true."""
        return self._plain(name).flag(name) is True

    def text(self, name: str) -> str | None:
        """See `ConfigSettings.text`."""
        return self._plain(name).text(name)

    def set(self, name: str) -> bool:
        """Whether it is not null; an unknown value counts as set."""
        return (name in self.settings and self.settings.get(name) is not None) or self.get(name) not in (None, "null")

    def at(self, *names: str) -> ConfigLocation:
        """Location of the first of these that is set, else of the program."""
        place = self.settings.place(*names)
        return place if place.file else self.at_start

    @property
    def gpus(self) -> int | None:
        """GPUs of the trainer."""
        nodes, each = self.whole("trainer.nnodes"), self.whole("trainer.n_gpus_per_node")
        return nodes * each if nodes and each else None


VALIDATION_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/utils/config.py"


def model_parallel_ranks(run: VerlConfig) -> int:
    """Number of ranks that process the same samples."""
    if run.engine == "megatron":
        sizes = [
            run.whole(f"{ACTOR}.megatron.{each}_parallel_size") or 1
            for each in ("tensor_model", "pipeline_model", "context")
        ]
        return sizes[0] * sizes[1] * sizes[2]
    return max(
        run.whole(f"{ACTOR}.ulysses_sequence_parallel_size") or 1,
        run.whole(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size") or 1,
    )


def verl_sequence_tokens(run: VerlConfig) -> int | None:
    prompt, response = run.whole("data.max_prompt_length"), run.whole("data.max_response_length")
    return prompt + response if prompt and response else None


ULYSSES_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/verl/models/transformers/monkey_patch.py"
VERL_PROGRAM = "verl.trainer.main_ppo"


def verl_engine(raw: ConfigSettings, config: str) -> str:
    for name in ("megatron", "veomni", "torchtitan"):
        chosen = raw.text("model_engine") == name or raw.text(f"{ACTOR}.strategy") == name
        if chosen or name in config:
            return name
    return "dp"


def judge_engine_options(advice: ConfigFindings, run: VerlConfig, known: dict[str, Any]) -> None:
    """Reports options of another model engine's config."""
    for setting in run.settings:
        option = known.get(setting.name)
        if option is not None and option.only and run.engine not in option.only and not setting.forced:
            where = " or ".join(option.only)
            add = advice.error if run.engine == "dp" and f"{ACTOR}.strategy" not in run.settings else advice.warn
            add(
                "option-other-engine",
                f"{setting.name} exists only in the config of {where}",
                "Hydra fails with: key is not in struct.",
                f"model_engine={option.only[0]} or --config-name=ppo_{option.only[0]}_trainer",
                VALIDATION_SOURCE,
                setting.place,
            )


def judge_verl_memory(advice: ConfigFindings, run: VerlConfig, folder: Path, gpu_gib: float | None) -> None:
    path = "actor_rollout_ref.model.path"
    shape = model_memory.find_model(run.text(path) if path in run.settings else None, folder)
    if shape is None:
        advice.unchecked(
            "memory-model",
            "memory: the model's size is not known",
            "give a folder with its config.json, or a name that contains its size",
            run.at(path),
        )
        return
    tensor = run.whole(f"{ROLLOUT}.tensor_model_parallel_size") or 1
    judge_heads(
        advice, shape, tensor, f"{ROLLOUT}.tensor_model_parallel_size", run.at(f"{ROLLOUT}.tensor_model_parallel_size")
    )
    ulysses = run.whole(f"{ACTOR}.ulysses_sequence_parallel_size") or 1
    judge_heads(
        advice,
        shape,
        ulysses,
        f"{ACTOR}.ulysses_sequence_parallel_size",
        run.at(f"{ACTOR}.ulysses_sequence_parallel_size"),
        ULYSSES_SOURCE,
    )
    longest = verl_sequence_tokens(run)
    judge_positions(
        advice,
        shape,
        run.whole(f"{ROLLOUT}.max_model_len") or longest,
        "sequences",
        run.at(f"{ROLLOUT}.max_model_len", "data.max_response_length"),
    )
    engine = _engine_share(advice, run, shape, longest)
    offloaded = run.on(f"{ACTOR}.fsdp_config.param_offload") and run.on(f"{ACTOR}.fsdp_config.optimizer_offload")
    fused = run.on("actor_rollout_ref.model.use_fused_kernels")
    batch = model_memory.BatchTokens(_micro_batch_tokens(run, longest) if shape.layers else None, fused)
    what = "the actor's training"
    model_memory.judge_gpu_memory(
        advice, _training_states(run, shape), engine, batch, gpu_gib, run.at(path), offloaded, what
    )


def _engine_share(
    advice: ConfigFindings, run: VerlConfig, shape: model_memory.ModelSize, longest: int | None
) -> model_memory.EngineShare | None:
    name = f"{ROLLOUT}.gpu_memory_utilization"
    share = run.number(name)
    if share is not None and not 0 < share <= 1:
        seen = f"{name}={share:g} is not a share of a GPU"
        advice.error(
            "engine-memory", seen, "", "a number between 0 and 1", model_memory.UTILIZATION_SOURCE, run.at(name)
        )
        return None
    if not share or run.text(f"{ROLLOUT}.name") == "hf":
        return None
    tensor = run.whole(f"{ROLLOUT}.tensor_model_parallel_size") or 1
    shared = (run.whole(f"{ROLLOUT}.nnodes") or 0) == 0
    sleeps = run.settings.flag(f"{ROLLOUT}.free_cache_engine") is not False
    at = run.at(name, f"{ROLLOUT}.tensor_model_parallel_size")
    return model_memory.EngineShare(shape, tensor, share, shared, sleeps, longest, at, name)


def _micro_batch_tokens(run: VerlConfig, longest: int | None) -> int | None:
    if run.on(f"{ACTOR}.use_dynamic_bsz"):
        return run.whole(f"{ACTOR}.ppo_max_token_len_per_gpu")
    micro = run.whole(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    return micro * longest if micro and longest else None


def _training_states(run: VerlConfig, shape: model_memory.ModelSize) -> model_memory.TrainingStates | None:
    """FSDP keeps master weights, gradients and Adam's states in `model_dtype`, float32 by default."""
    if run.engine != "dp":
        return None
    size = run.whole(f"{ACTOR}.fsdp_config.fsdp_size") or -1
    wide = 4 if (run.text(f"{ACTOR}.fsdp_config.model_dtype") or "fp32") in ("fp32", "float32") else 2
    on_cpu = run.on(f"{ACTOR}.fsdp_config.offload_policy")
    trainable = 0.02 if (run.whole("actor_rollout_ref.model.lora_rank") or 0) > 0 else 1.0
    ranks = size if size > 0 else run.gpus
    return model_memory.TrainingStates(shape, ranks, 3, on_cpu, on_cpu, trainable, wide, wide, 2 * wide)


def judge_verl_environment(advice: ConfigFindings, job: TrainingCommand, raw: ConfigSettings) -> None:
    """Reports exported variables, which reach the driver but not a Ray cluster's other nodes."""
    from lockstep.doctor.configs.shared_rules import RAY_ENVIRONMENT_SOURCE

    given = {setting.name.rpartition(".")[2] for setting in raw if ".runtime_env.env_vars." in setting.name} | set(
        job.workers
    )
    nodes = raw.whole("trainer.nnodes")
    lost = sorted(
        name
        for name in job.shell
        if name.startswith(("NCCL_", "TORCH_", "VLLM_", "GLOO_", "UCX_", "FI_")) and name not in given
    )
    if lost and (job.through_ray or (nodes or 1) > 1):
        place = "+ray_kwargs.ray_init.runtime_env.env_vars"
        advice.warn(
            "environment-driver-only",
            f"{', '.join(lost)}: set in the driver's shell, but not visible to workers on other nodes",
            "They get the environment in which their node's raylet was started.",
            " ".join(f"{place}.{name}='{job.shell[name].text if job.shell[name].known else '...'}'" for name in lost),
            RAY_ENVIRONMENT_SOURCE,
            job.shell[lost[0]].place,
        )
