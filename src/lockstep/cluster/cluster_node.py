"""The hosts on which a run has processes: the agent that starts the processes, and the paths of their files."""

import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.cluster.placement.bundles import NodeResources
from lockstep.cluster.protocol import NodeInfo, WorkerSpec
from lockstep.cluster.rpc.open_calls import OpenCalls
from lockstep.cluster.worker_environment import ForwardedEnvironment, worker_environment
from lockstep.watch.agent.agent_client import AgentClient
from lockstep.watch.procfs import processes

_LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
"""By default gloo listens on the address of the host's name, which may be unreachable, or reachable from outside."""


class NodeRefused(RuntimeError):
    """The run cannot use a node. Says which node, why, and how to fix it."""


class ClusterNode:
    """A host on which a run has processes; here the controller's host.

    Args:
        cluster_dir: folder on the node for the agent's files and the manifests of all workers.
        logs: folder on the node for the workers' logs.
    """

    is_local = True
    """Whether this process sees the node's process ids, files and shared memory."""
    id = ""
    """The node's id in the cluster; empty if the cluster has only one node."""

    def __init__(self, info: NodeInfo, cluster_dir: Path, logs: Path) -> None:
        self.info, self.cluster_dir, self.logs = info, cluster_dir, logs
        self.agent: AgentClient | None = None
        """The node's agent; None before it has started."""
        self.calls = OpenCalls()
        """The open calls of its workers, which may be called by one message; and of those of nodes that share its call
        relay, from before it has a worker."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.info.name})"

    @property
    def alive(self) -> bool:
        """Whether its agent is alive."""
        return self.agent is not None and self.agent.alive

    def why_lost(self, agent: AgentClient | None) -> str:
        """Why the node was lost with this agent of it, as a sentence; empty for the controller's host."""
        return ""

    def environment_of(self, spec: WorkerSpec) -> dict[str, str]:
        """The environment of a worker on this node, without its manifest and the token."""
        return {**_LOOPBACK_ENVIRONMENT, **os.environ, **spec.environment}

    def python_and_folder(self) -> tuple[str, Path]:
        """The Python interpreter and the working folder of workers."""
        return sys.executable, Path.cwd()

    def cpu_used_s(self) -> float:
        """CPU time of the agent and its descendants. It grows while workers import modules and cannot send messages
        yet."""
        return 0.0 if self.agent is None else processes.descendants_cpu_s(self.agent.address.pid)

    def uses_cuda(self, device: str, environment: Mapping[str, str]) -> bool:
        """Whether workers may use CUDA, whose state does not survive a fork. Does not import torch."""
        if device == "auto":
            return environment.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and Path("/dev/nvidiactl").exists()
        return device == "cuda"


class RayNode(ClusterNode):
    """A node of a Ray cluster, with the actor that holds its agent.

    Args:
        resources: the node in Ray.
        actor: the actor's handle.
        facts: what the actor reports about its node (`NodeActor.facts`).
        forwarded: the controller's variables that workers get.
        gpus: returns the ids of the GPUs that are reserved for a worker.
        on_controller_host: whether the node is the controller's host.
    """

    def __init__(
        self,
        resources: NodeResources,
        actor: Any,
        facts: Mapping[str, Any],
        forwarded: ForwardedEnvironment,
        gpus: Callable[[WorkerSpec], tuple[str, ...]],
        on_controller_host: bool,
    ) -> None:
        info = NodeInfo(resources.name, facts["address"], Path(facts["shared"]))
        super().__init__(info, Path(facts["cluster_dir"]), Path(facts["logs"]))
        self.id, self.actor, self.facts, self.forwarded = resources.id, actor, facts, forwarded
        self.is_local = on_controller_host and facts["place"] == processes.pid_namespace()
        self.has_gpus, self._gpus = resources.gpus > 0, gpus
        self.refused_at = -math.inf
        """Monotonic time when a new agent was last requested in vain."""

    def why_lost(self, agent: AgentClient | None) -> str:
        why = "its agent has ended" if agent is None else agent.why_gone or "its agent is gone"
        return f"its node {self.info.name} is lost: {why}"

    def environment_of(self, spec: WorkerSpec) -> dict[str, str]:
        of_node = {
            "GLOO_SOCKET_IFNAME": self.facts["interface"], "VLLM_HOST_IP": self.facts["address"],
            "LOCKSTEP_BEACONS": self.facts["beacons"],
        }  # fmt: skip
        if self.has_gpus:
            of_node["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus(spec))
        return worker_environment(self.facts["environment"], self.forwarded, spec.environment, of_node)

    def python_and_folder(self) -> tuple[str, Path]:
        return self.facts["python"], Path(self.facts["cwd"])

    def cpu_used_s(self) -> float:
        if self.is_local or self.agent is None:
            return super().cpu_used_s()
        return self.agent.workers_cpu_s

    def uses_cuda(self, device: str, environment: Mapping[str, str]) -> bool:
        return device != "cpu" and bool(environment.get("CUDA_VISIBLE_DEVICES", "" if self.has_gpus else None))


def private_ray_environment(declared: Mapping[str, str]) -> ForwardedEnvironment:
    """For a private Ray on this host: workers get this process's variables, as without Ray, and `cluster.env`."""
    return ForwardedEnvironment({**os.environ, **declared}, {})
