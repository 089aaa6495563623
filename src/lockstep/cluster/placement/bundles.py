"""Resource requests of a run's processes, grouped into bundles that must be on one node."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.config.cluster import PLACED_ROLES, PlacementConfig, RolePlacement
from lockstep.config.roles import section_of_role

COUNT_FIELD = {
    "policy": "trainer.ranks",
    "critic": "critic.trainer.ranks",
    "reference": "reference.ranks",
    "reward_model": "reward.terms.*.ranks",
    "rollout": "rollout.engine.count",
    "reward": "reward.workers",
    "environment": "rollout.environment.workers",
}
"""By role, the config field that sets its number of processes."""


@dataclass(frozen=True, slots=True)
class NodeResources:
    """A node that is alive, as its cluster reports it."""

    id: str
    name: str
    """Name shown to users: the host's name, followed by its address if another node has the same name."""
    address: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    memory: int = 0
    """Bytes; 0 if unknown."""
    head: bool = False


@dataclass(frozen=True, slots=True)
class ProcessRequest:
    """A process and the resources that it needs."""

    name: str
    role: str
    """`policy` or another trained role, `reference`, `reward_model`, `reward_model_2`, `rollout`, `reward` or
    `environment`."""
    rank: int
    cpus: float
    gpus: int = 0
    """Number of GPUs, all on one node. For an engine: its tensor-parallel size."""
    memory: int = 0
    """Bytes of the node's memory; 0 if unknown."""
    count_field: str = ""
    """The config field that sets the number of processes of its role, where `COUNT_FIELD` does not name it."""

    @property
    def section(self) -> str:
        """The name of its role in `placement`."""
        return section_of_role(self.role)

    @property
    def counted_by(self) -> str:
        """The config field that sets the number of processes of its role."""
        return self.count_field or COUNT_FIELD[self.section]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources that are reserved together on one node, for processes that share GPUs or belong together."""

    processes: tuple[str, ...]
    cpus: float
    gpus: int
    memory: int
    slots: dict[str, tuple[int, ...]]
    """By process, the indices of the bundle's GPUs that it uses."""
    roles: tuple[str, ...] = ()
    one_per_node: bool = False
    """Whether no equal bundle may be on the same node, because the placement fixes how many processes of the role each
    node has."""
    node: int | None = None
    """Index of its node in the list passed to `assign`; None before it is placed."""

    def needs(self) -> str:
        """Human-readable resources, such as `2 GPUs and 4 CPUs`."""
        cpus = f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}"
        gpus = f"{self.gpus} GPU{'s' * (self.gpus != 1)} and " if self.gpus else ""
        memory = f" and {format_bytes(self.memory)} of memory" if self.memory else ""
        return gpus + cpus + memory

    def title(self) -> str:
        """Human-readable names of its processes."""
        return abbreviate_names(self.processes)


class PlacementError(ValueError):
    """The placement contradicts itself or the number of processes. Names the config fields."""


def make_bundles(requests: Sequence[ProcessRequest], placement: PlacementConfig, complete: bool = True) -> list[Bundle]:
    """Groups all processes into bundles. Ranks keep their order, so neighbours stay together.

    - If the placement fixes how many processes of a role each node has: one bundle per node, with these processes.
    - Otherwise, if roles share devices: one bundle per rank, with the ranks of the same number of the other roles; with
      engines one per engine, with the ranks whose GPUs it uses.
    - Otherwise: one bundle per process.

    Args:
        complete: whether these are all processes of the run. Otherwise they are those that lost their node, and roles
            that share devices may have different numbers of them: the ranks of the same number still share a GPU.

    Raises:
        PlacementError: nodes, GPUs per node and number of processes contradict each other, or roles that are to share
            devices have different numbers of processes.
    """
    found: list[Bundle] = []
    for members in _device_sets(requests, placement):
        engines = members.pop("rollout", None)
        if members and (engines or len(members) > 1) and not complete:
            found += _lost_bundles(list(members.values()), engines or [])
        elif members and (engines or len(members) > 1):
            found += _colocated_bundles(list(members.values()), engines or [], placement)
        else:
            (alone,) = [engines] if engines else members.values()
            found += _separate_bundles(alone, getattr(placement, alone[0].section))
    return found + [_single_bundle(each) for each in requests if each.section not in PLACED_ROLES]


def _device_sets(
    requests: Sequence[ProcessRequest], placement: PlacementConfig
) -> list[dict[str, list[ProcessRequest]]]:
    """The processes of the placed roles, by role, in sets of roles that share devices."""
    roles = dict.fromkeys(each.role for each in sorted(requests, key=_place_in_order) if each.section in PLACED_ROLES)
    sets: dict[tuple[str, ...], dict[str, list[ProcessRequest]]] = {}
    for role in roles:
        sets.setdefault(placement.device_key(role), {})[role] = processes_of(requests, role)
    return list(sets.values())


def _place_in_order(request: ProcessRequest) -> int:
    """Roles in the order of `PLACED_ROLES`."""
    return PLACED_ROLES.index(request.section) if request.section in PLACED_ROLES else len(PLACED_ROLES)


def processes_of(requests: Sequence[ProcessRequest], role: str) -> list[ProcessRequest]:
    """The processes of a role, by rank."""
    return sorted((each for each in requests if each.role == role), key=lambda each: each.rank)


def total_gpus(requests: Sequence[ProcessRequest], placement: PlacementConfig) -> int:
    """GPUs of all bundles; shared ones count once. Raises PlacementError."""
    return sum(bundle.gpus for bundle in make_bundles(requests, placement))


def _separate_bundles(processes: Sequence[ProcessRequest], role: RolePlacement) -> list[Bundle]:
    per_node = processes_per_node(processes[0], role, len(processes), max(processes[0].gpus, 1))
    if per_node is None:
        return [_single_bundle(process) for process in processes]
    groups = [processes[first : first + per_node] for first in range(0, len(processes), per_node)]
    return [_combined_bundle([group], one_per_node=True) for group in groups]


def _colocated_bundles(
    roles: Sequence[Sequence[ProcessRequest]], engines: Sequence[ProcessRequest], placement: PlacementConfig
) -> list[Bundle]:
    """Bundles for ranks and engines that share GPUs: the ranks of one number of all roles have the same GPU, and an
    engine that uses the GPUs of w ranks gets those of ranks e*w to (e+1)*w-1, where e is its number."""
    _check_equal_counts(roles)
    ranks = roles[0]
    width = max(engines[0].gpus // max(ranks[0].gpus, 1), 1) if engines else 1
    if len(engines) * width > len(ranks):
        raise PlacementError(
            f"placement.colocate shares the GPUs of {len(ranks)} {ranks[0].role} ranks, and {len(engines)} engines "
            f"with {width} GPUs each need {len(engines) * width}: set rollout.engine.count="
            f"{max(len(ranks) // width, 1)} or fewer, or {ranks[0].counted_by}={len(engines) * width}"
        )
    members = [each[0].section for each in (*roles, *([engines] if engines else []))]
    per_node = processes_per_node(ranks[0], _merge_role_placements(placement, members), len(ranks), 1)
    if per_node is not None and per_node % width:
        raise PlacementError(
            f"an engine needs its {width} GPUs on one node, and each node has {per_node} {ranks[0].role} ranks: with "
            f"placement.colocate set rollout.engine.tensor_parallel_size to a divisor of {per_node}"
        )
    size = width if per_node is None else per_node
    found = []
    for first in range(0, len(ranks), size):
        colocated_engines = engines[first // width : (first + size) // width]
        if colocated_engines or per_node is not None:
            groups = [each[first : first + size] for each in roles]
            found.append(_combined_bundle([*groups, colocated_engines], one_per_node=per_node is not None))
        else:
            numbers = range(first, min(first + size, len(ranks)))
            found += [_combined_bundle([each[number : number + 1] for each in roles]) for number in numbers]
    return found


def _lost_bundles(roles: Sequence[Sequence[ProcessRequest]], engines: Sequence[ProcessRequest]) -> list[Bundle]:
    """Bundles for those ranks and engines of a set that lost their node: one for each engine, with the ranks whose GPUs
    it uses, as far as they lost theirs as well, and one for each number of the other ranks."""
    width = max(engines[0].gpus // max(roles[0][0].gpus, 1), 1) if engines else 1
    by_first = {engine.rank * width: engine for engine in engines}
    numbers = {each.rank for role in roles for each in role}
    alone = numbers - {first + offset for first in by_first for offset in range(width)}
    found = []
    for first in sorted({*by_first, *alone}):
        size = width if first in by_first else 1
        groups = [[each for each in role if first <= each.rank < first + size] for role in roles]
        found.append(_combined_bundle([*groups, [by_first[first]] if first in by_first else []]))
    return found


def _check_equal_counts(roles: Sequence[Sequence[ProcessRequest]]) -> None:
    """Raises PlacementError unless all roles of a set have as many ranks as the first one."""
    first, *others = roles
    for other in others:
        if len(other) != len(first):
            counts = ", ".join(f"{each[0].counted_by} {len(each)}" for each in roles)
            raise PlacementError(
                f"placement.colocate puts {' and '.join(each[0].role for each in roles)} on the same devices, one rank "
                f"of each beside the other, and they have different numbers of ranks ({counts}): set "
                f"{other[0].counted_by}={len(first)}, or leave {other[0].section} out of the set"
            )


def _merge_role_placements(placement: PlacementConfig, sections: Sequence[str]) -> RolePlacement:
    """Combines the placements of roles that share GPUs: a value that is set for one role applies to all."""
    merged: dict[str, int] = {}
    for field in ("nodes", "gpus_per_node"):
        given = {name: getattr(getattr(placement, name), field) for name in dict.fromkeys(sections)}
        given = {name: value for name, value in given.items() if value is not None}
        if len(set(given.values())) > 1:
            (one, a), (other, b) = next(
                (one, other) for one in given.items() for other in given.items() if one[1] != other[1]
            )
            raise PlacementError(
                f"placement.{one}.{field} {a} and placement.{other}.{field} {b} differ, and placement.colocate "
                "puts both roles on the same GPUs: leave one of the two out"
            )
        if given:
            merged[field] = next(iter(given.values()))
    first = sections[0]
    own: RolePlacement = getattr(placement, first)
    return own.model_copy(update=merged)


def processes_per_node(one: ProcessRequest, role_placement: RolePlacement, count: int, width: int) -> int | None:
    """How many processes of `width` GPUs each node of the role has; None if the placement does not fix it. For
    processes without GPUs (`width` 1), `gpus_per_node` is the number of processes.

    Args:
        one: any process of the role.

    Raises:
        PlacementError: the placement contradicts the number of processes.
    """
    nodes, gpus, name = role_placement.nodes, role_placement.gpus_per_node, f"placement.{one.section}"
    field = one.counted_by
    if gpus is not None and gpus % width:
        raise PlacementError(
            f"{name}.gpus_per_node {gpus} is not a multiple of the {width} GPUs of an engine, which must be on one "
            f"node: set rollout.engine.tensor_parallel_size to a divisor of {gpus}"
        )
    if gpus is not None and nodes is not None and nodes * gpus != count * width:
        of_each = f", {width} for each" if width > 1 else ""
        raise PlacementError(
            f"{name}.nodes {nodes} x {name}.gpus_per_node {gpus} are {nodes * gpus} GPUs, and {field} {count} needs "
            f"{count * width}{of_each}: set {field}={nodes * gpus // width}, or omit "
            f"{name}.nodes or {name}.gpus_per_node"
        )
    if gpus is not None:
        if count % (gpus // width):
            raise PlacementError(
                f"{field} {count} does not fill nodes with {name}.gpus_per_node {gpus}: set {field} to a multiple of "
                f"{gpus // width}"
            )
        return gpus // width
    if nodes is None:
        return None
    if count % nodes:
        raise PlacementError(
            f"{field} {count} cannot be divided evenly among {name}.nodes {nodes}: set {field} to "
            f"{-(-count // nodes) * nodes}, or {name}.nodes to a divisor of {count}"
        )
    return count // nodes


def _single_bundle(process: ProcessRequest) -> Bundle:
    slots = {process.name: tuple(range(process.gpus))}
    return Bundle((process.name,), process.cpus, process.gpus, process.memory, slots, (process.role,))


def _combined_bundle(roles: Sequence[Sequence[ProcessRequest]], one_per_node: bool = False) -> Bundle:
    """A bundle in which processes of different roles share GPUs; processes of the same role do not."""
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
    return Bundle(names, cpus, gpus, memory, slots, tuple(role[0].role for role in roles if role), one_per_node)


def place_bundle(bundle: Bundle, node: int | None) -> Bundle:
    """A copy of the bundle on another node."""
    return replace(bundle, node=node)


def format_bytes(size: float) -> str:
    """Human-readable size, such as `1.5 GiB`."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def abbreviate_names(names: Sequence[str]) -> str:
    """Joins names, with ranges for consecutive numbers: `policy-0..3, engine-0`."""
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
