"""The processes of a run on the nodes of a Ray cluster."""

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from lockstep.base import waits
from lockstep.base.folders import run_shm_dir
from lockstep.base.network import LOOPBACK
from lockstep.base.text import first_line
from lockstep.base.transport.frames import WireError
from lockstep.base.transport.run_token import new_run_token
from lockstep.base.wait_state import WaitTimeout
from lockstep.cluster.agent_cluster import CLOSE_GRACE_S
from lockstep.cluster.cluster_node import ClusterNode, NodeRefused, RayNode, private_ray_environment
from lockstep.cluster.node_network import UnreachableAddress, check_node_addresses
from lockstep.cluster.node_versions import InstalledVersions, VersionError
from lockstep.cluster.placed_cluster import PlacedCluster
from lockstep.cluster.placement.assignment import Assignment
from lockstep.cluster.placement.bundles import NodeResources, PlacementError, ProcessRequest, total_gpus
from lockstep.cluster.placement.reservations import Reservation
from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.ray import actors, ray_session
from lockstep.cluster.ray.actors import (
    ListeningPort,
    StartedActor,
    check_reachable_from_here,
    check_reachable_from_nodes,
)
from lockstep.cluster.ray.node_actor import NodeActorArguments
from lockstep.cluster.ray.placement_groups import remove_group, reserve_groups
from lockstep.cluster.ray.ray_nodes import alive_nodes, controller_address, is_node_alive
from lockstep.cluster.ray.ray_reattach import InheritedRayNodes, PlacedResources, RayRunState
from lockstep.cluster.ray.ray_session import RayUnresponsive
from lockstep.cluster.worker_environment import forward_environment, report_environment
from lockstep.config.cluster import PlacementConfig
from lockstep.config.cluster import RayClusterConfig as Config
from lockstep.watch.agent.agent_client import AgentClient, AgentError, AgentGone
from lockstep.watch.agent.service_discovery import Leader, ServiceAddress, Superseded
from lockstep.watch.procfs import processes

log = logging.getLogger(__name__)


def stop_agents(agents: Iterable[AgentClient]) -> None:
    """Stops agents and their workers side by side. Returns when all have ended, or after a limit."""
    leaving = [threading.Thread(target=_stop_agent, args=[agent], name="leave", daemon=True) for agent in agents]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        with contextlib.suppress(WaitTimeout):
            waits.join(thread, waits_for="agents", why="their exit", timeout_s=CLOSE_GRACE_S + 30.0)


def _stop_agent(agent: AgentClient) -> None:
    with contextlib.suppress(AgentError, WaitTimeout):
        remaining = agent.shut_down(CLOSE_GRACE_S)
        if remaining:
            log.error("still running after SIGKILL: %s", ", ".join(remaining))


REFUSAL_ERRORS = (
    PlacementError, NodeRefused, VersionError, UnreachableAddress, AgentError, WaitTimeout, WireError,
    RayUnresponsive, ray.exceptions.RayError,
)  # fmt: skip


class RayCluster(PlacedCluster):
    """The processes of one run on the nodes of a Ray cluster.

    Ray lists the nodes, reserves what `requests` needs, and starts an actor on each node. The actor starts the node's
    agent, and everything else goes through the agents.

    Args:
        requests: the run's processes with the resources they need. Other processes reserve nothing and run on the node
            with the fewest processes.
        token, inherited: as in LocalCluster.

    Raises:
        RayUnavailable: Ray is not available.
        PlacementError, DoesNotFit: the nodes cannot hold the run.
        WaitTimeout: other runs did not release the nodes within `busy_limit_s`.
        NodeRefused, UnreachableAddress, VersionError: a node cannot take part.
        AgentError, Superseded: as in LocalCluster.
    """

    unavailable_errors = REFUSAL_ERRORS

    def __init__(
        self,
        config: Config,
        run: str,
        folder: Path,
        generation: int,
        token: str | None = None,
        inherited: InheritedRayNodes | None = None,
        requests: Sequence[ProcessRequest] = (),
        placement: PlacementConfig | None = None,
    ) -> None:
        self._config, placement = config, placement or PlacementConfig()
        self._needs, self.ports = PlacedResources.of(requests, placement), config.ports
        self._versions: dict[str, InstalledVersions] = {}
        """By name, for the run's nodes."""
        self._open = False
        cpus = max(sum(each.cpus for each in requests), os.cpu_count() or 1)
        ray_session.open_session(config, cpus, total_gpus(requests, placement))
        self._open = True
        if inherited is not None:
            ray_session.close_session()  # the inherited session; the one opened above replaces it
        try:
            facts = alive_nodes()
            host = LOOPBACK if ray_session.has_private_ray() else controller_address(facts, config)
            token = token or (new_run_token(config.tls) if inherited is None else inherited.token)
            held = [] if inherited is None else inherited.held
            several = not ray_session.has_private_ray()  # nodes may join a cluster that is one host today
            super().__init__(config, run, folder, generation, token, host, requests, placement, held, several)
        except BaseException:
            ray_session.close_session()
            raise
        try:
            self._given = private_ray_environment(config.env) if ray_session.has_private_ray() else forward_environment(
                os.environ, config.forward_env, config.env, config.interface
            )  # fmt: skip
            peer = None if ray_session.has_private_ray() else facts[0].address
            where = str(self._folder), self._cluster_dir, peer, config.interface
            self._site = NodeActorArguments.of(run, token, *where, peer is not None and len(facts) > 1, config.ports)
            if inherited is None:
                self._begin()
            else:
                self._inherit(inherited, facts)
            if not ray_session.has_private_ray():
                anybody = WorkerSpec("any", "", 0, "")
                environments = {node.info.name: node.environment_of(anybody) for node in self._nodes}
                report_environment(config.env, self._given, environments, self._cluster_dir / "environment.json")
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Starts with nothing left of an earlier generation."""
        self._publish_leader()
        self._write_state()
        self._reserve_for_all()

    def _inherit(self, inherited: InheritedRayNodes, facts: Sequence[NodeResources]) -> None:
        self._write_state()
        known = {each.id: each for each in facts}
        for left in inherited.left:  # the controller's own node comes first
            if left.agent is not None:
                left.agent.on_exit = self._exited
            if left.node in known:  # the node is not lost
                heir = self._node(known[left.node], StartedActor(left.actor, left.found))
                heir.agent = left.agent
                self._nodes.append(heir)
        self._versions = {node.info.name: node.facts["versions"] for node in self._ray_nodes}
        self._publish_leader()
        for node in self._ray_nodes:
            if node.agent is None:
                self._restart_agent(node)
                continue
            with contextlib.suppress(AgentGone):
                self._orphans.add(node, node.agent.list())
                node.agent.publish_leader(self._leader(node.is_local))
        self._save_reservations()

    # --- nodes

    @property
    def _ray_nodes(self) -> list[RayNode]:
        """All nodes of the run."""
        return [node for node in self._nodes if isinstance(node, RayNode)]

    def _list_nodes(self) -> list[NodeResources]:
        self._check_open()
        return alive_nodes()

    def _start_actors(self, facts: Sequence[NodeResources], every: Sequence[NodeResources]) -> list[RayNode]:
        """Starts actors on nodes of the cluster that have no agent yet; on all of them or on none."""
        check_node_addresses(*([(each.name, each.address) for each in nodes] for nodes in (facts, every)))
        have = {node.info.name for node in self._ray_nodes if node.has_gpus}
        found, versions = actors.start_compatible_actors(facts, self._site, self._versions, have)
        nodes = [self._node(each, of) for each, of in zip(facts, found, strict=True)]
        try:
            check_reachable_from_nodes(
                [(node.info.name, node.actor) for node in nodes if not node.is_local],
                self._listening_addresses,
                self.ports,
            )
        except BaseException:
            actors.kill_actors(node.actor for node in nodes)
            raise
        self._versions = versions
        return nodes

    def _node(self, facts: NodeResources, employed: StartedActor) -> RayNode:
        here = facts.id == ray.get_runtime_context().get_node_id()
        return RayNode(facts, employed.actor, employed.found, self._given, self._gpus, here)

    def _start_agents(self, nodes: Sequence[RayNode]) -> None:
        """Starts agents side by side. Raises AgentError, NodeRefused, Ray's errors, Superseded, WaitTimeout,
        WireError."""
        refs = [actors.request_agent(node.actor, self._leader(node.is_local), self._grace_s) for node in nodes]
        for node, ref in zip(nodes, refs, strict=True):
            self._attach(node, ref, ray_session.CONNECT_S)

    def _attach(self, node: RayNode, ref: Any, timeout_s: float) -> None:
        where = ServiceAddress(**ray_session.ray_get(ref, node.info.name, "its agent starts", timeout_s=timeout_s))
        if not node.is_local:
            check_reachable_from_here(
                ListeningPort("the run's agent", node.info.name, where.host, where.port), self.ports
            )
        lost_after_s = None if node.is_local else self._config.node_lost_after_s
        node.agent = AgentClient(where, self._token, on_exit=self._exited, lost_after_s=lost_after_s)

    @property
    def _grace_s(self) -> float:
        return 0.0 if ray_session.has_private_ray() else self._config.orphan_grace_s

    def _publish_leader(self) -> None:
        """Publishes this controller as the one that workers on this host connect to."""
        self._leader(True).publish(self._run)

    def _leader(self, here: bool) -> Leader:
        pid, where = os.getpid(), self._server.address
        if here:
            return Leader(self._generation, *where, pid, processes.start_ticks(pid), self._grace_s)
        return Leader(self._generation, *where, None, None, self._grace_s, self._config.node_lost_after_s)

    def _save_reservations(self) -> None:
        """Records the reservations for a later controller."""
        for node in self._ray_nodes:
            held = [asdict(each) for each in self._reservations.held if each.node == node.id]
            node.actor.save_reservations.remote(self._generation, held)

    def _write_state(self) -> None:
        """Writes the state file, from which a later controller starts."""
        if not ray_session.has_private_ray():
            RayRunState(self._generation, self._run, self._needs).write(self._cluster_dir)

    @property
    def _superseded(self) -> bool:
        return super()._superseded or RayRunState.read(self._cluster_dir).generation > self._generation

    def _is_available(self, node: ClusterNode) -> bool:
        if node.alive or not isinstance(node, RayNode):
            return node.alive
        if time.monotonic() - node.refused_at < self._config.node_lost_after_s:
            return False
        try:
            there = is_node_alive(node.id)
        except RayUnresponsive:
            there = True  # without the head, its actor may still respond
        if there and self._restart_agent(node):
            return True
        node.refused_at = time.monotonic()
        return False

    def _restart_agent(self, node: RayNode) -> bool:
        """Starts a new agent on a node that Ray still has; returns whether it started. The workers of the old agent end
        with it."""
        log.warning("%s; starting a new agent there", node.why_lost(node.agent))
        if node.agent is not None:
            node.agent.close()
        bound_s = max(10.0, 2 * self._config.node_lost_after_s)
        try:
            ref = actors.request_agent(node.actor, self._leader(node.is_local), self._grace_s)
            self._attach(node, ref, bound_s)
        except Superseded as error:
            self._known_superseded = True
            raise AgentGone("start", str(error)) from error
        except ray.exceptions.ActorDiedError:
            self._give_up(node)
            return False
        except (ray.exceptions.RayError, AgentError, NodeRefused, WaitTimeout, WireError) as error:
            log.warning("%s does not recover: %s", node.info.name, first_line(error))
            return False
        assert node.agent is not None
        with self._lock:
            if self._closing:
                node.agent.close()
            self._check_open()
        with contextlib.suppress(AgentGone):
            for worker in self._server.workers:
                if worker.node is node:  # its beacon is still there, but outdated
                    node.agent.forget(worker.name)
        if self._supervision is not None:
            self._supervision.watch(self._agents())
        return True

    def _give_up(self, node: RayNode) -> None:
        """Removes a node whose actor has ended, and with it its agent and reservations: a new actor may be started."""
        log.warning("the run's actor on %s has ended", node.info.name)
        with self._lock:
            self._nodes = [each for each in self._nodes if each is not node]
        self._relays.remove(node)

    # --- places

    def _reserve(self, assignment: Assignment) -> list[Reservation]:
        """Reserves an assignment. The first time it also starts an actor and an agent on the controller's node."""
        nodes = [share.node for share in assignment.shares]
        if not self._nodes:
            nodes = [assignment.nodes[0], *(node for node in nodes if node.id != assignment.nodes[0].id)]
        unknown = [each for each in nodes if self._node_of(each.id) is None]
        try:
            new = self._start_actors(unknown, assignment.nodes)
        except (NodeRefused, VersionError, UnreachableAddress):
            self._unfit |= {each.id for each in unknown}
            raise
        held: list[Reservation] = []
        try:
            own = [(node.info.name, node.actor, True) for node in new if node.is_local]
            actors.tie_to_controller(own, self._generation, self._grace_s)
            node_actors = {node.id: node.actor for node in (*self._ray_nodes, *new)}
            held = reserve_groups(
                node_actors, self._generation, assignment, self._reservations.held, self._config.notice_after_s
            )
            self._start_agents(new)
            with self._lock:
                self._check_open()
                self._nodes = sorted([*self._nodes, *new], key=lambda node: not node.is_local)
        except BaseException as error:
            self._known_superseded = self._known_superseded or isinstance(error, Superseded)
            self._unfit |= {node.id for node in new} if isinstance(error, NodeRefused) else set()
            for each in held:
                self._free(each.group)
            actors.kill_actors(node.actor for node in new)  # and with them their agents
            raise
        if new and self._supervision is not None:
            self._supervision.watch(self._agents())
        return held

    def _free(self, group: str) -> None:
        remove_group(group)

    # --- end

    def _end_nodes(self) -> None:
        stop_agents([node.agent for node in self._nodes if node.agent is not None and node.alive])
        self._stop_actors()

    def _abandon_nodes(self) -> None:
        if not self._superseded:
            self._stop_actors()

    def _stop_actors(self) -> None:
        """Stops actors, with their reservations, and agents that are left."""
        actors.stop_actors([(node.info.name, node.actor) for node in self._ray_nodes], self._generation)
        if RayRunState.read(self._cluster_dir).run is not None:
            RayRunState(self._generation, None).write(self._cluster_dir)
        shutil.rmtree(run_shm_dir(self._run), ignore_errors=True)

    def _leave_nodes(self) -> None:
        for node in self._nodes:
            if node.agent is not None:
                node.agent.close()

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._closed and self._open and os.getpid() == self._pid:
                self._open = False
                ray_session.close_session()
