"""Takes over the node actors that an earlier controller of a run left on a Ray cluster; the state file names them."""

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray

from lockstep.base.folders import make_folder, write_atomically
from lockstep.base.json_text import read_json
from lockstep.base.transport.run_token import uses_tls
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.node_versions import imported_files
from lockstep.cluster.placement.bundles import ProcessRequest, abbreviate_names
from lockstep.cluster.placement.reservations import Reservation
from lockstep.cluster.ray import ray_session
from lockstep.cluster.ray.actors import stop_actors, tie_to_controller
from lockstep.cluster.ray.ray_session import ray_call
from lockstep.cluster.reattach import adopt_agent
from lockstep.config.cluster import PlacementConfig
from lockstep.config.cluster import RayClusterConfig as Config
from lockstep.watch.agent.agent_client import AgentClient
from lockstep.watch.agent.service_discovery import ServiceAddress, Superseded
from lockstep.watch.procfs import processes

STATE_FILE = "ray.json"
"""File in the run's folder that tells a later controller which processes may be left."""


@dataclass(frozen=True, slots=True)
class PlacedResources:
    """The processes and the placement that resources were reserved for."""

    processes: dict[str, list[float]] = field(default_factory=dict)
    """CPUs and GPUs of each process, by name."""
    placement: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(requests: Sequence[ProcessRequest], placement: PlacementConfig) -> "PlacedResources":
        return PlacedResources(
            {each.name: [each.cpus, each.gpus] for each in requests}, placement.model_dump(mode="json")
        )

    def difference(self, earlier: "PlacedResources") -> str | None:
        """The difference, for people; None if the reservations of one serve the other."""
        mine, before = self.processes, earlier.processes
        for what, names in (
            ("also has", [name for name in mine if name not in before]),
            ("no longer has", [name for name in before if name not in mine]),
            (
                "has different CPUs or GPUs for",
                [name for name in mine if name in before and mine[name] != before[name]],
            ),
        ):
            if names:
                return f"the run {what} {abbreviate_names(names)}"
        return None if self.placement == earlier.placement else "its placement has changed"


@dataclass(frozen=True, slots=True)
class RayRunState:
    """The latest generation of the run, its name on the cluster, and what was reserved for it."""

    generation: int = 0
    run: str | None = None
    """Run id on the cluster; None if nothing is left there."""
    needs: PlacedResources = PlacedResources()

    def write(self, cluster_dir: Path) -> None:
        make_folder(cluster_dir)
        write_atomically(cluster_dir / STATE_FILE, json.dumps(asdict(self)).encode())

    @staticmethod
    def read(cluster_dir: Path) -> "RayRunState":
        """Reads the state file; returns generation 0 if there is no readable one."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            state = read_json(cluster_dir / STATE_FILE)
            return RayRunState(state["generation"], state["run"], PlacedResources(**state["needs"]))
        return RayRunState()


log = logging.getLogger(__name__)

ACTOR_REPLY_S = 20.0


@dataclass(frozen=True, slots=True)
class InheritedNode:
    """A node of the earlier generation."""

    node: str
    """Id of the node."""
    actor: Any
    found: Mapping[str, Any]
    agent: AgentClient | None
    """The node's agent; None if it has ended, and its workers with it."""


@dataclass(frozen=True, slots=True)
class InheritedRayNodes:
    """The usable nodes of the earlier generation, with an open session to Ray, which the new owner closes."""

    run: str
    token: str
    left: list[InheritedNode]
    """The controller's node comes first."""
    held: list[Reservation]


@dataclass(frozen=True, slots=True)
class _FoundActor:
    """An actor that responds."""

    node: str
    actor: Any
    state: Mapping[str, Any]
    found: Mapping[str, Any]
    near: bool
    """Whether it is on this process's node."""

    @property
    def host(self) -> str:
        return str(self.found["host"])

    @property
    def here(self) -> bool:
        """Whether this process sees the host's pids."""
        return self.near and bool(self.found["place"] == processes.pid_namespace())


def take_over_ray_actors(
    config: Config, cluster_dir: Path, generation: int, requests: Sequence[ProcessRequest], placement: PlacementConfig
) -> InheritedRayNodes | None:
    """Takes over the actors that an earlier generation of the run left behind, within the grace period. Returns None if
    these processes cannot use them; then the actors have been stopped.

    Raises:
        RayUnavailable: the cluster is not available.
        Superseded: a later generation has the run.
    """
    record = RayRunState.read(cluster_dir)
    run = record.run
    if run is None:
        return None
    if not (config.address or os.environ.get("RAY_ADDRESS")):
        log.warning(
            "actors of %s may be left on a Ray cluster, which this start does not name; they end by themselves", run
        )
        return None
    ray_session.open_session(config, 1, 0)
    inherited: InheritedRayNodes | None = None
    try:
        if not ray_session.has_private_ray():
            difference = PlacedResources.of(requests, placement).difference(record.needs)
            inherited = _adopt_actors(config, run, cluster_dir.parent.absolute(), generation, difference)
    finally:
        if inherited is None:
            ray_session.close_session()
    return inherited


def _adopt_actors(
    config: Config, run: str, folder: Path, generation: int, difference: str | None
) -> InheritedRayNodes | None:
    """`difference`: between the run's needs and its reservations; None if there is none."""
    found_actors, late = _find_actors(run, folder, generation)
    if not found_actors and not late:
        return None
    try:
        _check_usable(found_actors, late, difference, config.tls)
        tie_to_controller(
            [(each.host, each.actor, each.here) for each in found_actors], generation, config.orphan_grace_s
        )
    except Superseded:
        raise
    except (_Unusable, ray.exceptions.RayError, WaitTimeout) as error:
        log.warning("cannot reuse what is left of %s, starting anew: %s", run, error)
        stop_actors([*((each.host, each.actor) for each in found_actors), *late], generation)
        return None
    left = [
        InheritedNode(each.node, each.actor, each.found, _adopt_actor_agent(config, each, generation))
        for each in found_actors
    ]
    held = [Reservation.from_json(each) for found_actor in found_actors for each in found_actor.state["held"]]
    return InheritedRayNodes(run, str(found_actors[0].state["token"]), left, held)


def _find_actors(run: str, folder: Path, generation: int) -> tuple[list[_FoundActor], list[tuple[str, Any]]]:
    """Returns the actors that respond, this host's first, and those that do not, with their nodes. From now on, all
    refuse requests of earlier generations. Leaves out the actors of a run with another folder: then the state file is a
    copy, or somebody wrote it to have them stopped."""
    named = ray_call(lambda: ray.util.list_named_actors(all_namespaces=True), "finding the run's actors")
    names = [each["name"] for each in named if each["namespace"] == run]
    files, here = imported_files(), ray.get_runtime_context().get_node_id()
    asked = []
    for name in names:
        try:
            actor = ray_call(partial(ray.get_actor, name, run), "finding one of the run's actors")
        except ValueError:  # it has ended in the meantime
            continue
        asked.append((name.split("-")[1], actor, actor.facts.remote()))
    described, late = _collect_replies(asked, "the facts about it")
    found: dict[Any, Mapping[str, Any]] = {}
    asked = []
    for node, actor, facts in described:
        if facts.get("folder") == str(folder):
            found[actor] = facts
            asked.append((node, actor, actor.hand_over.remote(generation, files)))
        else:
            log.warning(
                "an actor of %s on %s belongs to a run in another folder, not %s: left alone", run, node, folder
            )
    states, silent = _collect_replies(asked, "what is left there")
    found_actors = [_FoundActor(node, actor, state, found[actor], node == here) for node, actor, state in states]
    return sorted(found_actors, key=lambda each: not each.near), [*late, *silent]


def _collect_replies(
    asked: Sequence[tuple[str, Any, Any]], why: str
) -> tuple[list[tuple[str, Any, Mapping[str, Any]]], list[tuple[str, Any]]]:
    """Collects the replies to calls, given as (node, actor, reference). Returns (node, actor, reply) of the actors that
    reply, and the others that may still be alive."""
    replies: list[tuple[str, Any, Mapping[str, Any]]] = []
    late: list[tuple[str, Any]] = []
    for node, actor, ref in asked:
        try:
            replies.append((node, actor, ray_session.ray_get(ref, node, why, timeout_s=ACTOR_REPLY_S)))
        except Superseded:
            raise
        except ray.exceptions.RayError as error:
            log.info("nothing is left on %s: %s", node, error)
        except WaitTimeout:
            late.append((node, actor))
    return replies, late


class _Unusable(Exception):
    """The run cannot reuse the actors that are left. Says why."""


def _check_usable(
    found_actors: Sequence[_FoundActor], late: Sequence[tuple[str, Any]], difference: str | None, tls: bool
) -> None:
    """Raises _Unusable if the run cannot reuse the actors."""
    if difference is not None:
        raise _Unusable(difference)
    if late:  # it may recover at any time, when other workers use the resources of its workers
        raise _Unusable(f"node {late[0][0]} does not respond, and is not lost yet")
    if not found_actors[0].near:
        raise _Unusable("the run is resumed on another host, which has no agent of it")
    if not any(each.state["agent"] for each in found_actors):
        raise _Unusable("all its agents have ended")
    if uses_tls(str(found_actors[0].state["token"])) != tls:
        raise _Unusable("cluster.tls has changed since the run was last started")
    for each in found_actors:
        if each.state["changed"] is not None:
            raise _Unusable(f"{each.state['changed']} of {each.host} has changed since the run was last started")


def _adopt_actor_agent(config: Config, found_actor: _FoundActor, generation: int) -> AgentClient | None:
    if found_actor.state["agent"] is None:
        return None
    address, token = ServiceAddress(**found_actor.state["agent"]), str(found_actor.state["token"])
    lost_after_s = None if found_actor.here else config.node_lost_after_s
    return adopt_agent(address, token, generation, config.orphan_grace_s, lost_after_s)
