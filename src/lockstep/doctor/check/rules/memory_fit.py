"""Estimates the memory that each role of a run needs, part by part, and judges whether it fits. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lockstep.config.run_config import RunConfig
from lockstep.doctor.check.rules.model_shape import DTYPE_BYTES, ModelShape
from lockstep.doctor.output.findings import Finding

Config = RunConfig

ZERO = "https://arxiv.org/abs/1910.02054"
"""Rajbhandari et al. 2020, section 3.1: the bytes of weights, gradients and Adam's two moments, and their sharding."""
ACTIVATIONS = "https://arxiv.org/abs/2205.05198"
"""Korthikanti et al. 2022, eq. 2: activations take 34 bytes per token, hidden unit and layer in 16 bit, without
attention scores; with recomputation, one tensor per layer."""
PAGED = "https://arxiv.org/abs/2309.06180"
"""Kwon et al. 2023: the memory of keys and values, for which the weights leave room."""
RESERVE = 0.08
"""Share of a GPU that is reserved for the CUDA context, NCCL's buffers and fragmentation."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory available to one process."""

    device: Literal["cpu", "cuda"]
    bytes: int
    """Memory of one GPU, or of the host; 0 if not known."""
    name: str = ""
    """Name of the GPU."""


def trainer_memory_parts(config: Config, shape: ModelShape) -> dict[str, int]:
    """Bytes that one trainer rank needs, by part.

    They are: fp32 weights, gradients and moments of its shard; the root and two layers that FSDP2 gathers in compute
    precision; activations of one packed row; and the logits of one chunk, three times (value, gradient, softmax).
    """
    trainer = config.trainer
    width = DTYPE_BYTES[compute_dtype(config, shape)]
    trained = shape.parameters if config.model.adapter is None else adapter_parameters(config, shape)
    parts = {
        "weights": 4 * trained // trainer.shards,
        "gradients": 4 * trained // trainer.shards,
        "optimizer": 8 * trained // trainer.shards,
    }
    if config.model.adapter is not None:
        kind = config.model.quantization
        bits = 8.0 * width if kind is None else {"nf4": 4.5, "int8": 8.0}[kind.kind]
        parts["frozen weights"] = int(bits * shape.parameters / 8) // trainer.shards
    if trainer.ranks > 1:
        root = shape.embedding + shape.head + shape.last_norm
        parts["gathered"] = width * (root + 2 * max(shape.per_layer, default=0))
    per_token = (2 if trainer.activation_checkpointing else 34) * shape.hidden * shape.layers * width // 2
    parts["activations"] = config.token_budget * per_token
    parts["logits"] = 3 * trainer.head_chunk * shape.vocabulary * 4
    if config.objective.needs_reference and config.model.adapter is None:
        parts["reference"] = width * shape.parameters // trainer.shards
    return parts


def engine_memory_parts(config: Config, shape: ModelShape) -> dict[str, int]:
    """Bytes that one engine needs (vLLM: on one of its GPUs), by part: weights, and keys and values.

    Keys and values are the most that its sequences need; vLLM on a GPU always uses its whole share.
    """
    engine = config.rollout.engine
    own = shape.dtype if engine.dtype == "auto" else engine.dtype
    width = DTYPE_BYTES[own if engine.dtype != "auto" else compute_dtype(config, shape)]
    split = engine.tensor_parallel_size if engine.kind == "vllm" else 1
    rows = engine.max_num_seqs if engine.kind == "vllm" else engine.max_rows
    tokens = rows * max_sequence_tokens(config, shape)
    if engine.kind == "builtin" and engine.cache_tokens:
        tokens = engine.cache_tokens
    return {"weights": width * shape.parameters // split, "keys and values": shape.kv_bytes(width) * tokens // split}


def max_sequence_tokens(config: Config, shape: ModelShape) -> int:
    """Maximum number of tokens of a prompt with its completion."""
    context = shape.context or config.model.max_length or 2 * config.rollout.sampling.max_tokens
    limit = min(config.model.max_length or context, context)
    return min(limit, 2 * config.rollout.sampling.max_tokens)


def compute_dtype(config: Config, shape: ModelShape, device: str = "cuda") -> str:
    """The data type in which the trainer computes."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "float32" if device == "cpu" or config.cluster.device == "cpu" else "bfloat16"


def adapter_parameters(config: Config, shape: ModelShape) -> int:
    """Parameters of LoRA on all linear layers, `r (in + out)` each (Hu et al. 2021, section 4.1).

    An upper bound if the adapter is only on some of these layers.
    """
    adapter = config.model.adapter
    assert adapter is not None
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    linear = max(0, max(shape.per_layer, default=0) - shape.hidden * (2 * queries + 2 * keys)) // max(shape.hidden, 1)
    # A gated feed-forward part has three hidden x inner matrices; `linear` is 3 inner.
    return adapter.r * shape.layers * (attention + 3 * shape.hidden + linear)


def judge_memory(config: Config, shape: ModelShape, memory: ProcessMemory) -> list[Finding]:
    """Judges whether a GPU (or this host) has the memory that each role needs."""
    device = memory.device
    trainer, engine = trainer_memory_parts(config, shape), engine_memory_parts(config, shape)
    engines = config.needs_engines
    if memory.bytes == 0:
        where = f"a GPU ({memory.name})" if memory.name else "a GPU" if device == "cuda" else "this host"
        text = f"a policy rank needs {_parts_text(trainer)}" + (f"; an engine {_parts_text(engine)}" if engines else "")
        return [Finding("memory", "unchecked", "", f"{text}; the memory of {where} is not known", source=ZERO)]
    if device == "cpu":
        return _judge_host_memory(config, trainer, engine if engines else {}, memory)
    return _judge_gpu_memory(config, shape, trainer, engine if engines else {}, memory)


def _judge_host_memory(
    config: Config, trainer: Mapping[str, int], engine: Mapping[str, int], memory: ProcessMemory
) -> list[Finding]:
    ranks, engines = config.trainer.ranks, config.rollout.engine.count if engine else 0
    total = ranks * sum(trainer.values()) + engines * sum(engine.values())
    seen = f"{ranks} policy rank{'s' * (ranks > 1)} of {_parts_text(trainer)}"
    seen += f"; {engines} engine{'s' * (engines > 1)} of {_parts_text(engine)}" if engine else ""
    seen += f"; together {_size(total)} of {_size(memory.bytes)}"
    if config.cluster.kind == "ray":
        return [Finding("memory", "note", "", seen + " on this host; other nodes have their own", source=ZERO)]
    if total <= memory.bytes:
        return [Finding("memory", "ok", "", seen, source=ZERO)]
    return [
        Finding(
            "memory", "error", "", seen, "the kernel kills a process when memory runs out, and the others wait for it",
            "lower token_budget or rollout.engine.max_rows, or set trainer.activation_checkpointing=true", ZERO,
        )
    ]  # fmt: skip


def _judge_gpu_memory(
    config: Config, shape: ModelShape, trainer: Mapping[str, int], engine: Mapping[str, int], memory: ProcessMemory
) -> list[Finding]:  # fmt: skip
    usable = int(memory.bytes * (1 - RESERVE))
    of = f"{_size(memory.bytes)} of a GPU" + (f" ({memory.name})" if memory.name else "")
    need = sum(trainer.values())
    found = []
    if need <= usable:
        found.append(
            Finding("memory-policy", "ok", "", f"a policy rank needs {_parts_text(trainer)}, of {of}", source=ZERO)
        )
    else:
        found.append(
            Finding(
                "memory-policy", "error", "", f"a policy rank needs {_parts_text(trainer)}, of {of}",
                f"the rank runs out of memory in its first steps: only {_size(usable)} are usable",
                settings_that_fit(config, shape, usable),
                ACTIVATIONS if max(trainer, key=lambda part: trainer[part]) == "activations" else ZERO,
            )
        )  # fmt: skip
    if not engine:
        return found
    return [*found, *_judge_engine_memory(config, shape, trainer, engine, memory)]


def _judge_engine_memory(
    config: Config, shape: ModelShape, trainer: Mapping[str, int], engine: Mapping[str, int], memory: ProcessMemory
) -> list[Finding]:  # fmt: skip
    chosen = config.rollout.engine
    share = chosen.gpu_memory_utilization if chosen.kind == "vllm" else 1 - RESERVE
    left = int(share * memory.bytes) - engine["weights"]
    each = engine["keys and values"] / max(1, chosen.max_num_seqs if chosen.kind == "vllm" else chosen.max_rows)
    rows = int(left // each) if each else 0
    seen = f"an engine's weights take {_size(engine['weights'])} of {share:.0%} of {_size(memory.bytes)} on each GPU"
    if rows < 1:
        split = next((n for n in (2, 4, 8, 16) if share * memory.bytes > 1.1 * shape.parameters * 2 / n), 0)
        wider = f"set rollout.engine.kind=vllm and rollout.engine.tensor_parallel_size={split}"
        fix = wider if split else "use a smaller model, or GPUs with more memory"
        why = "nothing is left for keys and values: the engine cannot start"
        return [Finding("memory-engine", "error", "", seen, why, fix, PAGED)]
    sequences = f"{seen}, which leaves room for {rows:,} sequences of {max_sequence_tokens(config, shape):,} tokens"
    found = [Finding("memory-engine", "ok", "", sequences, source=PAGED)]
    if config.placement.shared:
        kept = sum(
            size for part, size in trainer.items()
            if not (part in ("weights", "gathered") and config.trainer.offload.parameters)
            and not (part == "optimizer" and config.trainer.offload.optimizer)
            and part not in ("activations", "logits", "gathered", "gradients")
        )  # fmt: skip
        if kept + share * memory.bytes > memory.bytes:
            fits = max(0.0, 1 - kept / memory.bytes - RESERVE)
            found.append(
                Finding(
                    "memory-shared", "error", "",
                    f"on shared GPUs the trainer keeps {_size(kept)} while the engine takes {share:.0%} of "
                    f"{_size(memory.bytes)}",
                    "whichever wakes second runs out of memory",
                    "set trainer.offload.parameters=true and trainer.offload.optimizer=true"
                    + (f", or rollout.engine.gpu_memory_utilization={fits:.2f}" if fits > 0.1 else ""), ZERO,
                )
            )  # fmt: skip
    return found


def settings_that_fit(config: Config, shape: ModelShape, usable: int) -> str:
    """Settings with which a policy rank fits, least intrusive first, as the text of a fix."""
    found = []

    def fits(**changes: object) -> bool:
        trainer = config.trainer.model_copy(update=changes)
        return sum(trainer_memory_parts(config.model_copy(update={"trainer": trainer}), shape).values()) <= usable

    if not config.trainer.activation_checkpointing and fits(activation_checkpointing=True):
        found.append("trainer.activation_checkpointing=true")
    ranks = config.trainer.ranks * 2
    while ranks <= 1024 and not fits(ranks=ranks, replicas=1):
        ranks *= 2
    if ranks <= 1024:
        found.append(f"trainer.ranks={ranks}" + (" with trainer.replicas=1" if config.trainer.replicas > 1 else ""))
    elif fits(ranks=1024, replicas=1, activation_checkpointing=True):
        found.append("trainer.activation_checkpointing=true with more trainer.ranks")
    budget = config.token_budget // 2
    while budget >= 1024:
        if sum(trainer_memory_parts(config.model_copy(update={"token_budget": budget}), shape).values()) <= usable:
            found.append(f"token_budget={budget}")
            break
        budget //= 2
    if config.model.adapter is None:
        found.append("model.adapter (LoRA)")
    return "set " + ", or ".join(found) if found else "use a smaller model, or GPUs with more memory"


def _parts_text(parts: Mapping[str, int]) -> str:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return f"{_size(sum(parts.values()))} ({', '.join(f'{name} {_size(size)}' for name, size in ordered if size)})"


def _size(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
