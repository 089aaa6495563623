"""Starts and stops the node actors of a run, and checks that nodes and controller reach each other's ports."""

import contextlib
import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lockstep.base.bounded_wait import WaitTimeout
from lockstep.base.network import PortRange
from lockstep.base.text import last_line
from lockstep.cluster.cluster_node import NodeRefused
from lockstep.cluster.node_versions import InstalledVersions, check_node_versions
from lockstep.cluster.placement.bundles import NodeResources
from lockstep.cluster.ray.node_actor import NodeActor, RunSite, connect_problem
from lockstep.cluster.ray.ray_session import RayUnresponsive, ray_call, ray_get
from lockstep.watch.agent.service_discovery import Leader, Superseded
from lockstep.watch.procfs import processes

log = logging.getLogger(__name__)

REQUIRED_PACKAGES = ("python", "ray", "torch")
"""Packages that every node must have."""
STOP_ACTORS_S = 15.0

_request_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class StartedActor:
    """An actor, and what it says of its node."""

    keeper: Any
    found: Mapping[str, Any]


def start_actors(nodes: Sequence[NodeResources], site: RunSite) -> list[StartedActor]:
    """One actor for each node. Raises NodeRefused."""
    actor = ray.remote(NodeActor)
    keepers: list[tuple[NodeResources, Any, Any]] = []
    found = []
    try:
        for node in nodes:
            employed = actor.options(
                name=f"keeper-{node.id}-{secrets.token_hex(3)}", namespace=site.run, lifetime="detached",
                num_cpus=0, max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )  # fmt: skip
            keeper = ray_call(partial(employed.remote, site, node.name), f"the run's actor on {node.name} is made")
            keepers.append((node, keeper, keeper.facts.remote()))
        for node, keeper, facts in keepers:
            try:
                found.append(StartedActor(keeper, ray_get(facts, node.name, "Ray starts the run's actor there")))
            except ray.exceptions.RayError as error:
                raise NodeRefused(_refusal_message(node.name, error)) from error
    except BaseException:
        kill_actors(keeper for _, keeper, _ in keepers)
        raise
    return found


def start_compatible_actors(
    nodes: Sequence[NodeResources], site: RunSite, known: Mapping[str, InstalledVersions], with_gpus: set[str]
) -> tuple[list[StartedActor], dict[str, InstalledVersions]]:
    """Actors on nodes that fit together, also with those that are there already (`known`: their versions, by name;
    `with_gpus`: those of them that have some), and the versions of all. Nothing is left where they do not.

    Raises:
        NodeRefused: one cannot take part.
        VersionError: what is installed there does not go together.
    """
    found = start_actors(nodes, site)
    versions = {**known, **{each.name: of.found["versions"] for each, of in zip(nodes, found, strict=True)}}
    gpus = with_gpus | {each.name for each in nodes if each.gpus}
    try:
        for warning in check_node_versions(versions, dict.fromkeys(versions, REQUIRED_PACKAGES), gpus):
            log.warning("%s", warning)
    except BaseException:
        kill_actors(of.keeper for of in found)
        raise
    return found, versions


def kill_actors(keepers: Iterable[Any]) -> None:
    """Ends actors of this controller's that nobody else can have found."""
    for keeper in keepers:
        with contextlib.suppress(RayUnresponsive):
            ray_call(partial(ray.kill, keeper), "an actor of the run is ended")


def stop_actors(keepers: Iterable[tuple[str, Any]], generation: int) -> None:
    """Ends actors, each with the name of its node before it, with their agents and what they have reserved; but for
    those that a later generation has. Who does not answer ends by itself, as nobody asks for it any more."""
    asked = [(name, keeper.leave.remote(generation)) for name, keeper in keepers]
    until = time.monotonic() + STOP_ACTORS_S
    for name, ref in asked:
        try:
            ray_get(ref, name, "the run's actor there ends", timeout_s=max(0.1, until - time.monotonic()))
        except Superseded as error:
            log.warning("what %s has there stays: %s", name, error)
        except (ray.exceptions.RayError, WaitTimeout) as error:
            log.info("%s does not say that its actor ends: %s", name, error)


def tie_to_controller(keepers: Iterable[tuple[str, Any, bool]], generation: int, grace_s: float) -> None:
    """Has actors, each with the name of its node before it and whether that is this host after it, live as long as this
    process, and so much longer; those elsewhere as long as their agent does.

    Raises:
        Superseded: a later generation has the run.
        WaitTimeout, ray's errors: one does not answer.
    """
    pid = os.getpid()
    me = pid, processes.start_ticks(pid)
    asked = [
        (name, keeper.watch_controller.remote(generation, *(me if here else (None, None)), grace_s))
        for name, keeper, here in keepers
    ]
    for name, ref in asked:
        ray_get(ref, name, "the run's actor there learns of this controller")


def request_agent(keeper: Any, leader: Leader, grace_s: float) -> Any:
    """A reference on the address of another agent of that actor's."""
    return keeper.start_agent.remote(next(_request_ids), asdict(leader), grace_s)


def _refusal_message(name: str, error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if any("ModuleNotFoundError" in line or "No module named" in line for line in lines):
        missing = next(line for line in lines if "No module named" in line or "ModuleNotFoundError" in line)
        return (
            f"{name} cannot import what a run needs ({missing}): install the same lockstep-rl there, in the Python "
            "that its Ray was started with"
        )
    return f"{name} cannot take part in the run: {last_line(error)}"


REACHABILITY_S = 60.0


@dataclass(frozen=True, slots=True)
class ListeningPort:
    """A port on which somebody of a run listens."""

    what: str
    """Who does: `the controller`."""
    node: str
    host: str
    port: int


def check_reachable_from_nodes(
    nodes: Sequence[tuple[str, Any]], listening: dict[str, tuple[str, int]], ports: PortRange | None
) -> None:
    """Every node, by its name and its actor, to where this host listens, by who does.

    Raises:
        NodeRefused: one does not.
        WaitTimeout, ray's errors: its actor does not answer.
    """
    doors = [ListeningPort(what, socket.gethostname(), *where) for what, where in listening.items()]
    asked = [(name, keeper.dial.remote([(door.host, door.port) for door in doors])) for name, keeper in nodes]
    for name, ref in asked:
        for door, why in zip(doors, ray_get(ref, name, "whether it gets to this host", REACHABILITY_S), strict=True):
            if why is not None:
                raise _unreachable_error(name, door, why, ports)


def check_reachable_from_here(door: ListeningPort, ports: PortRange | None) -> None:
    """This host, to where a node listens. Raises NodeRefused."""
    why = connect_problem(door.host, door.port)
    if why is not None:
        raise _unreachable_error(socket.gethostname(), door, why, ports)


def _unreachable_error(who: str, door: ListeningPort, why: str, ports: PortRange | None) -> NodeRefused:
    what = "it, or ports that cluster.ports names," if ports is None else f"{ports[0]} to {ports[1]} (cluster.ports)"
    return NodeRefused(
        f"{who} does not get to port {door.port} of {door.node} ({door.host}), where {door.what} listens ({why}): "
        f"open {what} between all nodes of the run"
    )
