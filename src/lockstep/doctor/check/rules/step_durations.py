"""Estimates how long each stage of a step takes at most, for GPUs with known rates, and judges configured timeouts by
that. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.config.train_role import TrainRole
from lockstep.doctor.check.rules.memory_fit import Config, compute_dtype, max_sequence_tokens
from lockstep.doctor.check.rules.model_shape import DTYPE_BYTES, ModelShape
from lockstep.doctor.output.findings import Finding

SCALING_SOURCE = "https://arxiv.org/abs/2001.08361"
"""Kaplan et al. 2020, section 2.1: 2 operations per parameter and token in the forward pass, 4 in the backward pass."""
PEAKS_SOURCE = (
    "https://github.com/pytorch/torchtitan/blob/8fb285ca4a6b2945e81e105b5433ea25f613e100/torchtitan/tools/utils.py"
)
COMPUTE_EFFICIENCY = 0.35
"""Share of a GPU's peak that training is assumed to reach."""
MEMORY_EFFICIENCY = 0.5
"""Share of a GPU's memory bandwidth that decoding is assumed to reach."""
DISK_RATE = 500e6
"""Assumed bytes per second when writing a checkpoint and when loading."""
LINK_RATE = 1e9
"""Assumed bytes per second between hosts: 10 Gbit/s."""


@dataclass(frozen=True, slots=True)
class GpuSpeed:
    """Peak rates of one GPU."""

    flops: float
    """Dense bfloat16 operations per second."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    source: str


GPU_SPEEDS: Mapping[str, GpuSpeed] = {
    "A100-SXM4-80GB": GpuSpeed(312e12, 2.039e12, "https://www.nvidia.com/en-us/data-center/a100/"),
    "A100-SXM4-40GB": GpuSpeed(312e12, 1.555e12, "https://www.nvidia.com/en-us/data-center/a100/"),
    "H100 80GB HBM3": GpuSpeed(989e12, 3.35e12, "https://www.nvidia.com/en-us/data-center/h100/"),
    "H200": GpuSpeed(989e12, 4.8e12, "https://www.nvidia.com/en-us/data-center/h200/"),
}
"""By a part of the name that nvidia-smi prints. Operations per second as in PEAKS_SOURCE, looked up in 2026-11."""


def gpu_speed(name: str) -> GpuSpeed | None:
    """Rates of a GPU by the name that nvidia-smi prints; None if they are not known."""
    return next((speed for part, speed in GPU_SPEEDS.items() if part in name), None)


@dataclass(frozen=True, slots=True)
class StepDurations:
    """Maximum duration of each stage, in seconds, for one trained role."""

    rollout: float
    """All completions of a step, each at full length, from engines with the role's model."""
    train: float
    """All updates of a step."""
    update: float
    """One optimizer step, which a rank with little work spends waiting in a collective."""
    publish: float
    """Transfer of the weights to engines on other hosts."""
    bucket: float
    """Transfer of one bucket."""
    checkpoint: float
    """Writing weights and optimizer state to disk."""
    load: float
    """Loading the weights of an engine from disk."""
    prefill: float
    """One engine step over all prompts that it accepts at once."""
    collective: float
    """The largest collective, between hosts."""


def step_durations(
    config: Config,
    role: TrainRole,
    shape: ModelShape,
    speed: GpuSpeed,
    link: float = LINK_RATE,
    disk: float = DISK_RATE,
) -> StepDurations:
    """Durations of a step with sequences of full length.

    Args:
        shape: the shape of the role's model.
        link: bytes per second between hosts.
        disk: bytes per second of the disk with the run's folder.
    """
    width = DTYPE_BYTES[compute_dtype(config, role)]
    length = max_sequence_tokens(config, shape)
    sequences, passes = config.sequences_per_step, config.passes_of(role)
    per_token = (8 if role.trainer.activation_checkpointing else 6) * shape.active
    per_token += 12 * shape.layers * shape.heads * shape.head_dim * length // 2  # attention, causal
    work = passes * sequences * length * per_token + image_flops(config, role, shape)
    train = work / role.trainer.ranks / (COMPUTE_EFFICIENCY * speed.flops)
    updates = role.optimizer_steps // config.steps
    weights = shape.parameters * width
    engine_rows = _sequences_per_step(config)
    prefill = 2 * shape.active * engine_rows * length + _flops_of_images(shape) * engine_rows
    return StepDurations(
        rollout=_rollout_seconds(config, shape, speed, width, length),
        train=train,
        update=train / max(1, updates),
        publish=shape.sent * width / link,
        bucket=config.weights.bucket_mb * 2**20 / link,
        checkpoint=12 * shape.parameters / disk,
        load=weights / disk,
        prefill=prefill / (COMPUTE_EFFICIENCY * speed.flops),
        collective=shape.largest_unit * width / link,
    )


def image_flops(config: Config, role: TrainRole, shape: ModelShape) -> float:
    """Operations of vision tower and projector in the training of a step: for each sample, of which several sequences
    may be made, once per pass; if nothing of them is trained, once per step."""
    if shape.vision is None:
        return 0.0
    forward = _samples_per_step(config) * shape.vision.flops
    if not shape.vision.trained:
        return forward
    return config.passes_of(role) * (4 if role.trainer.activation_checkpointing else 3) * forward


def _flops_of_images(shape: ModelShape) -> float:
    return 0.0 if shape.vision is None else shape.vision.flops


def _samples_per_step(config: Config) -> int:
    """The number of prompts, pairs or documents of a step."""
    if config.generation is not None:
        return config.generation.prompts_per_step
    return config.sequences_per_step // (2 if config.data_kind == "pairs" else 1)


def _sequences_per_step(config: Config) -> int:
    engine = config.rollout.engine
    return engine.max_num_seqs if engine.kind == "vllm" else engine.max_rows


def _rollout_seconds(config: Config, shape: ModelShape, speed: GpuSpeed, width: int, length: int) -> float:
    """Seconds of generating all completions.

    For each token, decoding reads the active weights and the batch's keys and values, or computes if that takes longer.
    The images of each prompt are computed once.
    """
    engine = config.rollout.engine
    split = engine.tensor_parallel_size if engine.kind == "vllm" else 1
    wanted = config.generation
    sequences = config.sequences_per_step if wanted is None else wanted.prompts_per_step * wanted.group_size
    per_engine = -(-sequences // engine.count)
    batch = min(per_engine, _sequences_per_step(config))
    waves = -(-per_engine // batch)
    read = (
        (shape.active * width + batch * length / 2 * shape.kv_bytes(width))
        / split
        / (MEMORY_EFFICIENCY * speed.bandwidth)
    )
    compute = 2 * shape.active * batch / split / (COMPUTE_EFFICIENCY * speed.flops)
    prompts = 0 if wanted is None else -(-wanted.prompts_per_step // engine.count)
    images = prompts * _flops_of_images(shape) / split / (COMPUTE_EFFICIENCY * speed.flops)
    return waves * config.rollout.sampling.max_tokens * max(read, compute) + images


@dataclass(frozen=True, slots=True)
class ConfiguredTimeout:
    """A timeout that the config or the environment sets."""

    name: str
    seconds: float
    stage: str
    """The field of `StepDurations` that must be shorter than the timeout."""
    what: str
    source: str = ""
    role: str = "policy"
    """The trained role whose stage it is."""


TIMEOUT_VARIABLES: Mapping[str, tuple[str, str, str]] = {
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": (
        "prefill", "one step of an engine processes all its prompts",
        "https://github.com/vllm-project/vllm/blob/main/vllm/envs.py",
    ),
    "VLLM_ENGINE_READY_TIMEOUT_S": (
        "load", "an engine loads its weights", "https://github.com/vllm-project/vllm/blob/main/vllm/envs.py",
    ),
}  # fmt: skip
"""Variables that limit a stage of a Lockstep run, in seconds."""


def configured_timeouts(config: Config, environment: Mapping[str, str]) -> list[ConfiguredTimeout]:
    """The timeouts that the config or the environment sets explicitly, without defaults."""
    found = []
    cluster, weights = config.cluster, config.weights
    for role in config.train_roles:
        if "collective_timeout_s" in role.trainer.model_fields_set:
            name, seconds = role.field("trainer.collective_timeout_s"), role.trainer.collective_timeout_s
            what = "a rank with a short row waits in a collective for one with a long row"
            found.append(ConfiguredTimeout(name, seconds, "update", what, role=role.name))
            what = "the largest collective between hosts needs time"
            found.append(ConfiguredTimeout(name, seconds, "collective", what, role=role.name))
    if "stall_limit_s" in cluster.model_fields_set:
        what = "an engine shows no progress while it loads its weights"
        found.append(ConfiguredTimeout("cluster.stall_limit_s", cluster.stall_limit_s, "load", what))
    if "receiver_limit_s" in weights.model_fields_set:
        what = "a receiver shows no progress while a bucket of weights is transferred"
        found.append(ConfiguredTimeout("weights.receiver_limit_s", weights.receiver_limit_s, "bucket", what))
    for name, (stage, what, source) in TIMEOUT_VARIABLES.items():
        try:
            found.append(ConfiguredTimeout(name, float(environment[name]), stage, what, source))
        except (KeyError, ValueError):
            continue
    return found


def judge_durations(
    config: Config, shapes: Mapping[str, ModelShape], gpu: str, environment: Mapping[str, str], link: float = LINK_RATE
) -> list[Finding]:
    """Reports the durations of stages, and timeouts that are too short for them.

    Args:
        shapes: the shapes of the trained models, by role.
        gpu: name of the GPU; empty without a GPU.
        link: bytes per second of the slowest link between hosts.
    """
    found = [
        _largest_collective(config, role, shapes[role.name], link)
        for role in config.train_roles
        if role.trainer.ranks > 1
    ]
    speed = gpu_speed(gpu)
    timeouts = configured_timeouts(config, environment)
    if speed is None:
        what = f"the speed of {gpu} is not known" if gpu else "there is no GPU"
        named = ", ".join(dict.fromkeys(f"{each.name}={each.seconds:g} s" for each in timeouts))
        against = f"; {named} was not compared with them" if named else ""
        return [*found, Finding("durations", "unchecked", "", f"stages were not estimated: {what}{against}")]
    durations = {role.name: step_durations(config, role, shapes[role.name], speed, link) for role in config.train_roles}
    found.append(Finding("durations", "note", "", _durations_text(durations), source=SCALING_SOURCE))
    for timeout in timeouts:
        duration = getattr(durations[timeout.role], timeout.stage)
        if timeout.seconds >= 2 * duration:
            continue
        short = timeout.seconds < duration
        found.append(
            Finding(
                "timeout-short", "error" if short else "warning", "",
                f"{timeout.name} is {timeout.seconds:g} s, and {timeout.what}: about {_duration_text(duration)}",
                "it would end a healthy run" if short else "on a busy host it would end a healthy run",
                f"remove {timeout.name} (stalls are detected by missing progress, not by time), or set it to "
                f"{max(60, round(4 * duration)):d} or more",
                timeout.source,
            )
        )  # fmt: skip
    return found


def _largest_collective(config: Config, role: TrainRole, shape: ModelShape, link: float) -> Finding:
    size = shape.largest_unit * DTYPE_BYTES[compute_dtype(config, role)]
    of_role = "" if len(config.train_roles) == 1 else f" of the {role.name}"
    return Finding(
        "largest-collective", "ok", "",
        f"the largest collective{of_role} gathers {size / 2**20:,.1f} MiB ({_unit_text(shape)}): "
        f"{size / link:.2f} s at {link / 1e6:,.0f} MB/s",
    )  # fmt: skip


def _durations_text(durations: Mapping[str, StepDurations]) -> str:
    """The stages of a step: those of the policy, and the training of other roles."""
    policy, *others = durations
    row = [f"{name} {_duration_text(getattr(durations[policy], name))}" for name in ("rollout", "train", "publish")]
    row[2:2] = [f"train of the {role} {_duration_text(durations[role].train)}" for role in others]
    row.append(f"checkpoint {_duration_text(sum(each.checkpoint for each in durations.values()))}")
    return (
        f"a step with completions of full length takes about: {', '.join(row)} (at {COMPUTE_EFFICIENCY:.0%} of the "
        "GPU's peak)"
    )


def _unit_text(shape: ModelShape) -> str:
    if shape.largest_unit == max(shape.per_layer, default=0):
        return "a decoder layer"
    seeing = shape.vision is not None and shape.largest_unit == shape.vision.largest_unit
    return "a part of the vision tower" if seeing else "embedding, head and last norm"


def _duration_text(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.1f} s"
