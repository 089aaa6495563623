"""Judges whether the memory that each role of a run needs fits. Pure."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lockstep.config.run_config import RunConfig
from lockstep.config.train_role import TrainRole
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


class RankMemory(Protocol):
    """Estimates the memory of one rank of a trained role. The trainer's planner does, which this package may not
    import."""

    def __call__(self, role: TrainRole, token_budget: int) -> Mapping[str, int]:
        """The bytes that a rank needs, by part, as `TrainerPlanner.memory` returns them."""


def engine_memory_parts(config: Config, shape: ModelShape) -> dict[str, int]:
    """Bytes that one engine needs (vLLM: on one of its GPUs), by part: weights, and keys and values.

    Keys and values are the most that its sequences need; vLLM on a GPU always uses its whole share.
    """
    engine = config.rollout.engine
    own = shape.dtype if engine.dtype == "auto" else engine.dtype
    width = DTYPE_BYTES[own if engine.dtype != "auto" else compute_dtype(config, config.policy)]
    split = engine.tensor_parallel_size if engine.kind == "vllm" else 1
    rows = engine.max_num_seqs if engine.kind == "vllm" else engine.max_rows
    tokens = rows * max_sequence_tokens(config, shape)
    if engine.kind == "builtin" and engine.cache_tokens:
        tokens = engine.cache_tokens
    return {"weights": width * shape.parameters // split, "keys and values": shape.kv_bytes(width) * tokens // split}


def max_sequence_tokens(config: Config, shape: ModelShape) -> int:
    """Maximum number of tokens of a prompt with its completion: a text as long as the completion, and images."""
    expected = 2 * config.rollout.sampling.max_tokens + (shape.vision.most_tokens if shape.vision else 0)
    context = shape.context or config.model.max_length or expected
    limit = min(config.model.max_length or context, context)
    return min(limit, expected)


def compute_dtype(config: Config, role: TrainRole) -> str:
    """The data type in which the trainer of a role computes."""
    if role.model.dtype != "auto":
        return role.model.dtype
    return "float32" if config.cluster.device == "cpu" else "bfloat16"


def judge_memory(
    config: Config,
    ranks: RankMemory,
    shape: ModelShape | None,
    memory: ProcessMemory,
    served: Mapping[str, int] | None = None,
) -> list[Finding]:
    """Judges whether a GPU (or this host) has the memory that each role needs.

    Args:
        served: the bytes of a rank of each served role, as far as they are known.
        shape: the shape of the policy's model, which engines serve; None if it is not known.
    """
    roles = {role.name: ranks(role, config.token_budget) for role in config.train_roles}
    engine = engine_memory_parts(config, shape) if config.needs_engines and shape is not None else {}
    if memory.bytes == 0:
        device = "a GPU" if memory.device == "cuda" else "this host"
        where = f"a GPU ({memory.name})" if memory.name else device
        needs = [f"a {name} rank needs {_parts_text(parts)}" for name, parts in roles.items()]
        needs += [f"an engine {_parts_text(engine)}"] if engine else []
        text = f"{'; '.join(needs)}; the memory of {where} is not known"
        return [Finding("memory", "unchecked", "", text, source=ZERO)]
    if memory.device == "cpu":
        return _judge_host_memory(config, roles, engine, memory)
    found = [_judge_rank_memory(config, role, ranks, memory) for role in config.train_roles]
    found += _judge_set_memory(config, roles, served or {}, memory, engine)
    if engine and shape is not None:
        found += _judge_engine_memory(config, shape, roles, engine, memory)
    return found


def _judge_host_memory(
    config: Config, roles: Mapping[str, Mapping[str, int]], engine: Mapping[str, int], memory: ProcessMemory
) -> list[Finding]:
    counts = {role.name: role.trainer.ranks for role in config.train_roles}
    engines = config.rollout.engine.count if engine else 0
    total = sum(counts[name] * sum(parts.values()) for name, parts in roles.items()) + engines * sum(engine.values())
    each = [
        f"{counts[name]} {name} rank{'s' * (counts[name] > 1)} of {_parts_text(parts)}" for name, parts in roles.items()
    ]
    each += [f"{engines} engine{'s' * (engines > 1)} of {_parts_text(engine)}"] if engine else []
    seen = f"{'; '.join(each)}; together {_size(total)} of {_size(memory.bytes)}"
    if config.cluster.kind == "ray":
        return [Finding("memory", "note", "", seen + " on this host; other nodes have their own", source=ZERO)]
    if total <= memory.bytes:
        return [Finding("memory", "ok", "", seen, source=ZERO)]
    recomputes = " and ".join(f"{role.field('trainer.activation_checkpointing')}=true" for role in config.train_roles)
    return [
        Finding(
            "memory", "error", "", seen, "the kernel kills a process when memory runs out, and the others wait for it",
            f"lower token_budget or rollout.engine.max_rows, or set {recomputes}", ZERO,
        )
    ]  # fmt: skip


def _judge_rank_memory(config: Config, role: TrainRole, ranks: RankMemory, memory: ProcessMemory) -> Finding:
    """Judges whether a GPU has the memory that a rank of the role needs."""
    usable, parts = int(memory.bytes * (1 - RESERVE)), ranks(role, config.token_budget)
    of = f"{_size(memory.bytes)} of a GPU" + (f" ({memory.name})" if memory.name else "")
    id, seen = f"memory-{role.name}", f"a {role.name} rank needs {_parts_text(parts)}, of {of}"
    if sum(parts.values()) <= usable:
        return Finding(id, "ok", "", seen, source=ZERO)
    return Finding(
        id, "error", "", seen, f"the rank runs out of memory in its first steps: only {_size(usable)} are usable",
        settings_that_fit(config, role, ranks, usable),
        ACTIVATIONS if max(parts, key=lambda part: parts[part]) == "activations" else ZERO,
    )  # fmt: skip


def _judge_set_memory(
    config: Config,
    trained: Mapping[str, Mapping[str, int]],
    served: Mapping[str, int],
    memory: ProcessMemory,
    engine: Mapping[str, int] | None = None,
) -> Iterator[Finding]:
    """Judges for each set of roles that share GPUs whether a GPU holds a rank that computes beside what the others
    leave on it. Served roles leave nothing, and neither do engines of vLLM; the builtin engine leaves its weights."""
    kept = {role.name: _kept_while_offloaded(role, trained[role.name]) for role in config.train_roles}
    if engine and config.rollout.engine.kind == "builtin":
        kept["rollout"] = engine["weights"]
    full = {name: sum(parts.values()) for name, parts in trained.items()} | dict(served)
    sets: dict[tuple[str, ...], list[str]] = {}
    for name in full | kept:
        sets.setdefault(config.placement.device_key(name), []).append(name)
    usable = int(memory.bytes * (1 - RESERVE))
    for names in (each for each in sets.values() if len(each) > 1):
        ranks = [name for name in names if name in full]
        needs = {name: full[name] + sum(kept.get(other, 0) for other in names if other != name) for name in ranks}
        worst = max(needs, key=lambda name: needs[name])
        others = [name for name in names if name != worst and kept.get(name)]
        parts = [f"{_size(full[worst])} of {worst}", *(f"{_size(kept[name])} that {name} keeps" for name in others)]
        text = (
            f"{' and '.join(names)} share a GPU: at most {' + '.join(parts)} = {_size(needs[worst])}, "
            f"of {_size(memory.bytes)}"
        )
        if needs[worst] <= usable:
            yield Finding("memory-set", "ok", "", text, source=ZERO)
        elif full[worst] <= usable or worst in served:
            fix = _leave_devices(config, others) if full[worst] <= usable else f"use more ranks for {worst}"
            why = f"the rank runs out of memory in its first turn: only {_size(usable)} are usable"
            yield Finding("memory-set", "error", "", text, why, fix, ZERO)


def _leave_devices(config: Config, names: Collection[str]) -> str:
    """Settings with which these roles leave the GPU while others compute, as the text of a fix."""
    fields = [role.field("trainer.offload") for role in config.train_roles if role.name in names]
    fixes = [f"leave {' and '.join(fields)} out"] if fields else []
    return " and ".join([*fixes, *(["set rollout.engine.kind=vllm"] if "rollout" in names else [])])


def _kept_while_offloaded(role: TrainRole, parts: Mapping[str, int]) -> int:
    """The bytes that a rank of a trained role leaves on its GPU while another role computes there."""
    offload, adapted = role.trainer.offload, ("frozen weights", "merged adapter", "reference")
    moved = {*(("weights", *adapted) if offload.parameters else ()), *(("optimizer",) if offload.optimizer else ())}
    freed = {"activations", "logits", "gathered", "gradients"}
    return sum(size for part, size in parts.items() if part not in moved | freed)


def _judge_engine_memory(
    config: Config,
    shape: ModelShape,
    trained: Mapping[str, Mapping[str, int]],
    engine: Mapping[str, int],
    memory: ProcessMemory,
) -> list[Finding]:
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
    return found + list(_judge_shared_engine(config, trained, engine["weights"] + int(each), memory))


def _judge_shared_engine(
    config: Config, trained: Mapping[str, Mapping[str, int]], least: int, memory: ProcessMemory
) -> Iterator[Finding]:
    """Judges whether an engine has room beside what the trained roles of its set leave on the GPU.

    Args:
        least: the bytes of the builtin engine with one sequence. vLLM takes its share of the GPU.
    """
    chosen = config.rollout.engine
    roles = [role for role in config.train_roles if "rollout" in config.placement.set_of(role.name)]
    kept = {role.name: _kept_while_offloaded(role, trained[role.name]) for role in roles}
    keeping, total = [name for name, size in kept.items() if size], sum(kept.values())
    needed, room = least, int(memory.bytes * (1 - RESERVE))
    if chosen.kind == "vllm":
        needed, room = int(chosen.gpu_memory_utilization * memory.bytes), memory.bytes
    if not keeping or total + needed <= room:
        return
    verb = "keeps" if len(keeping) == 1 else "keep"
    share = max(0.0, 1 - total / memory.bytes - RESERVE) if chosen.kind == "vllm" else 0.0
    yield Finding(
        "memory-shared", "error", "",
        f"on shared GPUs {' and '.join(keeping)} {verb} {_size(total)} while the engine takes {_size(needed)} of "
        f"{_size(memory.bytes)}",
        "whichever wakes second runs out of memory",
        f"{_leave_devices(config, keeping)}, so that parameters and optimizer leave the GPU"
        + (f", or rollout.engine.gpu_memory_utilization={share:.2f}" if share > 0.1 else ""), ZERO,
    )  # fmt: skip


def settings_that_fit(config: Config, role: TrainRole, ranks: RankMemory, usable: int) -> str:
    """Settings with which a rank of the role fits, least intrusive first, as the text of a fix."""
    found, trainer = [], role.trainer
    checkpointing, count_field = role.field("trainer.activation_checkpointing"), role.field("trainer.ranks")
    keep_one = f"{role.field('kept_microbatches')}=1" if role.kept_microbatches > 1 else ""

    def fits(token_budget: int = config.token_budget, kept: int = role.kept_microbatches, **changes: object) -> bool:
        changed = role.model_copy(update={"trainer": trainer.model_copy(update=changes), "kept_microbatches": kept})
        return sum(ranks(changed, token_budget).values()) <= usable

    if keep_one and fits(kept=1):
        found.append(keep_one)
    if not trainer.activation_checkpointing and fits(activation_checkpointing=True):
        found.append(f"{checkpointing}=true")
    if trainer.kind == "deepspeed":
        found += _deepspeed_settings_that_fit(role, lambda settings: fits(deepspeed=settings))
    count = trainer.ranks * 2
    while count <= 1024 and not fits(kept=0, ranks=count, replicas=1):  # several ranks keep no forward pass
        count *= 2
    if count <= 1024:
        also = [f"{role.field('trainer.replicas')}=1"] if trainer.replicas > 1 else []
        also += [keep_one] if keep_one else []
        also += [f"{field}={count}" for field in _rank_fields_of_others(config, role)]
        found.append(" with ".join([f"{count_field}={count}", *also]))
    elif fits(kept=0, ranks=1024, replicas=1, activation_checkpointing=True):
        found.append(f"{checkpointing}=true with more {count_field}")
    budget = config.token_budget // 2
    while budget >= 1024 and not fits(budget):
        budget //= 2
    if budget >= 1024:
        found.append(f"token_budget={budget}")
    if role.model.adapter is None:
        found.append(f"{role.field('model.adapter')} (LoRA)")
    return "set " + ", or ".join(found) if found else "use a smaller model, or GPUs with more memory"


def _deepspeed_settings_that_fit(role: TrainRole, fits: Callable[[dict[str, Any]], bool]) -> list[str]:
    """The lowest higher stage of ZeRO that fits; else the lowest stage that fits with state in host memory."""
    given = role.trainer.deepspeed or {}
    zero = dict(given.get("zero_optimization") or {})
    stage = zero.get("stage", 2)
    highest = 3 if role.trainer.reshard_after_forward else 2  # stage 3 frees gathered parameters
    in_host_memory = {"offload_optimizer": {"device": "cpu"}}
    further = {**in_host_memory, "offload_param": {"device": "cpu"}}
    tried: list[tuple[int, dict[str, Any]]] = [(each, {}) for each in range(stage + 1, 4)]
    tried += [(each, in_host_memory) for each in range(max(1, stage), 4)] + [(3, further)]
    for each, offload in tried:
        if each <= highest and fits({**given, "zero_optimization": {**zero, "stage": each, **offload}}):
            path = role.field("trainer.deepspeed.zero_optimization")
            changes = [f"{path}.stage={each}"] if each != stage else []
            return [" with ".join([*changes, *(f"{path}.{place}.device=cpu" for place in offload)])]
    return []


def _rank_fields_of_others(config: Config, role: TrainRole) -> list[str]:
    """The fields with the ranks of roles that share the role's devices, which must have as many."""
    fields = {each.name: each.field("trainer.ranks") for each in config.train_roles}
    fields |= {each.name: each.field("ranks") for each in config.serve_roles}
    key = config.placement.device_key(role.name)
    return [field for name, field in fields.items() if name != role.name and config.placement.device_key(name) == key]


def _parts_text(parts: Mapping[str, int]) -> str:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return f"{_size(sum(parts.values()))} ({', '.join(f'{name} {_size(size)}' for name, size in ordered if size)})"


def _size(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
