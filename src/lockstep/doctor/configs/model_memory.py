"""The size of a model (from its config.json, its known name, or the `7B` in its name), and the GPU memory that training
and generating with it need.

Weights, gradients and Adam's states in mixed precision: 2 + 2 + 12 bytes per parameter, divided by ZeRO as in its paper
(Rajbhandari et al. 2020, arXiv:1910.02054, section 3 and figure 1). Activations with full recomputation: 2 bytes x
tokens x hidden x layers (Korthikanti et al. 2022, arXiv:2205.05198, section 5). Logits: tokens x vocabulary in
bfloat16, and their gradient. An engine: weights and cache must fit its share of the GPU. All are lower bounds.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.base.json_text import MalformedJson, read_json
from lockstep.doctor.configs.config_settings import NO_LOCATION, ConfigFindings, ConfigLocation
from lockstep.doctor.configs.option_tables import read_option_data
from lockstep.doctor.output.findings import Severity

MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a dense decoder; 0 if not known."""

    name: str
    parameters: float
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_size: int = 0
    vocabulary: int = 0
    max_positions: int = 0
    """Longest sequence in tokens, according to its config."""
    source: str = ""

    @property
    def size(self) -> str:
        """The number of parameters in billions, such as `7.62B`."""
        return f"{self.parameters / 1e9:.3g}B"

    def cache_bytes(self, width: int = 2) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_size * width


def decoder_parameters(
    layers: int, hidden: int, heads: int, kv_heads: int, head_size: int, inner: int, vocabulary: int, tied: bool
) -> int:
    """Number of weights of a gated decoder: attention and MLP matrices of each layer, embeddings and head.

    Norms and biases, about a thousandth of all weights, are ignored.
    """
    attention = hidden * head_size * (2 * heads + 2 * kv_heads)
    return layers * (attention + 3 * hidden * inner) + vocabulary * hidden * (1 if tied else 2)


def find_model(name: str | None, folder: Path) -> ModelSize | None:
    """The size of the model `name` on the hub or in a folder (relative to `folder`); None if it is not known."""
    if not name:
        return None
    local = Path(name).expanduser()
    shape = _local_model(local if local.is_absolute() else folder / local, name)
    return shape or _known_model(name) or _size_from_name(name)


def _local_model(path: Path, name: str) -> ModelSize | None:
    file = path / "config.json"
    try:
        raw = read_json(file, max_bytes=MAX_CONFIG_BYTES)
    except (OSError, MalformedJson):
        return None
    if not isinstance(raw, dict):
        return None
    if isinstance(raw.get("text_config"), dict):
        raw = {**raw, **raw["text_config"]}
    return model_size_from_config(raw, name, str(file))


def model_size_from_config(raw: dict[str, Any], name: str, source: str = "") -> ModelSize | None:
    """Reads the size from a config.json; None if fields are missing or the model is a mixture of experts."""

    def number(key: str, otherwise: int = 0) -> int:
        value = raw.get(key)
        return value if type(value) is int and 0 < value < 1 << 32 else otherwise

    layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
    inner, vocabulary = number("intermediate_size"), number("vocab_size")
    if not (layers and hidden and heads and inner and vocabulary):
        return None
    if any(number(key) > 1 for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return None
    kv, size = number("num_key_value_heads", heads), number("head_dim", hidden // heads)
    count = decoder_parameters(
        layers, hidden, heads, kv, size, inner, vocabulary, raw.get("tie_word_embeddings") is True
    )
    return ModelSize(
        name, count, layers, hidden, heads, kv, size, vocabulary, number("max_position_embeddings"), source
    )


def _known_model(name: str) -> ModelSize | None:
    plain = name.rstrip("/").rpartition("/")[2].lower().replace("meta-llama", "llama").removesuffix("-hf")
    plain = re.sub(r"^(qwen[\d.]+)-(?:math|coder)-", r"\1-", plain)  # same shape as their base model
    content = read_option_data("models")
    matches = [key for key in content["models"] if re.fullmatch(re.escape(key) + r"(?:-(?!\d+(?:\.\d+)?b).*)?", plain)]
    if not matches:
        matches = [key for key in content["models"] if re.search(r"(?:^|[-_])" + re.escape(key) + r"$", plain)]
    if not matches:
        return None
    entry = content["models"][max(matches, key=len)]
    layers, hidden, heads, kv, size, inner, vocabulary, tied = entry["shape"]
    count = decoder_parameters(layers, hidden, heads, kv, size, inner, vocabulary, tied)
    source = f"{content['source']}/{entry['hub']}/blob/main/config.json"
    return ModelSize(name, count, layers, hidden, heads, kv, size, vocabulary, 0, source)


def _size_from_name(name: str) -> ModelSize | None:
    plain = name.rstrip("/").rpartition("/")[2]
    if re.search(r"(?i)\d+x\d|a\d+(?:\.\d+)?b\b", plain):
        return None  # a mixture of experts
    match = re.search(r"(?i)(?<![\w.])(\d{1,3}(?:\.\d{1,2})?)b(?![a-z0-9])", plain.replace("_", "-"))
    return ModelSize(name, float(match[1]) * 1e9) if match and float(match[1]) > 0 else None


GIB = 1 << 30
GPU_SIZES_GIB = (24, 40, 48, 80, 96, 141, 192, 288)
"""Common GPU memory sizes in GiB."""
ZERO_SOURCE = "https://arxiv.org/abs/1910.02054"
ACTIVATIONS_SOURCE = "https://arxiv.org/abs/2205.05198"
UTILIZATION_SOURCE = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"


@dataclass(frozen=True, slots=True)
class TrainingStates:
    """How weights, gradients and optimizer states of a trained model are stored."""

    shape: ModelSize
    ranks: int | None
    """Number of ranks that share the states."""
    stage: int = 3
    optimizer_on_cpu: bool = False
    parameters_on_cpu: bool = False
    trainable: float = 1.0
    """Share of the parameters that is trained; small with an adapter."""
    weight_bytes: int = 2
    gradient_bytes: int = 2
    optimizer_bytes: int = 12

    def state_bytes(self) -> float | None:
        """Bytes on each GPU while training; None if the number of ranks matters but is not known."""
        ranks = self.ranks
        if ranks is None and self.stage > 0:
            return None
        share = 1 / (ranks or 1)
        weights = 0.0 if self.parameters_on_cpu else self.weight_bytes * (share if self.stage == 3 else 1.0)
        gradients = self.gradient_bytes * self.trainable * (share if self.stage >= 2 else 1.0)
        optimizer = (
            0.0
            if self.optimizer_on_cpu
            else self.optimizer_bytes * self.trainable * (share if self.stage >= 1 else 1.0)
        )
        return self.shape.parameters * (weights + gradients + optimizer)


@dataclass(frozen=True, slots=True)
class EngineShare:
    """A generation engine and the share of each GPU's memory that it may use."""

    shape: ModelSize
    tensor_parallel: int
    utilization: float
    shares_gpus: bool = False
    """Whether the trainer uses the same GPUs."""
    sleeps: bool = False
    """Whether the engine releases its memory while the trainer works."""
    sequence_tokens: int | None = None
    """Tokens of a prompt with its longest completion."""
    location: ConfigLocation = NO_LOCATION
    option: str = "gpu_memory_utilization"

    def weight_bytes(self) -> float:
        """Bytes of the engine's weights on each GPU."""
        return 2 * self.shape.parameters / self.tensor_parallel


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """The tokens of one forward and backward pass on a GPU."""

    tokens: int | None
    fused_head: bool = False
    """Whether cross-entropy is fused or chunked, so that memory never holds all logits at once."""


def format_gib(value: float) -> str:
    """Formats bytes as GiB."""
    return f"{value / GIB:.3g} GiB"


def activation_bytes(shape: ModelSize, batch: BatchTokens) -> float:
    """Lower bound of the bytes of activations; 0 if the number of tokens is not known."""
    if batch.tokens is None:
        return 0.0
    return 2 * batch.tokens * shape.hidden * shape.layers


def logit_bytes(shape: ModelSize, batch: BatchTokens) -> float:
    """Bytes of the logits and their gradient in bfloat16; 0 if memory never holds all of them."""
    return 4 * batch.tokens * shape.vocabulary if batch.tokens is not None and not batch.fused_head else 0.0


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes on one GPU while training."""

    state: float
    """Weights, gradients and optimizer states."""
    activations: float
    """Activations that are kept for the backward pass."""
    logits: float

    @property
    def minimum(self) -> float:
        """Bytes that are needed in any case."""
        return self.state + self.activations

    @property
    def with_logits(self) -> float:
        """Bytes that are needed unless an unknown option avoids the logits."""
        return self.minimum + self.logits


def judge_gpu_memory(
    advice: ConfigFindings,
    training: TrainingStates | None,
    engine: EngineShare | None,
    batch: BatchTokens,
    gpu_gib: float | None,
    at: ConfigLocation,
    offloaded_while_generating: bool = False,
    what: str = "training",
) -> None:
    """Reports whether trainer and engine fit into a GPU with `gpu_gib`, or without it, which GPUs are large enough."""
    state = training.state_bytes() if training is not None else None
    need = None
    if training is not None and state is not None:
        need = TrainingMemory(state, activation_bytes(training.shape, batch), logit_bytes(training.shape, batch))
        _judge_training(advice, training, need, batch, gpu_gib, at, what)
    elif training is not None:
        advice.unchecked("memory-training", "memory of training was not estimated: the number of ranks is not known")
    if engine is not None:
        _judge_engine(advice, engine, gpu_gib)
        if engine.shares_gpus and need is not None:
            _judge_shared_gpus(advice, engine, need, gpu_gib, offloaded_while_generating)


def _memory_text(training: TrainingStates, need: TrainingMemory, batch: BatchTokens, what: str) -> str:
    shape = training.shape
    parts = f"{format_gib(need.state)} of weights, gradients and optimizer"
    if need.activations:
        parts += f", {format_gib(need.activations)} of activations"
    if need.logits:
        parts += f", {format_gib(need.logits)} of logits" + (f" for {batch.tokens:,} tokens" if batch.tokens else "")
    sharding = f"ZeRO stage {training.stage}" if training.stage else "states not sharded"
    sharding += f" over {training.ranks} ranks" if training.ranks else ""
    sharding += ", the optimizer on the host" if training.optimizer_on_cpu else ""
    total = format_gib(need.with_logits)
    return f"{what} of {shape.name} ({shape.size}) needs at least {total} on each GPU: {parts}; {sharding}"


def _judge_training(
    advice: ConfigFindings,
    training: TrainingStates,
    need: TrainingMemory,
    batch: BatchTokens,
    gpu_gib: float | None,
    at: ConfigLocation,
    what: str,
) -> None:
    seen, fix = _memory_text(training, need, batch, what), _smaller_settings(training, need)
    is_partial = not training.shape.layers or batch.tokens is None
    if is_partial:
        unknown = "the model's shape" if not training.shape.layers else "the number of tokens in a micro-batch"
        seen += f", plus activations and logits ({unknown} is not known)"
    available = gpu_gib if gpu_gib is not None else GPU_SIZES_GIB[-1]
    if need.minimum > available * GIB:
        reason = f"a GPU has {gpu_gib:g} GiB" if gpu_gib is not None else "no GPU has that much"
        advice.error(
            "memory-training", f"{seen}; {reason}", "The run fails with CUDA out of memory.", fix, ZERO_SOURCE, at
        )
    elif gpu_gib is None:
        enough = next(
            size for size in GPU_SIZES_GIB if need.with_logits <= size * GIB * 0.92 or size == GPU_SIZES_GIB[-1]
        )
        add = advice.warn if enough > 80 else advice.note
        advised_gpus = (
            f"GPUs below {enough} GiB are too small" if is_partial else f"GPUs from {enough} GiB are large enough"
        )
        add("memory-training", f"{seen}; {advised_gpus}", "", fix if enough > 80 else "", ZERO_SOURCE, at)
    elif need.with_logits > 0.92 * gpu_gib * GIB:
        tight = f"{seen}, of {gpu_gib:g} GiB, which leaves too little for buffers and fragmentation"
        advice.warn("memory-training", tight, "", fix, ZERO_SOURCE, at)
    else:
        severity: Severity = "note" if is_partial else "ok"
        advice.add("memory-training", severity, f"{seen}, of {gpu_gib:g} GiB", source=ZERO_SOURCE, at=at)


def _smaller_settings(training: TrainingStates, need: TrainingMemory) -> str:
    """Settings that need less memory, as a list in words."""
    ways = []
    if training.stage < 3:
        ways.append("ZeRO stage 3 (or FSDP full shard)")
    if not training.optimizer_on_cpu:
        ways.append("the optimizer on the host (adam_offload, offload_optimizer, optimizer_offload)")
    if need.activations + need.logits > need.state:
        ways.insert(0, "fewer tokens per micro-batch")
    ways.append("more GPUs" if training.stage else "sharding states over ranks")
    return ", or ".join(ways)


def _judge_engine(advice: ConfigFindings, engine: EngineShare, gpu_gib: float | None) -> None:
    shape, weights = engine.shape, engine.weight_bytes()
    sizes = (gpu_gib,) if gpu_gib is not None else GPU_SIZES_GIB
    large_enough = [size for size in sizes if weights < size * GIB * engine.utilization]
    seen = (
        f"the engine's weights ({shape.name}, {shape.size}, tensor parallel {engine.tensor_parallel}) take"
        f" {format_gib(weights)} on each GPU, of which the engine may use {engine.option} {engine.utilization:g}"
    )
    if not large_enough:
        advice.error(
            "memory-engine",
            seen + (f": {format_gib(gpu_gib * GIB * engine.utilization)}" if gpu_gib else ""),
            "vLLM fails to start: no memory is left for the cache.",
            f"a larger tensor parallel size, or a larger {engine.option}",
            UTILIZATION_SOURCE,
            engine.location,
        )
        return
    if gpu_gib is None and large_enough[0] > 80:
        advice.warn(
            "memory-engine",
            f"{seen}: GPUs from {large_enough[0]} GiB are large enough",
            "",
            "a larger tensor parallel size",
            UTILIZATION_SOURCE,
            engine.location,
        )
    if gpu_gib is not None and engine.sequence_tokens and shape.layers:
        left = gpu_gib * GIB * engine.utilization - weights
        needed = shape.cache_bytes() / max(1, min(engine.tensor_parallel, shape.kv_heads)) * engine.sequence_tokens
        if needed > left:
            advice.error(
                "memory-cache",
                f"the cache of one sequence of {engine.sequence_tokens:,} tokens takes {format_gib(needed)}, but the"
                f" weights leave only {format_gib(left)}",
                "vLLM refuses to start if its longest sequence does not fit.",
                f"a larger {engine.option} or tensor parallel size, or shorter sequences",
                UTILIZATION_SOURCE,
                engine.location,
            )


def _judge_shared_gpus(
    advice: ConfigFindings, engine: EngineShare, need: TrainingMemory, gpu_gib: float | None, offloaded: bool
) -> None:
    if not engine.sleeps:
        size = gpu_gib if gpu_gib is not None else 80
        if engine.utilization * size * GIB + need.minimum > size * GIB:
            seen = (
                f"the engine keeps {engine.utilization:.0%} of each GPU while training needs "
                f"{format_gib(need.minimum)} of the same GPU"
                + ("" if gpu_gib is not None else ": together more than 80 GiB")
            )
            add = advice.error if gpu_gib is not None or engine.utilization > 0.85 else advice.warn
            add(
                "memory-together",
                seen,
                "Engine and trainer share GPUs, and the engine does not sleep.",
                f"let the engine sleep during training, or use a smaller {engine.option}",
                UTILIZATION_SOURCE,
                engine.location,
            )
    elif not offloaded and gpu_gib is not None and engine.utilization * gpu_gib * GIB + need.state > gpu_gib * GIB:
        advice.warn(
            "memory-together",
            f"the trainer's states ({format_gib(need.state)}) stay on the GPU while the engine wakes up and takes"
            f" {engine.utilization:.0%} of it",
            "The engine takes its share of the whole GPU, without subtracting what other processes use.",
            f"offload the trainer while engines generate, or use a smaller {engine.option}",
            UTILIZATION_SOURCE,
            engine.location,
        )
