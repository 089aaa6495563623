"""Reserves an assignment in Ray: placement groups, each bundle on the node that the assignment names."""

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lockstep.base import waits
from lockstep.base.text import count_noun
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.placement.assignment import Assignment, NodeShare
from lockstep.cluster.placement.reservations import Reservation, ReservationConflict
from lockstep.cluster.ray.ray_session import RayUnresponsive, ray_call, ray_get

NODE_PIN = 0.001
"""Amount of the resource `node:ADDRESS`, of which each node has 1."""
RESERVE_LIMIT_S = 20.0
"""Free resources are reserved within this time; otherwise another run has taken them."""


def reserve_groups(
    node_actors: Mapping[str, Any],
    generation: int,
    assignment: Assignment,
    held: Sequence[Reservation],
    notice_after_s: float,
) -> list[Reservation]:
    """Makes each node's actor (by node id) reserve the run's share of the node, in addition to `held`, in a placement
    group that ends with the actor.

    Raises:
        ReservationConflict: the nodes have changed.
        Superseded: a later generation has the run.
    On an error the groups are released; if Ray does not respond, at the actor's next request or at its end.
    """
    refs = [
        node_actors[share.node.id].reserve.remote(
            generation, _bundle_resources(share), [each.group for each in held if each.node == share.node.id]
        )
        for share in assignment.shares
    ]
    groups: list[PlacementGroup] = []
    try:
        for share, ref in zip(assignment.shares, refs, strict=True):
            name = ray_get(ref, share.node.name, "the run's placement group there", timeout_s=RESERVE_LIMIT_S)
            groups.append(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))
        _wait_until_created(groups, assignment.shares, notice_after_s)
        return _to_reservations(groups, assignment)
    except BaseException:
        for group in groups:
            remove_group(str(group.id.hex()))
        raise


def _to_reservations(groups: Sequence[PlacementGroup], assignment: Assignment) -> list[Reservation]:
    """The groups as reservations, with the GPUs of each process."""
    found = []
    refs = [_query_gpu_ids(group, share.gpus) for group, share in zip(groups, assignment.shares, strict=True)]
    for group, share, ref in zip(groups, assignment.shares, refs, strict=True):
        ids = [] if ref is None else ray_get(ref, share.node.name, "the ids of the run's GPUs")
        slots = {name: assignment.slots.get(name, ()) for name in share.processes}
        gpus = {name: tuple(ids[slot] for slot in of) for name, of in slots.items()}
        found.append(Reservation(str(group.id.hex()), share.node.id, gpus))
    return found


def remove_group(name: str) -> None:
    """Releases a placement group; if Ray does not respond, the group's actor does it later. Idempotent."""
    with contextlib.suppress(RayUnresponsive):
        group = PlacementGroup(PlacementGroupID(bytes.fromhex(name)))
        ray_call(lambda: remove_placement_group(group), "releasing a reservation")


def _bundle_resources(share: NodeShare) -> dict[str, float]:
    bundle: dict[str, float] = {"CPU": share.cpus, f"node:{share.node.address}": NODE_PIN}
    return bundle | ({"GPU": float(share.gpus)} if share.gpus else {})


def _wait_until_created(groups: Sequence[PlacementGroup], shares: Sequence[NodeShare], notice_after_s: float) -> None:
    """Waits until Ray has created the groups. Raises ReservationConflict."""
    left = list(zip(groups, shares, strict=True))

    def needs() -> str:
        each = (
            f"{count_noun(s.cpus, 'CPU')}, {count_noun(s.gpus, 'GPU')} on {s.node.name} for {', '.join(s.processes)}"
            for _, s in left
        )
        return "; ".join(each)

    def created() -> bool | None:
        while left:
            row = ray_call(partial(placement_group_table, left[0][0]), "the state of a reservation")
            state, stats = row.get("state"), row.get("stats", {})
            if state == "REMOVED" or stats.get("scheduling_state") == "INFEASIBLE":
                raise ReservationConflict(
                    f"the nodes have changed since the run was planned, and {needs()} cannot be reserved"
                )
            if state != "CREATED":
                return None
            del left[0]
        return True

    try:
        waits.poll(
            created, kind="placement", waits_for="Ray", why=needs(), every_s=0.05, timeout_s=RESERVE_LIMIT_S,
            notice_after_s=notice_after_s,
        )  # fmt: skip
    except WaitTimeout as error:
        raise ReservationConflict(f"other runs have taken {needs()}") from error


def _query_gpu_ids(group: PlacementGroup, gpus: int) -> Any:
    """The GPUs of a group of one bundle, which are fixed for its life. None if it has none."""
    if not gpus:
        return None
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    return ray_call(_gpu_ids.options(num_gpus=gpus, scheduling_strategy=strategy).remote, "the ids of the run's GPUs")


@ray.remote(num_cpus=0, max_retries=3)  # type: ignore[untyped-decorator]
def _gpu_ids() -> list[str]:
    return [str(number) for number in ray.get_gpu_ids()]
