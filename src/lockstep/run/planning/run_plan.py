"""What a run will start and need: processes, threads, memory, collectives. Computed before anything starts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from lockstep.base.text import count_noun
from lockstep.cluster.placement.assignment import Assignment, NodesBusy, assign
from lockstep.cluster.placement.bundles import Bundle, NodeResources, ProcessRequest, make_bundles
from lockstep.cluster.placement.suggestions import LoadCheck
from lockstep.config.cluster import PlacementConfig
from lockstep.config.roles import section_of_role
from lockstep.config.run_config import RunConfig
from lockstep.models.model_facts import ModelFacts
from lockstep.run.planning.resources import HostResources
from lockstep.train.errors import TrainerUnsupported
from lockstep.train.trainer_kinds import SERVED_MODELS, check_role, trainer_kind
from lockstep.train.trainer_plan import DTYPE_BYTES, PlannedCollective
from lockstep.weights.weight_transport import DevicePlacement, transport_refusal


@dataclass(frozen=True, slots=True)
class PlannedProcess:
    name: str
    role: str
    rank: int
    device: str
    threads: int
    memory: int
    """Estimated bytes of weights, optimizer state, caches and activations, without the libraries."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    processes: list[PlannedProcess]
    collectives: list[PlannedCollective]
    shared_memory: int
    """Bytes of /dev/shm for the published weights."""
    memory_copy: int = 0
    """Bytes of /dev/shm for in-memory checkpoints; 0 if there are none."""
    wanted: list[ProcessRequest] = field(default_factory=list)
    """The resources that processes need on the nodes of a cluster; empty on one host."""
    assignment: Assignment | None = None
    """The node of every process; None if the nodes are unknown or in use."""
    busy: str = ""
    """If other runs use the nodes: what this run will wait for."""
    compile: Mapping[str, Literal["off", "layers"]] = field(default_factory=dict)
    """What trained roles with `trainer.compile: auto` do, by name."""

    @property
    def memory(self) -> int:
        return sum(process.memory for process in self.processes)


class InfeasibleError(ValueError):
    """The plan does not fit this machine. Says which part does not fit, and what would."""


def make_plan(
    config: RunConfig, model: ModelFacts | None, host: HostResources, others: Mapping[str, ModelFacts] | None = None
) -> RunPlan:
    """Plans the processes of the run and what they need. Without a model, sizes and collectives are left out. Processes
    on Ray need not fit this host: `assign_nodes` chooses their nodes.

    Args:
        model: the policy's model.
        others: the models of the other trained roles and of served ones, by role.

    Raises:
        TrainerUnsupported: a kind of trainer does not implement a setting.
        InfeasibleError: the context has no room for prompts, or there are too few GPUs, or too little memory or shared
            memory.
        PlacementError: roles that are to share devices have different numbers of ranks.
    """
    for role in config.train_roles:
        check_role(role)
    if model is not None:
        _check_context_room(config, model)
    models = {} if model is None else {config.train_roles[0].name: model, **(others or {})}
    engine = config.rollout.engine
    engines = engine.count if config.needs_engines else 0
    processes = list(_ranks_of_models(config, models, host))
    processes += [
        PlannedProcess(
            f"engine-{rank}",
            "rollout",
            rank,
            _engine_device(config, host, rank),
            engine.threads or _threads(config, host, "rollout", engines),
            0 if model is None else engine_memory(config, model),
        )
        for rank in range(engines)
    ]
    if config.reward is not None:
        processes += [
            PlannedProcess(f"scorer-{rank}", "reward", rank, "cpu", 1, 0) for rank in range(config.reward.scorers)
        ]
    if engines and config.rollout.environment is not None:
        processes += [
            PlannedProcess(f"environment-{rank}", "environment", rank, "cpu", 1, 0)
            for rank in range(config.rollout.environment.workers)
        ]
    refusal = transport_refusal(config.weights.transport, weight_devices(config, processes)) if engines else ""
    if refusal:
        raise InfeasibleError(refusal)
    shared = 2 * model.parameters * DTYPE_BYTES[engine_dtype(config, model)] if engines and model is not None else 0
    plan = RunPlan(processes, list(_collectives(config, models)), shared)
    if config.cluster.kind == "ray":
        plan = replace(plan, wanted=resource_requests(config, plan.processes))
    else:
        _check_fits_host(plan, config, host)
    if model is None:
        return plan
    return replace(plan, memory_copy=_reserved_checkpoint_bytes(config, models, plan, host))


def _ranks_of_models(
    config: RunConfig, models: Mapping[str, ModelFacts], host: HostResources
) -> Iterator[PlannedProcess]:
    """The ranks of all trained roles, then of all served ones, with their GPUs."""
    slots, _ = _device_slots(config)
    for name, count, threads in (
        *((role.name, role.trainer.ranks, role.trainer.threads) for role in config.train_roles),
        *((role.name, role.ranks, role.threads) for role in config.serve_roles),
    ):
        memory = _rank_memory(config, name, models[name]) if name in models else 0
        threads = threads or _threads(config, host, name, count)
        for rank in range(count):
            device = _device(config, host, slots[name] + rank)
            yield PlannedProcess(f"{name}-{rank}", name, rank, device, threads, memory)


def _device_slots(config: RunConfig) -> tuple[dict[str, int], int]:
    """The number of the first rank's GPU, by trained or served role, and how many GPUs their ranks have. Each role has
    GPUs of its own, in the order of the roles, unless it shares those of another one (`placement.colocate`)."""
    slots: dict[str, int] = {}
    owners: dict[tuple[str, ...], int] = {}
    count = 0
    for name, ranks in _rank_counts(config).items():
        slots[name] = owners.setdefault(config.placement.device_key(name), count)
        count = max(count, slots[name] + ranks)
    return slots, count


def _rank_counts(config: RunConfig) -> dict[str, int]:
    """The number of ranks of each trained and served role."""
    counts = {role.name: role.trainer.ranks for role in config.train_roles}
    return counts | {role.name: role.ranks for role in config.serve_roles}


def _rank_memory(config: RunConfig, name: str, model: ModelFacts) -> int:
    """Estimates the bytes of one rank of a trained or served role."""
    for role in config.train_roles:
        if role.name == name:
            return sum(trainer_kind(role).planner.memory(role, model, config.token_budget).values())
    served = next(role for role in config.serve_roles if role.name == name)
    return SERVED_MODELS.planner.memory(served, model, config.token_budget)


def _collectives(config: RunConfig, models: Mapping[str, ModelFacts]) -> Iterator[PlannedCollective]:
    """The collectives of all ranks in a step, except of models that are unknown. If there are several trained roles,
    the communicators' names begin with the role's, as those of served roles do."""
    for role in (each for each in config.train_roles if each.name in models):
        publishes = config.needs_engines and role.name == config.train_roles[0].name
        updates = role.optimizer_steps // config.steps
        prefix = f"{role.name} " if len(config.train_roles) > 1 else ""
        for each in trainer_kind(role).planner.collectives(role, models[role.name], updates, publishes):
            yield replace(each, communicator=prefix + each.communicator)
    for served in (each for each in config.serve_roles if each.name in models):
        for each in SERVED_MODELS.planner.collectives(served, models[served.name]):
            yield replace(each, communicator=f"{served.name} {each.communicator}")


def assign_nodes(
    plan: RunPlan,
    placement: PlacementConfig,
    nodes: Sequence[NodeResources] | None,
    loads: LoadCheck = lambda overrides: True,
) -> RunPlan:
    """Adds a node for every process to the plan, if the nodes are known.

    Args:
        loads: whether the run's config is valid with what is suggested where it does not fit.

    Raises:
        PlacementError: the placement contradicts itself or the config.
        DoesNotFit: the nodes can never hold the run; the message says what would fit.
    """
    if nodes is None:
        make_bundles(plan.wanted, placement)  # raises PlacementError
        return plan
    try:
        return replace(plan, assignment=assign(plan.wanted, placement, nodes, loads))
    except NodesBusy as error:
        return replace(plan, busy=str(error))


def engine_dtype(config: RunConfig, model: ModelFacts) -> str:
    """The precision of the engine's weights: the engine's setting, by default the model's."""
    chosen = config.rollout.engine.dtype
    return model.dtype if chosen == "auto" else chosen


def engine_memory(config: RunConfig, model: ModelFacts) -> int:
    """Estimates the bytes of one engine: weights and preallocated KV cache."""
    engine = config.rollout.engine
    width = DTYPE_BYTES[engine_dtype(config, model)]
    if engine.kind == "vllm":
        return model.parameters * width // engine.tensor_parallel_size + int(engine.cpu_kv_cache_gb * 2**30)
    longest = min(config.model.max_length or model.context, model.context)
    tokens = engine.cache_tokens or engine.max_rows * min(longest, 2 * config.rollout.sampling.max_tokens)
    return model.parameters * width + 2 * model.layers * model.kv_heads * model.head_dim * tokens * width


def _reserved_checkpoint_bytes(
    config: RunConfig, models: Mapping[str, ModelFacts], plan: RunPlan, host: HostResources
) -> int:
    """The bytes for memory checkpoints of all trained roles; 0 if they are off, or if they are `auto` and do not fit or
    a kind of trainer has none. The container's memory limit includes them."""
    setting = config.recovery.memory_copy
    if not setting or not config.recovery.enable:
        return 0
    if config.cluster.kind == "ray":
        if setting == "auto":
            return 0
        raise InfeasibleError(
            "recovery.memory_copy is in the shared memory of one host, and with cluster.kind ray the trainer's ranks "
            "may restart on another host: set it to auto or false"
        )
    size = 0
    for role in (each for each in config.train_roles if each.name in models):
        needed = trainer_kind(role).planner.memory_checkpoint(role, models[role.name])
        if needed is None and setting == "auto":
            return 0
        if needed is None:
            raise TrainerUnsupported(role.trainer.kind, "recovery.memory_copy", "set it to auto or false")
        size += needed
    memory = host.memory - plan.shared_memory - (plan.memory if host.device == "cpu" else 0)
    free = min(memory, host.shared_memory - plan.shared_memory)
    if size <= free:
        return size
    if setting == "auto":
        return 0
    raise InfeasibleError(
        f"recovery.memory_copy needs {size / 2**20:.0f} MiB of shared memory for two copies of the trainer's state and "
        f"{max(free, 0) / 2**20:.0f} MiB are free beside the rest: set it to auto or false"
    )


def resource_requests(config: RunConfig, processes: Sequence[PlannedProcess]) -> list[ProcessRequest]:
    """The resources that each process needs on a node: a rank one GPU, an engine the GPUs of its tensor-parallel group,
    other processes a core. Processes without GPUs also request memory."""
    width, found, fields = _gpus_per_engine(config), [], dict(_rank_fields(config))
    for process in processes:
        parts = width if process.role == "rollout" else 1  # GPUs, or processes on CPUs
        role = config.placement.of_role(process.role)
        cpus = 1.0 if role is None else role.cpus * parts
        on_gpu = process.device != "cpu"
        memory = 0 if on_gpu else process.memory * parts
        gpus, field = parts if on_gpu else 0, fields.get(process.role, "")
        found.append(ProcessRequest(process.name, process.role, process.rank, cpus, gpus, memory, field))
    return found


def _device(config: RunConfig, host: HostResources, index: int) -> str:
    """The device of a process. Each gets one GPU; if there are fewer GPUs, processes share them. On a Ray cluster each
    process sees only its own GPUs."""
    if host.device == "cpu":
        return "cpu"
    return "cuda:0" if config.cluster.kind == "ray" else f"cuda:{index % max(host.gpus, 1)}"


def _engine_device(config: RunConfig, host: HostResources, rank: int) -> str:
    """The first GPU of an engine: after the GPUs of the ranks, or among them if engines and ranks share GPUs."""
    width, ranks = _gpus_per_engine(config), config.trainer.ranks
    first = rank * width % ranks if config.placement.shared else _device_slots(config)[1] + rank * width
    return _device(config, host, min(first % max(host.gpus, 1), max(host.gpus - width, 0)))


def _gpus_per_engine(config: RunConfig) -> int:
    """The number of GPUs (or processes) of one engine."""
    engine = config.rollout.engine
    return engine.tensor_parallel_size if engine.kind == "vllm" else 1


def weight_devices(config: RunConfig, processes: Sequence[PlannedProcess], slower: str = "") -> DevicePlacement:
    """The devices of trainer ranks and engines, for the choice of a weight transport.

    Args:
        slower: why the trainer's collectives run on gloo although NCCL is expected.
    """
    ranks = {process.device for process in processes if process.role == "policy"}
    firsts = [process.device for process in processes if process.role == "rollout"]
    cuda = "cpu" not in {*ranks, *firsts}
    if config.cluster.kind == "ray" or not cuda:
        return DevicePlacement(cuda, "all" if config.placement.shared else "none", slower=slower)
    width = _gpus_per_engine(config)
    taken = [f"cuda:{int(first.partition(':')[2]) + k}" for first in firsts for k in range(width)]
    own = set(taken) - ranks
    return DevicePlacement(
        cuda,
        "none" if len(own) == len(set(taken)) else "some" if own else "all",
        len(taken) != len(set(taken)),
        slower,
    )


def _threads(config: RunConfig, host: HostResources, role: str, count: int) -> int:
    """The default number of threads of a process: its share of the cores, or on Ray the cores it reserves."""
    if config.cluster.kind == "ray":
        placement = config.placement.of_role(role)
        return 1 if placement is None else max(1, int(placement.cpus))
    return max(1, host.cores // count)


def _check_context_room(config: RunConfig, model: ModelFacts) -> None:
    """Checks that the context has room for a completion and a prompt of at least one token."""
    limits = [("rollout.sampling.max_tokens", config.rollout.sampling)] if config.needs_engines else []
    if config.evaluation is not None and config.evaluation.sampling is not None:
        limits.append(("evaluation.sampling.max_tokens", config.evaluation.sampling))
    for name, sampling in limits:
        if sampling.max_tokens >= model.context:
            raise InfeasibleError(
                f"{name} {sampling.max_tokens} leaves no room for a prompt in the context of {model.context} tokens: "
                f"set it to {model.context - 1} at most, or take a model with a longer context"
            )


def _rank_fields(config: RunConfig) -> Iterator[tuple[str, str]]:
    """The trained and served roles, and the fields that set the numbers of their ranks."""
    for role in config.train_roles:
        yield role.name, role.field("trainer.ranks")
    for served in config.serve_roles:
        yield served.name, served.field("ranks")


def _check_fits_host(plan: RunPlan, config: RunConfig, host: HostResources) -> None:
    if host.device == "cuda" and not host.gpus:
        raise InfeasibleError(
            "cluster.device is cuda, and torch finds no GPU on this host: set cluster.device=cpu (or auto), or install "
            "a CUDA build of torch and check the driver with nvidia-smi"
        )
    counts = _rank_counts(config)
    for role, name in _rank_fields(config):
        count = counts[role]
        if host.device == "cuda" and count > host.gpus:
            raise InfeasibleError(
                f"{name} {count} needs as many GPUs and this host has {host.gpus}: "
                f"set {name}={host.gpus}, or cluster.device=cpu"
            )
    if config.placement.colocate:
        bundles = make_bundles(resource_requests(config, plan.processes), _any_nodes(config.placement))
        if host.device == "cuda":
            _check_gpus_of_sets(config, bundles, host)
    if host.device == "cuda" and _gpus_per_engine(config) > host.gpus and config.needs_engines:
        raise InfeasibleError(
            f"rollout.engine.tensor_parallel_size {_gpus_per_engine(config)} needs as many GPUs, and this host has "
            f"{host.gpus}"
        )
    if plan.shared_memory > host.shared_memory:
        raise InfeasibleError(
            f"publishing weights needs {plan.shared_memory / 2**20:.0f} MiB of /dev/shm (two copies) and "
            f"{host.shared_memory / 2**20:.0f} MiB are free: enlarge it (docker: --shm-size) or remove stale files"
        )
    if host.device == "cpu" and plan.memory > host.memory:
        worst = max(plan.processes, key=lambda process: process.memory)
        raise InfeasibleError(
            f"the run needs about {plan.memory / 2**30:.1f} GiB and {host.memory / 2**30:.1f} GiB are free; "
            f"the largest part is {worst.name} with {worst.memory / 2**30:.1f} GiB: "
            + _how_to_shrink(config, worst.role)
        )


def _any_nodes(placement: PlacementConfig) -> PlacementConfig:
    """The placement without what has no effect on one host."""
    return PlacementConfig(colocate=placement.colocate)


def _check_gpus_of_sets(config: RunConfig, bundles: Sequence[Bundle], host: HostResources) -> None:
    """Raises InfeasibleError unless this host has the GPUs of all processes; roles of a set share theirs."""
    counts: dict[str, int] = {}
    present = {section_of_role(role) for bundle in bundles for role in bundle.roles}
    for bundle in bundles:
        if bundle.gpus:
            together = config.placement.set_of(bundle.roles[0])
            roles = " + ".join(section for section in together if section in present)
            counts[roles] = counts.get(roles, 0) + bundle.gpus
    if sum(counts.values()) <= host.gpus:
        return
    parts = " + ".join(f"{count} ({roles})" for roles, count in counts.items())
    raise InfeasibleError(
        "with placement.colocate the roles of a set take turns on their GPUs, and all others need GPUs of their own: "
        f"{parts} = {count_noun(sum(counts.values()), 'GPU')}, and this host has {host.gpus}. Put more roles into a "
        "set (placement.colocate=all for one set), or lower their numbers of ranks"
    )


def _how_to_shrink(config: RunConfig, largest: str) -> str:
    """How a run needs less memory, by the role of its largest process."""
    for role in config.train_roles:
        if role.name == largest:
            kept = f" or {role.field('kept_microbatches')}" if role.kept_microbatches > 1 else ""
            return f"lower token_budget{kept}, or turn on {role.field('trainer.activation_checkpointing')}"
    for served in config.serve_roles:
        if served.name == largest:
            return f"lower token_budget, or set {served.field('path')} to a smaller model"
    cache = "cpu_kv_cache_gb" if config.rollout.engine.kind == "vllm" else "max_rows"
    return f"lower rollout.engine.{cache} or rollout.engine.count"
