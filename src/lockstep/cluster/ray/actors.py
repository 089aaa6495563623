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

from lockstep.base.network import PortRange
from lockstep.base.text import last_line
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.cluster_node import NodeRefused
from lockstep.cluster.node_versions import InstalledVersions, check_node_versions
from lockstep.cluster.placement.bundles import NodeResources
from lockstep.cluster.ray.node_actor import NodeActor, NodeActorArguments, connect_problem
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
    """An actor and its facts about its node."""

    actor: Any
    found: Mapping[str, Any]


def start_actors(nodes: Sequence[NodeResources], arguments: NodeActorArguments) -> list[StartedActor]:
    """Starts an actor on each node. Raises NodeRefused."""
    actor_class = ray.remote(NodeActor)
    node_actors: list[tuple[NodeResources, Any, Any]] = []
    found = []
    try:
        for node in nodes:
            options = actor_class.options(
                name=f"keeper-{node.id}-{secrets.token_hex(3)}", namespace=arguments.run, lifetime="detached",
                num_cpus=0, max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )  # fmt: skip
            actor = ray_call(partial(options.remote, arguments, node.name), f"creating the run's actor on {node.name}")
            node_actors.append((node, actor, actor.facts.remote()))
        for node, actor, facts in node_actors:
            try:
                found.append(StartedActor(actor, ray_get(facts, node.name, "Ray starts the run's actor there")))
            except ray.exceptions.RayError as error:
                raise NodeRefused(_refusal_message(node.name, error)) from error
    except BaseException:
        kill_actors(actor for _, actor, _ in node_actors)
        raise
    return found


def start_compatible_actors(
    nodes: Sequence[NodeResources],
    arguments: NodeActorArguments,
    known: Mapping[str, InstalledVersions],
    with_gpus: set[str],
) -> tuple[list[StartedActor], dict[str, InstalledVersions]]:
    """Starts actors on nodes whose versions are compatible with each other and with those of the run's other nodes
    (`known`: by name; `with_gpus`: names of those with GPUs); on all or on none. Returns them, and all versions.

    Raises:
        NodeRefused: a node cannot take part.
        VersionError: the nodes' versions are not compatible.
    """
    found = start_actors(nodes, arguments)
    versions = {**known, **{each.name: of.found["versions"] for each, of in zip(nodes, found, strict=True)}}
    gpus = with_gpus | {each.name for each in nodes if each.gpus}
    try:
        for warning in check_node_versions(versions, dict.fromkeys(versions, REQUIRED_PACKAGES), gpus):
            log.warning("%s", warning)
    except BaseException:
        kill_actors(of.actor for of in found)
        raise
    return found, versions


def kill_actors(node_actors: Iterable[Any]) -> None:
    """Kills actors of this controller that no other controller can have found."""
    for actor in node_actors:
        with contextlib.suppress(RayUnresponsive):
            ray_call(partial(ray.kill, actor), "killing an actor of the run")


def stop_actors(node_actors: Iterable[tuple[str, Any]], generation: int) -> None:
    """Stops actors (pairs of node name and actor) with their agents and reservations, except those of a later
    generation. An actor that does not respond ends by itself, since it gets no more requests."""
    refs = [(name, actor.leave.remote(generation)) for name, actor in node_actors]
    until = time.monotonic() + STOP_ACTORS_S
    for name, ref in refs:
        try:
            ray_get(ref, name, "the run's actor there ends", timeout_s=max(0.1, until - time.monotonic()))
        except Superseded as error:
            log.warning("the actor on %s stays: %s", name, error)
        except (ray.exceptions.RayError, WaitTimeout) as error:
            log.info("the actor on %s has not confirmed its end: %s", name, error)


def tie_to_controller(node_actors: Iterable[tuple[str, Any, bool]], generation: int, grace_s: float) -> None:
    """Makes actors end when this process has been gone for longer than the grace. Each is given as node name, actor,
    and whether it is on this host; actors on other hosts end with their agents.

    Raises:
        Superseded: a later generation has the run.
        WaitTimeout, Ray's errors: an actor does not respond.
    """
    pid = os.getpid()
    me = pid, processes.start_ticks(pid)
    refs = [
        (name, actor.watch_controller.remote(generation, *(me if here else (None, None)), grace_s))
        for name, actor, here in node_actors
    ]
    for name, ref in refs:
        ray_get(ref, name, "the run's actor there follows this controller")


def request_agent(actor: Any, leader: Leader, grace_s: float) -> Any:
    """Requests a new agent from an actor. Returns a reference to the agent's address."""
    return actor.start_agent.remote(next(_request_ids), asdict(leader), grace_s)


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
    """A port on which a process of the run listens."""

    what: str
    """The process, such as `the controller`."""
    node: str
    host: str
    port: int


def check_reachable_from_nodes(
    nodes: Sequence[tuple[str, Any]], listening: dict[str, tuple[str, int]], ports: PortRange | None
) -> None:
    """Checks that every node (name and actor) reaches the ports of this host (addresses by process).

    Raises:
        NodeRefused: a node does not reach a port.
        WaitTimeout, Ray's errors: its actor does not respond.
    """
    listeners = [ListeningPort(what, socket.gethostname(), *where) for what, where in listening.items()]
    refs = [
        (name, actor.dial.remote([(listener.host, listener.port) for listener in listeners])) for name, actor in nodes
    ]
    for name, ref in refs:
        for listener, why in zip(
            listeners, ray_get(ref, name, "whether it reaches this host", REACHABILITY_S), strict=True
        ):
            if why is not None:
                raise _unreachable_error(name, listener, why, ports)


def check_reachable_from_here(listener: ListeningPort, ports: PortRange | None) -> None:
    """Checks that this host reaches a port of a node. Raises NodeRefused."""
    why = connect_problem(listener.host, listener.port)
    if why is not None:
        raise _unreachable_error(socket.gethostname(), listener, why, ports)


def _unreachable_error(who: str, listener: ListeningPort, why: str, ports: PortRange | None) -> NodeRefused:
    what = "it, or ports set in cluster.ports," if ports is None else f"{ports[0]} to {ports[1]} (cluster.ports)"
    return NodeRefused(
        f"{who} cannot reach port {listener.port} of {listener.node} ({listener.host}), where {listener.what} listens "
        f"({why}): open {what} between all nodes of the run"
    )
