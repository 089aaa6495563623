"""Resource requests of a run's processes, grouped into bundles that must be on one node."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.config.cluster import PlacementConfig, RolePlacement

COUNT_FIELD = {
    "policy": "trainer.ranks",
    "rollout": "rollout.engine.count",
    "reward": "reward.workers",
    "environment": "rollout.environment.workers",
}
"""By role, the field that says how many processes it has."""


@dataclass(frozen=True, slots=True)
class NodeResources:
    """A living node as its cluster knows it."""

    id: str
    name: str
    """As its user knows it."""
    address: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    memory: int = 0
    """Bytes; 0 where it is not known."""
    head: bool = False


@dataclass(frozen=True, slots=True)
class ProcessRequest:
    """A process that is to have a place."""

    name: str
    role: str
    """`policy`, `rollout`, `check_reward` or `environment`."""
    rank: int
    cpus: float
    gpus: int = 0
    """Of one node: those of an engine are its tensor-parallel group."""
    memory: int = 0
    """Bytes of the node's memory; 0 where it is not known."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """What is reserved together, on one node, for processes that share its GPUs or belong together."""

    processes: tuple[str, ...]
    cpus: float
    gpus: int
    memory: int
    slots: dict[str, tuple[int, ...]]
    """Of each process, which of the bundle's GPUs it uses."""
    roles: tuple[str, ...] = ()
    alone: bool = False
    """No other of the same kind on its node: the placement says on how many nodes the role is."""
    node: int | None = None
    """Number of its node in the list that was given; None before it has one."""

    def needs(self) -> str:
        """For people."""
        cpus = f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}"
        gpus = f"{self.gpus} GPU{'s' * (self.gpus != 1)} and " if self.gpus else ""
        memory = f" and {format_bytes(self.memory)} of memory" if self.memory else ""
        return gpus + cpus + memory

    def title(self) -> str:
        """Its processes, for people."""
        return abbreviate_names(self.processes)


class PlacementError(ValueError):
    """The placement contradicts itself or the number of processes; names the fields."""


def make_bundles(wanted: Sequence[ProcessRequest], placement: PlacementConfig) -> list[Bundle]:
    """All processes in bundles: one each, one for a role's share of a node where the placement says how many nodes it
    has, and one for ranks and the engine that share GPUs. Ranks in their order, so that neighbours stay neighbours.

    Raises:
        PlacementError: nodes, GPUs per node and number of processes contradict each other.
    """
    ranks = sorted((each for each in wanted if each.role == "policy"), key=lambda each: each.rank)
    engines = sorted((each for each in wanted if each.role == "rollout"), key=lambda each: each.rank)
    others = [each for each in wanted if each.role not in ("policy", "rollout")]
    if placement.shared and ranks and engines:
        found = _colocated_bundles(ranks, engines, placement)
    else:
        found = _separate_bundles(ranks, placement.policy) + _separate_bundles(engines, placement.rollout)
    return found + [_single_bundle(each) for each in others]


def total_gpus(wanted: Sequence[ProcessRequest], placement: PlacementConfig) -> int:
    """Of all together, those that are shared once. Raises PlacementError."""
    return sum(bundle.gpus for bundle in make_bundles(wanted, placement))


def _separate_bundles(processes: Sequence[ProcessRequest], role: RolePlacement) -> list[Bundle]:
    if not processes:
        return []
    each = processes_per_node(processes[0].role, role, len(processes), max(processes[0].gpus, 1))
    if each is None:
        return [_single_bundle(process) for process in processes]
    groups = [processes[first : first + each] for first in range(0, len(processes), each)]
    return [_combined_bundle([group], alone=True) for group in groups]


def _colocated_bundles(
    ranks: Sequence[ProcessRequest], engines: Sequence[ProcessRequest], placement: PlacementConfig
) -> list[Bundle]:
    """An engine is with the ranks whose GPUs it uses: engine e of width w with the ranks from e*w on."""
    width = max(engines[0].gpus // max(ranks[0].gpus, 1), 1)
    if len(engines) * width > len(ranks):
        raise PlacementError(
            f"placement.colocate shares the GPUs of {len(ranks)} policy ranks, and {len(engines)} engines of {width} "
            f"need {len(engines) * width}: set rollout.engine.count={max(len(ranks) // width, 1)} or fewer, or "
            f"trainer.ranks={len(engines) * width}"
        )
    each = processes_per_node("policy", _merge_role_placements(placement), len(ranks), 1)
    if each is not None and each % width:
        raise PlacementError(
            f"an engine has its {width} GPUs on one node, and {each} policy ranks are on each: with "
            f"placement.colocate set rollout.engine.tensor_parallel_size to a divisor of {each}"
        )
    size = width if each is None else each
    groups = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    found = []
    for number, group in enumerate(groups):
        guests = engines[number * size // width : (number + 1) * size // width]
        if guests or each is not None:
            found.append(_combined_bundle([group, guests], alone=each is not None))
        else:
            found += [_single_bundle(rank) for rank in group]
    return found


def _merge_role_placements(placement: PlacementConfig) -> RolePlacement:
    """Of roles that share GPUs. What only one of them says holds for both."""
    policy, rollout = placement.policy, placement.rollout
    for field in ("nodes", "gpus_per_node"):
        one, other = getattr(policy, field), getattr(rollout, field)
        if one is not None and other is not None and one != other:
            raise PlacementError(
                f"placement.policy.{field} {one} and placement.rollout.{field} {other} differ, and placement.colocate "
                "puts both roles on the same GPUs: leave one of the two out"
            )
    return policy.model_copy(
        update={
            "nodes": policy.nodes or rollout.nodes,
            "gpus_per_node": policy.gpus_per_node or rollout.gpus_per_node,
        }
    )


def processes_per_node(role: str, said: RolePlacement, count: int, width: int) -> int | None:
    """How many processes of `width` GPUs each of the role's nodes has; None where that is left open. On CPUs
    (`width` 1), GPUs per node are processes per node.

    Raises:
        PlacementError: what is said contradicts the number of processes.
    """
    nodes, gpus, name = said.nodes, said.gpus_per_node, f"placement.{role}"
    field = COUNT_FIELD[role]
    if gpus is not None and gpus % width:
        raise PlacementError(
            f"{name}.gpus_per_node {gpus} is no multiple of the {width} GPUs of an engine, which are on one node: "
            f"set rollout.engine.tensor_parallel_size to a divisor of {gpus}"
        )
    if gpus is not None and nodes is not None and nodes * gpus != count * width:
        of_each = f", {width} for each" if width > 1 else ""
        raise PlacementError(
            f"{name}.nodes {nodes} x {name}.gpus_per_node {gpus} are {nodes * gpus} GPUs, and {field} {count} needs "
            f"{count * width}{of_each}: set {field}={nodes * gpus // width}, or leave one of the other two out"
        )
    if gpus is not None:
        if count % (gpus // width):
            raise PlacementError(
                f"{field} {count} does not fill nodes of {name}.gpus_per_node {gpus}: set it to a multiple of "
                f"{gpus // width}"
            )
        return gpus // width
    if nodes is None:
        return None
    if count % nodes:
        raise PlacementError(
            f"{field} {count} is not shared out evenly over {name}.nodes {nodes}: set it to "
            f"{-(-count // nodes) * nodes}, or the nodes to a divisor"
        )
    return count // nodes


def _single_bundle(process: ProcessRequest) -> Bundle:
    slots = {process.name: tuple(range(process.gpus))}
    return Bundle((process.name,), process.cpus, process.gpus, process.memory, slots, (process.role,))


def _combined_bundle(roles: Sequence[Sequence[ProcessRequest]], alone: bool = False) -> Bundle:
    """Of roles that share GPUs; the processes of one role have their own."""
    slots: dict[str, tuple[int, ...]] = {}
    gpus = 0
    for role in roles:
        first = 0
        for process in role:
            slots[process.name] = tuple(range(first, first + process.gpus))
            first += process.gpus
        gpus = max(gpus, first)
    members = [process for role in roles for process in role]
    cpus = round(sum(process.cpus for process in members), 4)
    memory = sum(process.memory for process in members)
    names = tuple(process.name for process in members)
    return Bundle(names, cpus, gpus, memory, slots, tuple(role[0].role for role in roles if role), alone)


def place_bundle(bundle: Bundle, node: int | None) -> Bundle:
    """The bundle with another place."""
    return replace(bundle, node=node)


def format_bytes(size: float) -> str:
    """For people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def abbreviate_names(names: Sequence[str]) -> str:
    """`policy-0..3, engine-0` for names of consecutive numbers."""
    runs: list[tuple[str, str, str]] = []
    for name in names:
        stem, dash, number = name.rpartition("-")
        last = runs[-1] if runs else None
        if last is not None and dash and number.isdigit() and last[0] == stem and int(last[2]) + 1 == int(number):
            runs[-1] = stem, last[1], number
        elif dash and number.isdigit():
            runs.append((stem, number, number))
        else:
            runs.append((name, "", ""))
    shown = [stem if not one else f"{stem}-{one}" if one == two else f"{stem}-{one}..{two}" for stem, one, two in runs]
    return ", ".join(shown)
