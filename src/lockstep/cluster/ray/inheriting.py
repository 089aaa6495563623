"""What an earlier generation of a run has left on a Ray cluster: its actors, and the agents that they hold."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from lockstep.cluster.places import Held
from lockstep.cluster.ray import session
from lockstep.config.cluster import RayCluster as Config
from lockstep.watch.agent_client import Address, AgentClient, AgentError
from lockstep.watch.waits import WaitTimeout
from lockstep.watch.wire import WireError

log = logging.getLogger(__name__)

ASK_S = 20.0
RECORD = "ray.json"
"""Of the run's folder: where a later controller looks for what is left."""


@dataclass(frozen=True, slots=True)
class Left:
    """Of one node."""

    node: str
    """Its id."""
    keeper: Any
    found: Mapping[str, Any]
    agent: AgentClient


@dataclass(slots=True)
class RayHeritage:
    """What goes on. It has a session of its own, as handles of actors hold for one only: whoever takes it closes it."""

    run: str
    token: str
    left: list[Left] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


def take_over(config: Config, affairs: Path, generation: int) -> RayHeritage | None:
    """Goes on with what an earlier generation of the run has left, within its grace; ends what is of no use. None where
    nothing is left that a run can go on with.

    Raises:
        RayUnavailable: the cluster is not to be had.
    """
    try:
        run = str(json.loads((affairs / RECORD).read_text())["run"])
    except (OSError, ValueError, KeyError):
        return None
    session.open_session(config, 1, 0)
    heritage: RayHeritage | None = None
    try:
        heritage = None if session.has_own() else _found(config, run, generation)
    finally:
        if heritage is None:
            session.close_session()
    return heritage


def _found(config: Config, run: str, generation: int) -> RayHeritage | None:
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True) if each["namespace"] == run]
    here = ray.get_runtime_context().get_node_id()
    keepers = [(name.split("-")[1], ray.get_actor(name, namespace=run)) for name in names]
    heritage: RayHeritage | None = None
    for node, keeper in sorted(keepers, key=lambda item: item[0] != here):
        try:
            said = session.answer(keeper.heritage.remote(generation), node, "what is left there", timeout_s=ASK_S)
            found = session.answer(keeper.facts.remote(), node, "what it is like", timeout_s=ASK_S)
        except (ray.exceptions.RayError, WaitTimeout) as error:
            log.info("%s has nothing that is left: %s", node, error)
            continue
        if heritage is None and node == here:
            heritage = RayHeritage(run, said["token"])
        client = None if heritage is None or said["agent"] is None else _client(config, said, generation, node == here)
        if heritage is None or client is None:
            ray.kill(keeper)  # its agent goes with it, and what it has reserved
        else:
            heritage.held += [Held.from_json(each) for each in said["held"]]
            heritage.left.append(Left(node, keeper, found, client))
    return heritage if heritage is not None and heritage.left else None


def _client(config: Config, said: Mapping[str, Any], generation: int, here: bool) -> AgentClient | None:
    lost_after_s = None if here else config.node_lost_after_s
    try:
        client = AgentClient(Address(**said["agent"]), said["token"], generation=generation, lost_after_s=lost_after_s)
    except WireError as error:
        log.info("an agent cannot be taken over: %s", error)
        return None
    try:
        client.take_over(config.orphan_grace_s)
    except (AgentError, WaitTimeout) as error:
        log.info("an agent cannot be taken over: %s", error)
        client.close()
        return None
    return client
