"""An actor on each node of a run: started side by side, and asked what its node is like."""

import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lockstep.cluster.bundles import NodeFacts
from lockstep.cluster.node import NodeRefused
from lockstep.cluster.ray.asking import RaySilent, ask
from lockstep.cluster.ray.keeper import Keeper, Site
from lockstep.cluster.ray.session import answer
from lockstep.cluster.versions import Facts, must_work
from lockstep.watch import procs
from lockstep.watch.errors import last_line
from lockstep.watch.leader import Leader, Superseded
from lockstep.watch.waits import WaitTimeout

log = logging.getLogger(__name__)

NEEDED = ("python", "ray", "torch")
"""Packages that every node must have."""
LEAVE_S = 15.0

_orders = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Employed:
    """An actor, and what it says of its node."""

    keeper: Any
    found: Mapping[str, Any]


def employ(nodes: Sequence[NodeFacts], site: Site) -> list[Employed]:
    """One actor for each node. Raises NodeRefused."""
    actor = ray.remote(Keeper)
    keepers: list[tuple[NodeFacts, Any, Any]] = []
    found = []
    try:
        for node in nodes:
            employed = actor.options(
                name=f"keeper-{node.id}-{secrets.token_hex(3)}", namespace=site.run, lifetime="detached",
                num_cpus=0, max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )  # fmt: skip
            keeper = ask(partial(employed.remote, site, node.name), f"the run's actor on {node.name} is made")
            keepers.append((node, keeper, keeper.facts.remote()))
        for node, keeper, facts in keepers:
            try:
                found.append(Employed(keeper, answer(facts, node.name, "Ray starts the run's actor there")))
            except ray.exceptions.RayError as error:
                raise NodeRefused(_why(node.name, error)) from error
    except BaseException:
        dismiss(keeper for _, keeper, _ in keepers)
        raise
    return found


def employ_fit(
    nodes: Sequence[NodeFacts], site: Site, known: Mapping[str, Facts], with_gpus: set[str]
) -> tuple[list[Employed], dict[str, Facts]]:
    """Actors on nodes that fit together, also with those that are there already (`known`: their versions, by name;
    `with_gpus`: those of them that have some), and the versions of all. Nothing is left where they do not.

    Raises:
        NodeRefused: one cannot take part.
        VersionError: what is installed there does not go together.
    """
    found = employ(nodes, site)
    versions = {**known, **{each.name: of.found["versions"] for each, of in zip(nodes, found, strict=True)}}
    gpus = with_gpus | {each.name for each in nodes if each.gpus}
    try:
        for warning in must_work(versions, dict.fromkeys(versions, NEEDED), gpus):
            log.warning("%s", warning)
    except BaseException:
        dismiss(of.keeper for of in found)
        raise
    return found, versions


def dismiss(keepers: Iterable[Any]) -> None:
    """Ends actors of this controller's that nobody else can have found."""
    for keeper in keepers:
        with contextlib.suppress(RaySilent):
            ask(partial(ray.kill, keeper), "an actor of the run is ended")


def send_away(keepers: Iterable[tuple[str, Any]], generation: int) -> None:
    """Ends actors, each with the name of its node before it, with their agents and what they have reserved; but for
    those that a later generation has. Who does not answer ends by itself, as nobody asks for it any more."""
    asked = [(name, keeper.leave.remote(generation)) for name, keeper in keepers]
    until = time.monotonic() + LEAVE_S
    for name, ref in asked:
        try:
            answer(ref, name, "the run's actor there ends", timeout_s=max(0.1, until - time.monotonic()))
        except Superseded as error:
            log.warning("what %s has there stays: %s", name, error)
        except (ray.exceptions.RayError, WaitTimeout) as error:
            log.info("%s does not say that its actor ends: %s", name, error)


def be_watched(keepers: Iterable[tuple[str, Any, bool]], generation: int, grace_s: float) -> None:
    """Has actors, each with the name of its node before it and whether that is this host after it, live as long as this
    process, and so much longer; those elsewhere as long as their agent does.

    Raises:
        Superseded: a later generation has the run.
        WaitTimeout, ray's errors: one does not answer.
    """
    pid = os.getpid()
    me = pid, procs.start_ticks(pid)
    asked = [
        (name, keeper.watch_controller.remote(generation, *(me if here else (None, None)), grace_s))
        for name, keeper, here in keepers
    ]
    for name, ref in asked:
        answer(ref, name, "the run's actor there learns of this controller")


def ask_for_agent(keeper: Any, leader: Leader, grace_s: float) -> Any:
    """A reference on the address of another agent of that actor's."""
    return keeper.start_agent.remote(next(_orders), asdict(leader), grace_s)


def _why(name: str, error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any("ModuleNotFoundError" in line or "No module named" in line for line in lines):
        missing = next(line for line in lines if "No module named" in line or "ModuleNotFoundError" in line)
        return (
            f"{name} cannot import what a run needs ({missing}): install the same lockstep-rl there, in the Python "
            "that its Ray was started with"
        )
    return f"{name} cannot take part in the run: {last_line(error)}"
