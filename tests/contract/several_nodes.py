"""A cluster of several nodes on this host: each has an agent, an address of loopback and shared memory of its own, and
the controller knows its processes by their connections only."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.base.folders import make_folder, make_run_shm_dir, run_shm_dir
from lockstep.cluster.agent_cluster import AgentCluster
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import NodeInfo, WorkerSpec
from lockstep.cluster.reattach import adopt_agent
from lockstep.config.cluster import LocalClusterConfig
from lockstep.watch.agent.agent_client import AgentClient, AgentError, start_agent
from lockstep.watch.agent.service_discovery import RELAY_FILE, Leader, ServiceAddress
from lockstep.watch.procfs import processes

LOST_AFTER_S = 3.0


class OtherNode(ClusterNode):
    """A node that is not the controller's host, as far as the controller can see."""

    is_local = False

    def __init__(self, folder: Path, run: str, number: int) -> None:
        self.beacons = folder / f"shm-{number}"
        info = NodeInfo(f"node-{number}", f"127.0.0.{number + 1}", self.beacons / run)
        super().__init__(info, folder / "cluster" / info.name, folder / "logs")
        make_folder(self.cluster_dir)

    def environment_of(self, spec: WorkerSpec) -> dict[str, str]:
        return {**super().environment_of(spec), "LOCKSTEP_BEACONS": str(self.beacons), "OMP_NUM_THREADS": "1"}

    def cpu_used_s(self) -> float:
        return 0.0 if self.agent is None else self.agent.workers_cpu_s

    def why_lost(self, agent: AgentClient | None) -> str:
        return f"its node {self.info.name} is lost"

    def relay(self) -> ServiceAddress | None:
        """What the workers of the node are shown."""
        try:
            return ServiceAddress.parse((self.info.shared / RELAY_FILE).read_bytes())
        except FileNotFoundError:
            return None


class SeveralNodes(AgentCluster):
    """The controller's node and `others` others.

    Args:
        before: the cluster of the generation before, whose agents and workers are taken over.
    """

    def __init__(
        self, run: str, folder: Path, generation: int, token: str, others: int, before: "SeveralNodes | None" = None
    ) -> None:
        self.planned = 1
        config = LocalClusterConfig(device="cpu", orphan_grace_s=20.0, notice_after_s=2.0)
        super().__init__(config, run, folder, generation, token, "127.0.0.1")
        logs = make_folder(self._folder / "logs")
        here = ClusterNode(NodeInfo("head", "127.0.0.1", run_shm_dir(run)), make_folder(self._cluster_dir), logs)
        self._nodes = [here, *(OtherNode(self._folder, run, number) for number in range(1, others + 1))]
        try:
            if before is not None:
                self._leader(here).publish(run)
                for node, old in zip(self._nodes, before._nodes, strict=True):
                    self._take_over(node, old)
            else:
                for node in self._nodes:
                    self.start_agent(node)
        except BaseException:
            self.close()
            raise

    def _take_over(self, node: ClusterNode, old: ClusterNode) -> None:
        assert old.agent is not None
        lost_after_s = None if node.is_local else LOST_AFTER_S
        node.agent = adopt_agent(old.agent.address, self._token, self._generation, 20.0, lost_after_s)
        assert node.agent is not None
        node.agent.on_exit = self._exited
        self._orphans.add(node, node.agent.list())
        node.agent.publish_leader(self._leader(node))

    def start_agent(self, node: ClusterNode) -> None:
        """Starts an agent on a node, in place of one that has ended."""
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(node, OtherNode):
                patch.setenv("LOCKSTEP_BEACONS", str(node.beacons))
            make_run_shm_dir(self._run)
            self._leader(node).publish(self._run)
            address = start_agent(
                self._run, self._token, node.cluster_dir, generation=self._generation, orphan_grace_s=20.0,
                host=node.info.address, node=node.info.name, controller=os.getpid() if node.is_local else None,
            )  # fmt: skip
        lost_after_s = None if node.is_local else LOST_AFTER_S
        node.agent = AgentClient(address, self._token, on_exit=self._exited, lost_after_s=lost_after_s)

    def _leader(self, node: ClusterNode) -> Leader:
        pid = os.getpid() if node.is_local else None
        start = None if pid is None else processes.start_ticks(pid)
        return Leader(self._generation, *self._server.address, pid, start, 20.0)

    def _planned_workers(self, node: ClusterNode) -> int:
        return self.planned

    def _prepare(self, specs: Sequence[WorkerSpec]) -> None: ...

    def _place(self, spec: WorkerSpec) -> ClusterNode:
        return next(node for node in self._nodes if node.info.name == spec.node)

    def _end_nodes(self) -> None:
        for node in self._nodes:
            if node.agent is not None and node.agent.alive:
                node.agent.shut_down(1.0)
        self._abandon_nodes()

    def _abandon_nodes(self) -> None:
        for node in self._nodes:
            if node.agent is not None:
                node.agent.close()
                processes.send_signal(node.agent.address.pid, node.agent.address.start_ticks, 9)

    def _leave_nodes(self) -> None:
        for node in self._nodes:
            with suppress(AgentError):
                if node.agent is not None:
                    node.agent.close()


def is_open(host: str, port: int) -> bool:
    """Whether something listens there."""
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex((host, port)) == 0
