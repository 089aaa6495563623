"""An actor on each node of a run: started side by side, and asked what its node is like."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lockstep.cluster.bundles import NodeFacts
from lockstep.cluster.node import NodeRefused
from lockstep.cluster.ray.keeper import Keeper
from lockstep.cluster.ray.session import answer


@dataclass(frozen=True, slots=True)
class Site:
    """What each node is told of the run: see `Keeper`."""

    run: str
    token: str
    folder: str
    cwd: str
    mark: str
    peer: str | None
    interface: str | None
    several: bool


@dataclass(frozen=True, slots=True)
class Employed:
    """An actor, and what it says of its node."""

    keeper: Any
    found: Mapping[str, Any]


def employ(nodes: Sequence[NodeFacts], site: Site) -> list[Employed]:
    """One actor for each node. Raises NodeRefused."""
    run, token, folder, cwd, mark, peer, interface, several = astuple(site)
    actor = ray.remote(Keeper)
    keepers = []
    for node in nodes:
        keeper = actor.options(
            name=f"keeper-{node.id}", namespace=run, lifetime="detached", num_cpus=0, max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        ).remote(run, token, folder, cwd, mark, node.name, peer, interface, several)  # fmt: skip
        keepers.append((node, keeper, keeper.facts.remote()))
    found = []
    for node, keeper, facts in keepers:
        try:
            found.append(Employed(keeper, answer(facts, node.name, "Ray starts the run's actor there")))
        except ray.exceptions.RayError as error:
            for _, each, _ in keepers:
                ray.kill(each)
            raise NodeRefused(_why(node.name, error)) from error
    return found


def _why(name: str, error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[-1] if lines else type(error).__name__
    if any("ModuleNotFoundError" in line or "No module named" in line for line in lines):
        missing = next(line for line in lines if "No module named" in line or "ModuleNotFoundError" in line)
        return (
            f"{name} cannot import what a run needs ({missing}): install the same lockstep-rl there, in the Python "
            "that its Ray was started with"
        )
    return f"{name} cannot take part in the run: {said}"
