"""Workers on the nodes of a Ray cluster."""

import contextlib
import json
import logging
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import ray

from lockstep.cluster.addresses import UnreachableAddress, check_nodes
from lockstep.cluster.base import AgentCluster
from lockstep.cluster.bundles import NodeFacts, PlacementError, Wanted, gpus_of
from lockstep.cluster.environment import forwarded
from lockstep.cluster.node import Node, NodeRefused
from lockstep.cluster.placement import assign
from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.ray import session
from lockstep.cluster.ray.employing import Employed, Site, dismiss, employ_fit
from lockstep.cluster.ray.inheriting import RECORD, RayHeritage
from lockstep.cluster.ray.keeper import MARK
from lockstep.cluster.ray.leaving import leave
from lockstep.cluster.ray.node import RayNode, own_environment
from lockstep.cluster.ray.nodes import address_of_this_process, is_alive, node_facts
from lockstep.cluster.ray.reserving import AS_LONG_AS_IT_TAKES, LOOK_S, Place, free, reserve, when_free
from lockstep.cluster.ray.telling import tell
from lockstep.cluster.versions import Facts, VersionError
from lockstep.config.cluster import RayCluster as Config
from lockstep.config.placement import Placement, RolePlacement
from lockstep.watch import procs, waits
from lockstep.watch.agent_client import Address, AgentClient, AgentError, AgentGone
from lockstep.watch.folders import run_dir, write_whole
from lockstep.watch.leader import Leader, Superseded
from lockstep.watch.waits import WaitTimeout
from lockstep.watch.wire import WireError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
TAKEN_S = 20.0
"""What was free a moment ago is reserved within this, or somebody else has it."""
MOVE_ERRORS = (
    PlacementError, NodeRefused, VersionError, UnreachableAddress, AgentError, Superseded, WaitTimeout, WireError,
    ray.exceptions.RayError,
)  # fmt: skip


class RayCluster(AgentCluster):
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
        self._config, self._wanted = config, {each.name: each for each in wanted}
        self._placement = placement or Placement()
        self._groups: list[str] = []
        self._told = ""
        """Why who lost a place has none yet."""
        self._versions: dict[str, Facts] = {}
        """By name of the node; of those that the run is on."""
        self._unfit: set[str] = set()
        """Ids of nodes that were found to be unable to take part."""
        self._places: dict[str, Place] = {}
        self._open = False
        cpus = max(sum(each.cpus for each in wanted), os.cpu_count() or 1)
        session.open_session(config, cpus, gpus_of(wanted, placement or Placement()))
        self._open = True
        if heritage is not None:
            session.close_session()  # its own; this one is the same
        facts: list[NodeFacts] = []
        try:
            facts = node_facts()
            host = LOOPBACK if session.has_own() else address_of_this_process(facts, config)
            token = token or (secrets.token_hex(32) if heritage is None else heritage.token)
            super().__init__(config, run, folder, generation, token, host)
        except BaseException:
            session.close_session()
            raise
        try:
            self._given = own_environment(config.env) if session.has_own() else forwarded(
                os.environ, config.forward_env, config.env, config.interface
            )  # fmt: skip
            self._site = self._make_site(facts)
            if heritage is None:
                self._begin(facts)
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

    def _begin(self, facts: list[NodeFacts]) -> None:
        """With nothing left of an earlier generation: the controller's node first, as its actor reserves the rest."""
        assignment = None
        if self._wanted:
            limits = self._config.busy_limit_s, self._config.notice_after_s
            assignment = when_free(list(self._wanted.values()), self._placement, self._look, *limits)
        used = [] if assignment is None else [share.node for share in assignment.shares]
        chosen = [facts[0], *(node for node in used if node.id != facts[0].id)]
        self._lead()
        self._record()
        self._nodes += self._employ(chosen, facts)
        if assignment is not None:
            name, self._places = reserve(self._holder.keeper, self._generation, assignment, *limits)
            self._groups.append(name)
        self._start_agents(self._nodes)
        self._keep()

    def _inherit(self, heritage: RayHeritage, facts: Sequence[NodeFacts]) -> None:
        known = {each.id: each for each in facts}
        self._places, self._groups = dict(heritage.places), list(heritage.groups)
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

    @property
    def _holder(self) -> RayNode:
        """The controller's own node, whose actor holds what is reserved."""
        node = self._nodes[0]
        assert isinstance(node, RayNode)
        return node

    def _look(self) -> list[NodeFacts]:
        if self._closing:
            raise AgentGone("start", "the cluster is closed")
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
        places = {name: asdict(place) for name, place in self._places.items()}
        self._holder.keeper.keep_places.remote(self._generation, {"places": places, "groups": self._groups})
        self._record()

    def _record(self) -> None:
        """Where a later controller looks."""
        if not session.has_own():
            write_whole(self._affairs / RECORD, json.dumps({"run": self._run}).encode())

    # --- places

    def _gpus(self, spec: WorkerSpec) -> tuple[str, ...]:
        place = self._places.get(_post(spec))
        return () if place is None else place.gpus

    def _prepare(self) -> None:
        if self._closing or not self._nodes:
            raise AgentGone("start", "the cluster is closed")
        if self._superseded:
            raise AgentGone("start", f"a later generation of {self._run} has the run")

    def _place(self, spec: WorkerSpec) -> Node:
        """Waits, visibly, where a GPU is needed that only others have."""
        return waits.poll(
            lambda: self._try_to_place(spec), kind="placement", whom="nodes of the Ray cluster",
            why=f"a place for {spec.name}", every_s=LOOK_S, notice_after_s=self._config.notice_after_s,
            timeout_s=self._config.busy_limit_s or AS_LONG_AS_IT_TAKES,
        )  # fmt: skip

    def _try_to_place(self, spec: WorkerSpec) -> Node | None:
        with self._lock:
            if self._closing:
                raise AgentGone("start", "the cluster is closed")
            if spec.node is not None:
                return self._named(spec)
            place = self._places.get(_post(spec))
            if place is None:
                return self._emptiest()
            return self._living(place.node) or self._move(spec)

    def _named(self, spec: WorkerSpec) -> Node:
        named = [each for each in self._nodes if isinstance(each, RayNode) and each.info.name == spec.node]
        node = next((each for each in named if self._living(each.id)), None)
        if node is None:
            names = ", ".join(each.name for each in self.nodes())
            raise ValueError(f"{spec.name} is to be on {spec.node}, and the run has {names}")
        return node

    def _emptiest(self) -> Node:
        """For a process that has nothing reserved, or nothing that is still there."""
        many = Counter(id(worker.node) for worker in self._hub.workers if not worker.dead)
        living = [node for node in self._nodes if node.alive]
        if not living:  # all agents were killed, and hosts are there
            living = [node for node in self._nodes if isinstance(node, RayNode) and self._living(node.id)]
        if not living:
            raise AgentGone("start", "all nodes of the run are lost")
        return min(living, key=lambda node: many[id(node)])

    def _living(self, node_id: str) -> Node | None:
        """The node, where it is still there or there again; None where it is lost."""
        node = next((each for each in reversed(self._nodes) if isinstance(each, RayNode) and each.id == node_id), None)
        if node is None or node.alive:
            return node
        return node if is_alive(node_id) and self._revive(node) else None

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

    def _move(self, spec: WorkerSpec) -> Node | None:
        """Another place for all that was on a lost node: what others have left free, or, for processes without GPUs, a
        node of the run although nothing is reserved there. None where they need GPUs, and there are none now."""
        lost = self._places[_post(spec)].node
        homeless = [self._wanted[name] for name, place in self._places.items() if place.node == lost]
        loose = self._placement.model_copy(update={"policy": RolePlacement(), "rollout": RolePlacement()})
        dead = {node.id for node in self._nodes if isinstance(node, RayNode) and not node.alive}
        try:
            fit = [each for each in node_facts() if each.id not in dead | self._unfit]
            assignment = assign(homeless, loose, fit)
            self._add([share.node for share in assignment.shares], fit)
            limits = TAKEN_S, self._config.notice_after_s
            name, places = reserve(self._holder.keeper, self._generation, assignment, *limits)
        except MOVE_ERRORS as error:
            gpus = any(each.gpus for each in homeless)
            node = None if gpus else self._emptiest()
            then = "waits" if node is None else f"goes to {node.info.name}, where nothing is reserved for it"
            if str(error) != self._told:
                log.warning("%s %s: %s", spec.name, then, str(error).strip().splitlines()[-1])
            self._told = str(error)
            return node
        self._groups.append(name)
        self._places |= places
        self._keep()
        return self._living(self._places[_post(spec)].node)

    def _add(self, facts: Sequence[NodeFacts], every: Sequence[NodeFacts]) -> None:
        """Those of them that the run is not on yet."""
        known = {node.id for node in self._nodes if isinstance(node, RayNode)}
        unknown = [each for each in facts if each.id not in known]
        try:
            new = self._employ(unknown, every)
        except (NodeRefused, VersionError, UnreachableAddress):
            self._unfit |= {each.id for each in unknown}
            raise
        try:
            self._start_agents(new)
        except BaseException:
            dismiss(node.keeper for node in new)  # and its agent goes with it
            raise
        self._nodes += new
        if new and self._supervision is not None:
            self._supervision.watch(self._agents())

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
            for group in self._groups:
                free(group)
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


def _post(spec: WorkerSpec) -> str:
    """The planned name of whoever comes in the place of another: `engine-0` of `engine-0.2`."""
    return spec.name.partition(".")[0]
