"""Reserving what an assignment says with Ray: placement groups, each bundle on the node that the assignment names."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lockstep.cluster.bundles import PlacementError
from lockstep.cluster.placement import Assignment, Busy, NodeFacts, Share, Wanted, assign
from lockstep.cluster.ray.session import answer
from lockstep.config.placement import Placement
from lockstep.watch import waits

log = logging.getLogger(__name__)

LOOK_S = 0.5
PIN = 0.001
"""Of the resource `node:ADDRESS`, which each node has one of."""
AS_LONG_AS_IT_TAKES = 10 * 365 * 86400.0
"""Of others' work, which nobody here can know; the wait is visible."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is to be."""

    node: str
    """Its id."""
    gpus: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES has them."""


def when_free(
    wanted: Sequence[Wanted], placement: Placement, look: Callable[[], list[NodeFacts]], busy_limit_s: float | None,
    notice_after_s: float,
) -> Assignment:  # fmt: skip
    """A place for each, as soon as others have left enough; what is waited for is told.

    Raises:
        PlacementError, DoesNotFit: also where others have nothing.
        WaitTimeout: others did not leave within the limit.
    """
    told, last = "", 0.0

    def attempt() -> Assignment | None:
        nonlocal told, last
        try:
            return assign(wanted, placement, look())
        except Busy as error:
            now = time.monotonic()
            if str(error) != told or now - last > 6 * notice_after_s:
                log.warning("%s", error)
                told, last = str(error), now
            return None

    return waits.poll(
        attempt, kind="placement", whom="nodes of the Ray cluster", why="what others use now is free",
        every_s=LOOK_S, timeout_s=busy_limit_s or AS_LONG_AS_IT_TAKES, notice_after_s=None,
    )  # fmt: skip


def reserve(
    keeper: Any, generation: int, assignment: Assignment, busy_limit_s: float | None, notice_after_s: float
) -> tuple[str, dict[str, Place]]:
    """Has an actor reserve it, in one placement group; its id, and the place of each process.

    Raises:
        PlacementError: the nodes are not as they were.
        WaitTimeout: others took it meanwhile, and did not leave within the limit.
        Superseded: a later generation has the run.
    Nothing stays reserved where it fails.
    """
    bundles = [_resources(share) for share in assignment.shares]
    name = answer(keeper.reserve.remote(generation, bundles), "Ray", "the run's placement group")
    group = PlacementGroup(PlacementGroupID(bytes.fromhex(name)))
    try:
        _created(group, assignment.shares, busy_limit_s, notice_after_s)
        return name, _places(group, assignment)
    except BaseException:
        remove_placement_group(group)
        raise


def _places(group: PlacementGroup, assignment: Assignment) -> dict[str, Place]:
    """Where each process is, and with which GPUs."""
    places: dict[str, Place] = {}
    asked = [_ask_gpus(group, number, share.gpus) for number, share in enumerate(assignment.shares)]
    for share, ref in zip(assignment.shares, asked, strict=True):
        ids = [] if ref is None else answer(ref, share.node.name, "which GPUs of it are the run's")
        for process in share.processes:
            slots = assignment.slots.get(process, ())
            places[process] = Place(share.node.id, tuple(ids[slot] for slot in slots))
    return places


def free(name: str) -> None:
    """Gives a placement group back. Idempotent."""
    remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(name))))


def _resources(share: Share) -> dict[str, float]:
    bundle: dict[str, float] = {"CPU": share.cpus, f"node:{share.node.address}": PIN}
    return bundle | ({"GPU": float(share.gpus)} if share.gpus else {})


def _created(group: PlacementGroup, shares: Sequence[Share], busy_limit_s: float | None, notice_after_s: float) -> None:
    each = (f"{s.cpus:g} CPUs, {s.gpus} GPUs on {s.node.name} for {', '.join(s.processes)}" for s in shares)
    needs = "; ".join(each)

    def created() -> bool | None:
        row = placement_group_table(group)
        state, stats = row.get("state"), row.get("stats", {})
        if state == "CREATED":
            return True
        if state == "REMOVED" or stats.get("scheduling_state") == "INFEASIBLE":
            raise PlacementError(f"the nodes have changed since the run was planned, and {needs} cannot be reserved")
        return None

    waits.poll(
        created, kind="placement", whom="Ray", why=needs, every_s=0.05,
        timeout_s=busy_limit_s or AS_LONG_AS_IT_TAKES, notice_after_s=notice_after_s,
    )  # fmt: skip


def _ask_gpus(group: PlacementGroup, number: int, gpus: int) -> Any:
    """Which ones a bundle has; they stay the same as long as it lives. None where it has none."""
    if not gpus:
        return None
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    return _gpu_ids.options(num_gpus=gpus, scheduling_strategy=strategy).remote()


@ray.remote(num_cpus=0, max_retries=3)  # type: ignore[untyped-decorator]
def _gpu_ids() -> list[str]:
    return [str(number) for number in ray.get_gpu_ids()]
