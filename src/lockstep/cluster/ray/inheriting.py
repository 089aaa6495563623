"""What an earlier generation of a run has left on a Ray cluster: its actors, and the agents that they hold."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray

from lockstep.cluster.bundles import Wanted
from lockstep.cluster.freshness import imported
from lockstep.cluster.places import Held
from lockstep.cluster.predecessor import go_on_with
from lockstep.cluster.ray import session
from lockstep.cluster.ray.asking import ask
from lockstep.cluster.ray.employing import be_watched, send_away
from lockstep.cluster.ray.record import Needs, Record
from lockstep.config.cluster import RayCluster as Config
from lockstep.config.placement import Placement
from lockstep.watch import procs
from lockstep.watch.agent_client import Address, AgentClient
from lockstep.watch.leader import Superseded
from lockstep.watch.waits import WaitTimeout

log = logging.getLogger(__name__)

ASK_S = 20.0


@dataclass(frozen=True, slots=True)
class Left:
    """Of one node."""

    node: str
    """Its id."""
    keeper: Any
    found: Mapping[str, Any]
    agent: AgentClient | None
    """None where it has ended, and its workers with it."""


@dataclass(frozen=True, slots=True)
class RayHeritage:
    """What goes on. It has a session of its own, as handles of actors hold for one only: whoever takes it closes it."""

    run: str
    token: str
    left: list[Left]
    """The controller's own node first."""
    held: list[Held]


@dataclass(frozen=True, slots=True)
class _Remnant:
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
        return self.near and bool(self.found["place"] == procs.place())


def take_over(
    config: Config, affairs: Path, generation: int, wanted: Sequence[Wanted], placement: Placement
) -> RayHeritage | None:
    """Goes on with what an earlier generation of the run has left, within its grace. None where nothing is left that a
    run of these processes can go on with; what there is of it has been ended then.

    Raises:
        RayUnavailable: the cluster is not to be had.
        Superseded: a later generation has the run.
    """
    record = Record.read(affairs)
    run = record.run
    if run is None:
        return None
    if not (config.address or os.environ.get("RAY_ADDRESS")):
        log.warning("what %s may have left on a Ray cluster ends by itself: this start names none", run)
        return None
    session.open_session(config, 1, 0)
    heritage: RayHeritage | None = None
    try:
        if not session.has_own():
            difference = Needs.of(wanted, placement).difference(record.needs)
            heritage = _taken(config, run, generation, difference)
    finally:
        if heritage is None:
            session.close_session()
    return heritage


def _taken(config: Config, run: str, generation: int, difference: str | None) -> RayHeritage | None:
    """Args: `difference`, of what the run needs now from what it was placed for; None where there is none."""
    remnants, late = _remnants(run, generation)
    if not remnants and not late:
        return None
    try:
        _must_be_usable(remnants, late, difference)
        be_watched([(each.host, each.keeper, each.here) for each in remnants], generation, config.orphan_grace_s)
    except Superseded:
        raise
    except (_Unusable, ray.exceptions.RayError, WaitTimeout) as error:
        log.warning("nothing of what is left of %s goes on, and all starts anew: %s", run, error)
        send_away([*((each.host, each.keeper) for each in remnants), *late], generation)
        return None
    left = [Left(each.node, each.keeper, each.found, _client(config, each, generation)) for each in remnants]
    held = [Held.from_json(each) for remnant in remnants for each in remnant.said["held"]]
    return RayHeritage(run, str(remnants[0].said["token"]), left, held)


def _remnants(run: str, generation: int) -> tuple[list[_Remnant], list[tuple[str, Any]]]:
    """Actors that answer, this host's first, and those that do not, with their nodes. From here on they refuse earlier
    generations."""
    named = ask(lambda: ray.util.list_named_actors(all_namespaces=True), "what is left of the run")
    names = [each["name"] for each in named if each["namespace"] == run]
    files, here = imported(), ray.get_runtime_context().get_node_id()
    asked = []
    for name in names:
        try:
            keeper = ask(partial(ray.get_actor, name, run), "what is left there")
        except ValueError:  # it has ended meanwhile
            continue
        asked.append((name.split("-")[1], keeper, keeper.heritage.remote(generation, files), keeper.facts.remote()))
    remnants: list[_Remnant] = []
    late: list[tuple[str, Any]] = []
    for node, keeper, said, found in asked:
        try:
            what = session.answer(said, node, "what is left there", timeout_s=ASK_S)
            like = session.answer(found, node, "what it is like", timeout_s=ASK_S)
        except Superseded:
            raise
        except ray.exceptions.RayError as error:
            log.info("%s has nothing that is left: %s", node, error)
            continue
        except WaitTimeout:
            late.append((node, keeper))
            continue
        remnants.append(_Remnant(node, keeper, what, like, node == here))
    return sorted(remnants, key=lambda each: not each.near), late


class _Unusable(Exception):
    """Why a run cannot go on with what is left."""


def _must_be_usable(remnants: Sequence[_Remnant], late: Sequence[tuple[str, Any]], difference: str | None) -> None:
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


def _client(config: Config, remnant: _Remnant, generation: int) -> AgentClient | None:
    if remnant.said["agent"] is None:
        return None
    address, token = Address(**remnant.said["agent"]), str(remnant.said["token"])
    lost_after_s = None if remnant.here else config.node_lost_after_s
    return go_on_with(address, token, generation, config.orphan_grace_s, lost_after_s)
