"""Takes over the node actors that an earlier controller of a run left on a Ray cluster, and the file that records
them.
"""

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

from lockstep.base.bounded_wait import WaitTimeout
from lockstep.base.folders import write_atomically
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
"""Of the run's folder: where a later controller looks for what is left."""


@dataclass(frozen=True, slots=True)
class PlacedResources:
    """What a run was placed for."""

    processes: dict[str, list[float]] = field(default_factory=dict)
    """CPUs and GPUs by name."""
    placement: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(wanted: Sequence[ProcessRequest], placement: PlacementConfig) -> "PlacedResources":
        return PlacedResources(
            {each.name: [each.cpus, each.gpus] for each in wanted}, placement.model_dump(mode="json")
        )

    def difference(self, earlier: "PlacedResources") -> str | None:
        """For people; None where the places of one do for the other."""
        mine, before = self.processes, earlier.processes
        for what, names in (
            ("has also", [name for name in mine if name not in before]),
            ("has no more", [name for name in before if name not in mine]),
            ("has other CPUs or GPUs for", [name for name in mine if name in before and mine[name] != before[name]]),
        ):
            if names:
                return f"the run {what} {abbreviate_names(names)}"
        return None if self.placement == earlier.placement else "its placement is another one"


@dataclass(frozen=True, slots=True)
class RayRunState:
    """Which generation was the last to have the run, under which name it is on the cluster, and for what."""

    generation: int = 0
    run: str | None = None
    """None where nothing is left there."""
    needs: PlacedResources = PlacedResources()

    def write(self, affairs: Path) -> None:
        affairs.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(affairs / STATE_FILE, json.dumps(asdict(self)).encode())

    @staticmethod
    def read(affairs: Path) -> "RayRunState":
        """Of generation 0 where nobody wrote one."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            said = json.loads((affairs / STATE_FILE).read_text())
            return RayRunState(said["generation"], said["run"], PlacedResources(**said["needs"]))
        return RayRunState()


log = logging.getLogger(__name__)

ACTOR_REPLY_S = 20.0


@dataclass(frozen=True, slots=True)
class InheritedNode:
    """Of one node."""

    node: str
    """Its id."""
    keeper: Any
    found: Mapping[str, Any]
    agent: AgentClient | None
    """None where it has ended, and its workers with it."""


@dataclass(frozen=True, slots=True)
class InheritedRayNodes:
    """What goes on. It has a session of its own, as handles of actors hold for one only: whoever takes it closes it."""

    run: str
    token: str
    left: list[InheritedNode]
    """The controller's own node first."""
    held: list[Reservation]


@dataclass(frozen=True, slots=True)
class _FoundActor:
    """An actor that answers."""

    node: str
    keeper: Any
    said: Mapping[str, Any]
    found: Mapping[str, Any]
    near: bool
    """Whether it is on this process's own node."""

    @property
    def host(self) -> str:
        return str(self.found["host"])

    @property
    def here(self) -> bool:
        """Whether pids of its host are ours to see."""
        return self.near and bool(self.found["place"] == processes.pid_namespace())


def take_over_ray_actors(
    config: Config, affairs: Path, generation: int, wanted: Sequence[ProcessRequest], placement: PlacementConfig
) -> InheritedRayNodes | None:
    """Goes on with what an earlier generation of the run has left, within its grace. None where nothing is left that a
    run of these processes can go on with; what there is of it has been ended then.

    Raises:
        RayUnavailable: the cluster is not to be had.
        Superseded: a later generation has the run.
    """
    record = RayRunState.read(affairs)
    run = record.run
    if run is None:
        return None
    if not (config.address or os.environ.get("RAY_ADDRESS")):
        log.warning("what %s may have left on a Ray cluster ends by itself: this start names none", run)
        return None
    ray_session.open_session(config, 1, 0)
    heritage: InheritedRayNodes | None = None
    try:
        if not ray_session.has_private_ray():
            difference = PlacedResources.of(wanted, placement).difference(record.needs)
            heritage = _adopt_actors(config, run, generation, difference)
    finally:
        if heritage is None:
            ray_session.close_session()
    return heritage


def _adopt_actors(config: Config, run: str, generation: int, difference: str | None) -> InheritedRayNodes | None:
    """Args: `difference`, of what the run needs now from what it was placed for; None where there is none."""
    remnants, late = _find_actors(run, generation)
    if not remnants and not late:
        return None
    try:
        _check_usable(remnants, late, difference)
        tie_to_controller([(each.host, each.keeper, each.here) for each in remnants], generation, config.orphan_grace_s)
    except Superseded:
        raise
    except (_Unusable, ray.exceptions.RayError, WaitTimeout) as error:
        log.warning("nothing of what is left of %s goes on, and all starts anew: %s", run, error)
        stop_actors([*((each.host, each.keeper) for each in remnants), *late], generation)
        return None
    left = [
        InheritedNode(each.node, each.keeper, each.found, _adopt_actor_agent(config, each, generation))
        for each in remnants
    ]
    held = [Reservation.from_json(each) for remnant in remnants for each in remnant.said["held"]]
    return InheritedRayNodes(run, str(remnants[0].said["token"]), left, held)


def _find_actors(run: str, generation: int) -> tuple[list[_FoundActor], list[tuple[str, Any]]]:
    """Actors that answer, this host's first, and those that do not, with their nodes. From here on they refuse earlier
    generations."""
    named = ray_call(lambda: ray.util.list_named_actors(all_namespaces=True), "what is left of the run")
    names = [each["name"] for each in named if each["namespace"] == run]
    files, here = imported_files(), ray.get_runtime_context().get_node_id()
    asked = []
    for name in names:
        try:
            keeper = ray_call(partial(ray.get_actor, name, run), "what is left there")
        except ValueError:  # it has ended meanwhile
            continue
        asked.append((name.split("-")[1], keeper, keeper.heritage.remote(generation, files), keeper.facts.remote()))
    remnants: list[_FoundActor] = []
    late: list[tuple[str, Any]] = []
    for node, keeper, said, found in asked:
        try:
            what = ray_session.ray_get(said, node, "what is left there", timeout_s=ACTOR_REPLY_S)
            like = ray_session.ray_get(found, node, "what it is like", timeout_s=ACTOR_REPLY_S)
        except Superseded:
            raise
        except ray.exceptions.RayError as error:
            log.info("%s has nothing that is left: %s", node, error)
            continue
        except WaitTimeout:
            late.append((node, keeper))
            continue
        remnants.append(_FoundActor(node, keeper, what, like, node == here))
    return sorted(remnants, key=lambda each: not each.near), late


class _Unusable(Exception):
    """Why a run cannot go on with what is left."""


def _check_usable(remnants: Sequence[_FoundActor], late: Sequence[tuple[str, Any]], difference: str | None) -> None:
    """Raises _Unusable."""
    if difference is not None:
        raise _Unusable(difference)
    if late:  # it may come back at any time, and with it workers in places that others have then
        raise _Unusable(f"node {late[0][0]} does not answer, and is not lost yet")
    if not remnants[0].near:
        raise _Unusable("this host, where it is resumed, has nothing of it")
    if not any(each.said["agent"] for each in remnants):
        raise _Unusable("all its agents have ended")
    for each in remnants:
        if each.said["changed"] is not None:
            raise _Unusable(f"{each.said['changed']} of {each.host} has changed since the run was last started")


def _adopt_actor_agent(config: Config, remnant: _FoundActor, generation: int) -> AgentClient | None:
    if remnant.said["agent"] is None:
        return None
    address, token = ServiceAddress(**remnant.said["agent"]), str(remnant.said["token"])
    lost_after_s = None if remnant.here else config.node_lost_after_s
    return adopt_agent(address, token, generation, config.orphan_grace_s, lost_after_s)
