"""Workers on the nodes of a Ray cluster."""

import contextlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import ray

from lockstep.cluster.addresses import UnreachableAddress, check_nodes
from lockstep.cluster.bundles import NodeFacts, PlacementError, Wanted, gpus_of
from lockstep.cluster.environment import forwarded
from lockstep.cluster.node import Node, NodeRefused
from lockstep.cluster.placement import Assignment
from lockstep.cluster.places import Held
from lockstep.cluster.placing import PlacingCluster
from lockstep.cluster.ray import session
from lockstep.cluster.ray.employing import Employed, Site, dismiss, employ_fit
from lockstep.cluster.ray.inheriting import RECORD, RayHeritage
from lockstep.cluster.ray.keeper import MARK
from lockstep.cluster.ray.leaving import leave
from lockstep.cluster.ray.node import RayNode, own_environment
from lockstep.cluster.ray.nodes import address_of_this_process, is_alive, node_facts
from lockstep.cluster.ray.reserving import free, reserve
from lockstep.cluster.ray.telling import tell
from lockstep.cluster.versions import Facts, VersionError
from lockstep.config.cluster import RayCluster as Config
from lockstep.config.placement import Placement
from lockstep.watch import procs
from lockstep.watch.agent_client import Address, AgentClient, AgentError, AgentGone
from lockstep.watch.folders import run_dir, write_whole
from lockstep.watch.leader import Leader, Superseded
from lockstep.watch.waits import WaitTimeout
from lockstep.watch.wire import WireError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
REFUSALS = (
    PlacementError, NodeRefused, VersionError, UnreachableAddress, AgentError, Superseded, WaitTimeout, WireError,
    ray.exceptions.RayError,
)  # fmt: skip


class RayCluster(PlacingCluster):
    """The processes of one run on the nodes of a Ray cluster.

    Ray says which nodes there are, reserves what `wanted` says, and starts an actor on each node; that one starts the
    node's agent, and everything else goes through the agents.

    Args:
        wanted: the run's processes and what they need; others go where there are fewest, and reserve nothing.
        token, heritage: as of a LocalCluster.

    Raises:
        RayUnavailable: there is no Ray to be had.
        PlacementError, DoesNotFit: the nodes cannot hold the run.
        WaitTimeout: others did not leave the nodes within `busy_limit_s`.
        NodeRefused, UnreachableAddress, VersionError: a node cannot take part.
        AgentError, Superseded: as of a LocalCluster.
    """

    refusals = REFUSALS

    def __init__(
        self,
        config: Config,
        run: str,
        folder: Path,
        generation: int,
        token: str | None = None,
        heritage: RayHeritage | None = None,
        wanted: Sequence[Wanted] = (),
        placement: Placement | None = None,
    ) -> None:
        self._config, placement = config, placement or Placement()
        self._versions: dict[str, Facts] = {}
        """By name of the node; of those that the run is on."""
        self._open = False
        cpus = max(sum(each.cpus for each in wanted), os.cpu_count() or 1)
        session.open_session(config, cpus, gpus_of(wanted, placement))
        self._open = True
        if heritage is not None:
            session.close_session()  # its own; this one is the same
        facts: list[NodeFacts] = []
        try:
            facts = node_facts()
            host = LOOPBACK if session.has_own() else address_of_this_process(facts, config)
            token = token or (secrets.token_hex(32) if heritage is None else heritage.token)
            held = [] if heritage is None else heritage.held
            super().__init__(config, run, folder, generation, token, host, wanted, placement, held)
        except BaseException:
            session.close_session()
            raise
        try:
            self._given = own_environment(config.env) if session.has_own() else forwarded(
                os.environ, config.forward_env, config.env, config.interface
            )  # fmt: skip
            self._site = self._make_site(facts)
            if heritage is None:
                self._begin()
            else:
                self._inherit(heritage, facts)
            if not session.has_own():
                tell(config, self._given, self._nodes, self._affairs / "environment.json")
        except BaseException:
            self.close()
            raise

    def _make_site(self, facts: Sequence[NodeFacts]) -> Site:
        """What all nodes are told of the run."""
        self._affairs.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark = secrets.token_hex(8)
        write_whole(self._affairs / MARK, mark.encode())
        own = session.has_own()
        peer = None if own else facts[0].address
        several = not own and len(facts) > 1
        return Site(
            self._run, self._token, str(self._folder), str(Path.cwd()), mark, peer, self._config.interface, several
        )

    def _begin(self) -> None:
        """With nothing left of an earlier generation."""
        self._lead()
        self._record()
        self._settle_down()

    def _inherit(self, heritage: RayHeritage, facts: Sequence[NodeFacts]) -> None:
        known = {each.id: each for each in facts}
        for left in heritage.left:  # the controller's own comes first
            heir = self._node(known[left.node], Employed(left.keeper, left.found))
            heir.agent = left.agent
            heir.agent.on_exit = self._exited
            self._nodes.append(heir)
            if heir.here:  # from now on its actor lives as long as this process
                self._be_watched(heir)
        self._lead()
        for node in self._nodes:
            with contextlib.suppress(AgentGone):
                if node.agent is not None:
                    self._heirs.meet(node, node.agent.list())
                    node.agent.lead(self._leader(node.here))
        self._keep()

    # --- nodes

    def _look(self) -> list[NodeFacts]:
        self._must_be_open()
        return node_facts()

    def _employ(self, facts: Sequence[NodeFacts], every: Sequence[NodeFacts]) -> list[RayNode]:
        """Actors on these nodes of all, which have no agent yet; nothing is left of them where one is refused."""
        check_nodes(*([(each.name, each.address) for each in nodes] for nodes in (facts, every)))
        have = {node.info.name for node in self._nodes if isinstance(node, RayNode) and node.has_gpus}
        found, self._versions = employ_fit(facts, self._site, self._versions, have)
        return [self._node(each, of) for each, of in zip(facts, found, strict=True)]

    def _node(self, facts: NodeFacts, employed: Employed) -> RayNode:
        here = facts.id == ray.get_runtime_context().get_node_id()
        return RayNode(facts, employed.keeper, employed.found, self._given, self._gpus, here)

    def _start_agents(self, nodes: Sequence[Node]) -> None:
        """Side by side. Raises AgentError, ray's errors, WaitTimeout."""
        kept = [node for node in nodes if isinstance(node, RayNode)]
        asked = [node.keeper.start_agent.remote(asdict(self._leader(node.here)), self._grace_s(node)) for node in kept]
        for node, ref in zip(kept, asked, strict=True):
            where = Address(**session.answer(ref, node.info.name, "its agent starts"))
            lost_after_s = None if node.here else self._config.node_lost_after_s
            node.agent = AgentClient(where, self._token, on_exit=self._exited, lost_after_s=lost_after_s)

    def _be_watched(self, holder: RayNode) -> None:
        """Raises ray's errors, Superseded, WaitTimeout."""
        pid = os.getpid()
        asked = holder.keeper.watch_controller.remote(
            self._generation, pid, procs.start_ticks(pid), self._grace_s(holder)
        )
        session.answer(asked, holder.info.name, "the run's actor there learns of this controller")

    def _grace_s(self, node: Node) -> float:
        return 0.0 if session.has_own() else self._config.orphan_grace_s

    def _lead(self) -> None:
        """From here on workers of this host find this controller and no other."""
        self._leader(True).publish(self._run)

    def _leader(self, here: bool) -> Leader:
        pid, (host, port) = os.getpid(), self._hub.address
        start, lost_s = procs.start_ticks(pid), self._config.node_lost_after_s
        grace_s = 0.0 if session.has_own() else self._config.orphan_grace_s
        if here:
            return Leader(self._generation, host, port, pid, start, grace_s)
        return Leader(self._generation, host, port, None, None, grace_s, lost_s)

    def _keep(self) -> None:
        """For a later controller."""
        for node in self._nodes:
            if isinstance(node, RayNode):
                held = [asdict(each) for each in self._places.held if each.node == node.id]
                node.keeper.keep.remote(self._generation, held)
        self._record()

    def _record(self) -> None:
        """Where a later controller looks."""
        if not session.has_own():
            write_whole(self._affairs / RECORD, json.dumps({"run": self._run}).encode())

    def _living(self, node: Node) -> bool:
        return node.alive or (isinstance(node, RayNode) and is_alive(node.id) and self._revive(node))

    def _revive(self, node: RayNode) -> bool:
        """Another agent on a node that Ray still has; whether it came. Whoever was there has been given up."""
        log.warning("%s; another agent is started there", node.why_lost)
        if node.agent is not None:
            node.agent.close()
        bound_s = max(10.0, 2 * self._config.node_lost_after_s)
        try:
            ref = node.keeper.start_agent.remote(asdict(self._leader(node.here)), self._grace_s(node))
            where = Address(**session.answer(ref, node.info.name, "its agent starts", timeout_s=bound_s))
            lost_after_s = None if node.here else self._config.node_lost_after_s
            node.agent = AgentClient(where, self._token, on_exit=self._exited, lost_after_s=lost_after_s)
        except (ray.exceptions.RayError, AgentError, Superseded, WaitTimeout, WireError) as error:
            log.warning("%s does not come back: %s", node.info.name, str(error).splitlines()[0])
            return False
        with contextlib.suppress(AgentGone):
            for worker in self._hub.workers:
                if worker.node is node:  # its beacon is there, and says nothing any more
                    node.agent.forget(worker.name)
        if self._supervision is not None:
            self._supervision.watch(self._agents())
        return True

    # --- places

    def _reserve(self, assignment: Assignment) -> list[Held]:
        """The first time also with an actor and an agent on the controller's node, whoever is to be there."""
        nodes = [share.node for share in assignment.shares]
        if not self._nodes:
            nodes = [assignment.nodes[0], *(node for node in nodes if node.id != assignment.nodes[0].id)]
        unknown = [each for each in nodes if self._node_of(each.id) is None]
        try:
            new = self._employ(unknown, assignment.nodes)
        except (NodeRefused, VersionError, UnreachableAddress):
            self._unfit |= {each.id for each in unknown}
            raise
        held: list[Held] = []
        try:
            keepers = {node.id: node.keeper for node in (*self._nodes, *new) if isinstance(node, RayNode)}
            held = reserve(keepers, self._generation, assignment, self._config.notice_after_s)
            self._start_agents(new)
            with self._lock:
                self._must_be_open()
                self._nodes = [*self._nodes, *new]
        except BaseException:
            for each in held:
                self._free(each.group)
            dismiss(node.keeper for node in new)  # and their agents go with them
            raise
        if new and self._supervision is not None:
            self._supervision.watch(self._agents())
        return held

    def _free(self, group: str) -> None:
        free(group)

    # --- ends

    def _end_nodes(self) -> None:
        leave([node.agent for node in self._nodes if node.agent is not None and node.alive])
        self._dissolve()

    def _abandon_nodes(self) -> None:
        if not self._superseded:
            self._dissolve()

    def _dissolve(self) -> None:
        """Actors and what is reserved; an agent that is left is killed by its actor's end."""
        with contextlib.suppress(ray.exceptions.RayError):
            for held in self._places.held:
                self._free(held.group)
            for node in self._nodes:
                if isinstance(node, RayNode):
                    ray.kill(node.keeper)
        (self._affairs / RECORD).unlink(missing_ok=True)
        shutil.rmtree(run_dir(self._run), ignore_errors=True)

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
                session.close_session()
