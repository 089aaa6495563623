"""The placement algorithm: assigns processes to nodes; if they do not fit, says what would fit.

`run.planning.run_plan` calls it when a run is planned, and `reservations` when resources are reserved.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lockstep.base.errors import PicklableError
from lockstep.base.text import count_noun
from lockstep.cluster.placement.bin_packing import BundleKind, SizeVector, largest_first, pack_bundles
from lockstep.cluster.placement.bundles import (
    Bundle,
    NodeResources,
    PlacementError,
    ProcessRequest,
    abbreviate_names,
    format_bytes,
    make_bundles,
    place_bundle,
)
from lockstep.cluster.placement.suggestions import LoadCheck, suggest_placements
from lockstep.config.cluster import PLACED_ROLES, PlacementConfig, RayClusterConfig, RolePlacement

__all__ = [
    "Assignment",
    "Bundle",
    "DoesNotFit",
    "NodeLookup",
    "NodeResources",
    "NodesBusy",
    "PlacementError",
    "ProcessRequest",
    "assign",
    "group_alike",
    "make_bundles",
    "relax_placement",
]  # fmt: skip

NodeLookup = Callable[[RayClusterConfig], list[NodeResources]]
"""Queries the nodes of a running cluster within seconds. Raises ConnectionError, with a fix, if the cluster cannot be
reached."""

_CPU_UNITS = 10_000
"""Smallest fraction of a CPU, as in Ray."""
_UNKNOWN_MEMORY = 1 << 40
_TRIAL_BUDGET = 1_000
"""Patterns tried for one suggestion."""


class DoesNotFit(PicklableError, PlacementError):
    """The nodes cannot hold the run, even if no other run uses them.

    Args:
        bundle: a bundle that fits on no node.
        why: the reason, as a sentence.
        largest: the node with the most GPUs, or CPUs, whichever the bundle needs.
        alternatives: settings with which the run would fit; None for processes of a run that has begun.
    """

    def __init__(
        self, bundle: Bundle, why: str, largest: NodeResources | None, alternatives: Sequence[str] | None
    ) -> None:
        would = "Would fit: " + ", or ".join(alternatives) if alternatives else "No smaller number of processes fits"
        super().__init__(why if alternatives is None else f"{why}. {would}")
        self.bundle, self.why, self.largest, self.alternatives = bundle, why, largest, tuple(alternatives or ())


class NodesBusy(PicklableError, PlacementError):
    """The nodes could hold the run, but are in use.

    Args:
        waiting: bundles that do not fit at the moment.
        users: sentences that name each node with the resources in use.
    """

    def __init__(self, waiting: Sequence[Bundle], users: Sequence[str]) -> None:
        first = waiting[0]
        names = abbreviate_names([name for bundle in waiting for name in bundle.processes])
        gpus, cpus = sum(bundle.gpus for bundle in waiting), sum(bundle.cpus for bundle in waiting)
        missing = _format_resources(gpus or None, cpus)
        super().__init__(f"{names} wait for {missing} ({first.needs()} on one node): {'; '.join(users)}")
        self.waiting, self.users = tuple(waiting), tuple(users)


@dataclass(frozen=True, slots=True)
class NodeShare:
    """The part of one node that a run uses."""

    node: NodeResources
    bundles: tuple[Bundle, ...]

    @property
    def cpus(self) -> float:
        return round(sum(bundle.cpus for bundle in self.bundles), 4)

    @property
    def gpus(self) -> int:
        return sum(bundle.gpus for bundle in self.bundles)

    @property
    def processes(self) -> tuple[str, ...]:
        return tuple(name for bundle in self.bundles for name in bundle.processes)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A node for every process."""

    nodes: tuple[NodeResources, ...]
    bundles: tuple[Bundle, ...]
    shares: tuple[NodeShare, ...] = field(init=False)
    """The nodes that are used, in the order of `nodes`."""
    node_of: dict[str, NodeResources] = field(init=False)
    """The node of each process."""
    slots: dict[str, tuple[int, ...]] = field(init=False)
    """By process, its GPUs as indices among the run's GPUs on that node (`NodeShare.gpus`)."""

    def __post_init__(self) -> None:
        on_node: dict[int, list[Bundle]] = {}
        for bundle in self.bundles:
            assert bundle.node is not None
            on_node.setdefault(bundle.node, []).append(bundle)
        shares: list[NodeShare] = []
        slots: dict[str, tuple[int, ...]] = {}
        for number in sorted(on_node):
            first = 0
            for bundle in on_node[number]:
                slots |= {name: tuple(first + slot for slot in used) for name, used in bundle.slots.items()}
                first += bundle.gpus
            shares.append(NodeShare(self.nodes[number], tuple(on_node[number])))
        object.__setattr__(self, "shares", tuple(shares))
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "node_of", {name: share.node for share in shares for name in share.processes})

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """Table rows: node, address, processes, CPUs and GPUs (`used of available`)."""
        return [
            (
                share.node.name,
                share.node.address,
                abbreviate_names(share.processes),
                f"{share.cpus:g} of {share.node.cpus:g}",
                f"{share.gpus} of {share.node.gpus:g}" if share.node.gpus else "",
            )
            for share in self.shares
        ]


def assign(
    requests: Sequence[ProcessRequest],
    placement: PlacementConfig,
    nodes: Sequence[NodeResources],
    loads: LoadCheck = lambda overrides: True,
    complete: bool = True,
) -> Assignment:
    """Assigns each process to a node; deterministic.

    `pack` fills the node with the most GPUs (then CPUs) first, `spread` gives a role's next process to the node with
    the fewest processes of the role. Ranks keep their order over the nodes, so that neighbours are together.

    Args:
        loads: whether the run's config is valid with what is suggested.
        complete: whether these are all processes of the run; see `make_bundles`.

    Raises:
        PlacementError: the placement contradicts itself.
        DoesNotFit: these nodes can never hold the processes.
        NodesBusy: the nodes could hold the processes, but are in use.
    """
    return _assign_bundles(
        make_bundles(requests, placement, complete),
        placement,
        nodes,
        lambda: _find_suggestions(requests, placement, nodes, loads) if complete else None,
    )


def relax_placement(placement: PlacementConfig) -> PlacementConfig:
    """The placement for processes that lost their node: it allows any number of nodes."""
    return placement.model_copy(update=dict.fromkeys(PLACED_ROLES, RolePlacement()))


def _assign_bundles(
    bundles: Sequence[Bundle],
    placement: PlacementConfig,
    nodes: Sequence[NodeResources],
    alternatives: Callable[[], Sequence[str] | None],
) -> Assignment:
    spread = placement.strategy == "spread"
    order = sorted(
        range(len(nodes)),
        key=lambda number: (-nodes[number].free_gpus, -nodes[number].free_cpus, not nodes[number].head, number),
    )
    groups = group_alike(bundles)
    kinds = [_bundle_kind(group) for group in groups]
    free = [_node_capacity(nodes[number], now=True) for number in order]
    counts = pack_bundles(kinds, free, spread)
    if counts is None:
        total = [_node_capacity(nodes[number], now=False) for number in order]
        if free == total or pack_bundles(kinds, total, spread) is None:
            raise _does_not_fit(groups, kinds, [nodes[number] for number in order], total, alternatives())
        raise NodesBusy(_unplaced(groups, kinds, free, spread), _usage_by_node([nodes[number] for number in order]))
    placed: list[Bundle] = []
    for k, group in enumerate(groups):
        rest = iter(group)
        for number, row in sorted(zip(order, counts, strict=True), key=lambda pair: pair[0] if spread else 0):
            placed += [place_bundle(next(rest), number) for _ in range(row[k])]
    return Assignment(tuple(nodes), tuple(placed))


def _find_suggestions(
    requests: Sequence[ProcessRequest], placement: PlacementConfig, nodes: Sequence[NodeResources], loads: LoadCheck
) -> list[str]:
    rooms = sorted((_node_capacity(node, now=False) for node in nodes), reverse=True)

    def fits(requests: Sequence[ProcessRequest], placement: PlacementConfig) -> bool:
        try:
            kinds = [_bundle_kind(group) for group in group_alike(make_bundles(requests, placement))]
        except PlacementError:
            return False
        return pack_bundles(kinds, rooms, budget=_TRIAL_BUDGET) is not None

    return suggest_placements(requests, placement, fits, loads)


def group_alike(bundles: Sequence[Bundle]) -> list[list[Bundle]]:
    """Groups bundles with the same roles and needs, in order."""
    groups: dict[object, list[Bundle]] = {}
    for bundle in bundles:
        groups.setdefault((bundle.roles, bundle.cpus, bundle.gpus, bundle.memory, bundle.one_per_node), []).append(
            bundle
        )
    return list(groups.values())


def _bundle_kind(group: Sequence[Bundle]) -> BundleKind:
    one = group[0]
    size = one.gpus, round(one.cpus * _CPU_UNITS), -(-one.memory // 2**20)
    return BundleKind(size, len(group), one.one_per_node)


def _node_capacity(node: NodeResources, now: bool) -> SizeVector:
    gpus, cpus = (node.free_gpus, node.free_cpus) if now else (node.gpus, node.cpus)
    return math.floor(gpus + 1e-6), round(cpus * _CPU_UNITS), node.memory // 2**20 or _UNKNOWN_MEMORY


def _unplaced(
    groups: Sequence[list[Bundle]], kinds: Sequence[BundleKind], rooms: list[SizeVector], spread: bool
) -> list[Bundle]:
    """The bundles that do not fit together with the others, largest first."""
    order = sorted(range(len(kinds)), key=lambda k: (not kinds[k].one_per_node, tuple(-n for n in kinds[k].size), k))
    _, left = largest_first([kinds[k] for k in order], rooms, spread)
    found = [bundle for k, many in zip(order, left, strict=True) for bundle in groups[k][len(groups[k]) - many :]]
    return found or [groups[order[-1]][-1]]  # each kind fits, but not all at once


def _does_not_fit(
    groups: Sequence[list[Bundle]],
    kinds: Sequence[BundleKind],
    nodes: Sequence[NodeResources],
    rooms: list[SizeVector],
    alternatives: Sequence[str] | None,
) -> DoesNotFit:
    too_large = [group[0] for group, kind in zip(groups, kinds, strict=True) if not _fits_alone(kind, rooms)]
    bundle = too_large[0] if too_large else _unplaced(groups, kinds, rooms, False)[0]
    largest = max(nodes, key=lambda node: (node.gpus, node.cpus) if bundle.gpus else (node.cpus, 0), default=None)
    if largest is None:
        return DoesNotFit(bundle, f"{bundle.title()} needs {bundle.needs()}, and no node is alive", None, alternatives)
    short = any(kind.size[2] for kind in kinds)
    gpus_matter = any(kind.size[0] for kind in kinds) or any(node.gpus for node in nodes)
    has = _format_resources(largest.gpus if gpus_matter else None, largest.cpus, largest.memory if short else 0)
    if too_large:
        why = f"{bundle.title()} needs {bundle.needs()} on one node, and the largest, {largest.name}, has {has}"
        return DoesNotFit(bundle, why, largest, alternatives)
    gpus, cpus, memory = (sum(kind.size[axis] * kind.count for kind in kinds) for axis in range(3))
    needed = _format_resources(gpus if gpus_matter else None, cpus / _CPU_UNITS, memory * 2**20)
    known = sum(node.memory for node in nodes) if memory else 0
    total = sum(node.gpus for node in nodes) if gpus_matter else None
    all_have = _format_resources(total, sum(node.cpus for node in nodes), known)
    needs = "they need" if alternatives is None else "the run needs"
    why = (
        f"{bundle.title()} ({bundle.needs()}) does not fit beside the others: {needs} {needed} in all, and "
        f"{len(nodes)} node{'s have' if len(nodes) > 1 else ' has'} {all_have}, the largest ({largest.name}) {has}"
    )
    return DoesNotFit(bundle, why, largest, alternatives)


def _fits_alone(kind: BundleKind, rooms: Sequence[SizeVector]) -> bool:
    return any(all(has >= needs for has, needs in zip(room, kind.size, strict=True)) for room in rooms)


def _format_resources(gpus: float | None, cpus: float, memory: int = 0) -> str:
    """Formats resources; leaves GPUs out if they are None."""
    of_gpus = "" if gpus is None else f"{count_noun(gpus, 'GPU')} and "
    return of_gpus + count_noun(cpus, "CPU") + (f" and {format_bytes(memory)}" if memory else "")


def _usage_by_node(nodes: Sequence[NodeResources]) -> list[str]:
    """The resources in use, by node."""
    found = []
    for node in nodes:
        gpus, cpus = node.gpus - node.free_gpus, node.cpus - node.free_cpus
        if gpus > 0 or cpus > 0:
            of_gpus, of_cpus = count_noun(node.gpus, "GPU"), count_noun(node.cpus, "CPU")
            parts = [f"{gpus:g} of {of_gpus}"] * (gpus > 0) + [f"{cpus:g} of {of_cpus}"] * (cpus > 0)
            found.append(f"{node.name} has {' and '.join(parts)} in use")
    return found
