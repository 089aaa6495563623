"""The hosts on which a run has processes: the agent that starts them, and where their files are."""

import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.cluster.placement.bundles import NodeResources
from lockstep.cluster.protocol import NodeInfo, WorkerSpec
from lockstep.cluster.worker_environment import ForwardedEnvironment, worker_environment
from lockstep.watch.agent.agent_client import AgentClient
from lockstep.watch.procfs import processes

_LOOPBACK_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
"""Without it, gloo listens on the address of the host's name, which may be unreachable, or reachable from outside."""


class NodeRefused(RuntimeError):
    """The run cannot use a node: which one, why, and how to fix it."""


class ClusterNode:
    """The controller's host.

    Args:
        cluster_dir: folder of the agent, with the manifests of all workers, on the node.
        logs: folder of the workers' logs, on the node.
    """

    here = True
    """Whether this process sees the host's pids, files and shared memory."""
    why_lost = ""
    id = ""
    """The cluster's id of the node; empty where the cluster has only one."""

    def __init__(self, info: NodeInfo, cluster_dir: Path, logs: Path) -> None:
        self.info, self.cluster_dir, self.logs = info, cluster_dir, logs
        self.agent: AgentClient | None = None
        """None before it has started."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.info.name})"

    @property
    def alive(self) -> bool:
        """Whether its agent is alive."""
        return self.agent is not None and self.agent.alive

    def environment_of(self, spec: WorkerSpec) -> dict[str, str]:
        """The environment of a worker on this node, without its manifest and the token."""
        return {**_LOOPBACK_ENVIRONMENT, **os.environ, **spec.environment}

    def python_and_folder(self) -> tuple[str, Path]:
        """The Python interpreter and the working folder of workers."""
        return sys.executable, Path.cwd()

    def cpu_used_s(self) -> float:
        """CPU time of the agent and its descendants: it grows while workers import and cannot send messages yet."""
        return 0.0 if self.agent is None else processes.descendants_cpu_s(self.agent.address.pid)

    def uses_cuda(self, device: str, environment: Mapping[str, str]) -> bool:
        """Whether workers may use CUDA, whose state does not survive a fork. Does not import torch."""
        if device == "auto":
            return environment.get("CUDA_VISIBLE_DEVICES") not in ("", "-1") and Path("/dev/nvidiactl").exists()
        return device == "cuda"


class RayNode(ClusterNode):
    """A node of a Ray cluster, with the actor that holds its agent.

    Args:
        actor: the actor's handle.
        found: the actor's facts about its node.
        given: the controller's variables that are forwarded to workers.
        gpus: returns the ids of the GPUs that are reserved for a worker.
        here: whether it is the controller's host.
    """

    def __init__(
        self,
        facts: NodeResources,
        actor: Any,
        found: Mapping[str, Any],
        given: ForwardedEnvironment,
        gpus: Callable[[WorkerSpec], tuple[str, ...]],
        here: bool,
    ) -> None:
        info = NodeInfo(facts.name, found["address"], Path(found["shared"]))
        super().__init__(info, Path(found["cluster_dir"]), Path(found["logs"]))
        self.id, self.actor, self.found, self.given = facts.id, actor, found, given
        self.here = here and found["place"] == processes.pid_namespace()
        self.has_gpus, self._gpus = facts.gpus > 0, gpus
        self.refused_at = -math.inf
        """Monotonic time of the last failed request for a new agent."""

    @property
    def why_lost(self) -> str:  # type: ignore[override]
        """Why the node is lost, for people."""
        why = "its agent has ended" if self.agent is None else self.agent.why_gone or "its agent is gone"
        return f"its node {self.info.name} is lost: {why}"

    def environment_of(self, spec: WorkerSpec) -> dict[str, str]:
        of_node = {
            "GLOO_SOCKET_IFNAME": self.found["interface"], "VLLM_HOST_IP": self.found["address"],
            "LOCKSTEP_BEACONS": self.found["beacons"],
        }  # fmt: skip
        if self.has_gpus:
            of_node["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus(spec))
        return worker_environment(self.found["environment"], self.given, spec.environment, of_node)

    def python_and_folder(self) -> tuple[str, Path]:
        return self.found["python"], Path(self.found["cwd"])

    def cpu_used_s(self) -> float:
        if self.here or self.agent is None:
            return super().cpu_used_s()
        return self.agent.used_s

    def uses_cuda(self, device: str, environment: Mapping[str, str]) -> bool:
        return device != "cpu" and bool(environment.get("CUDA_VISIBLE_DEVICES", "" if self.has_gpus else None))


def private_ray_environment(declared: Mapping[str, str]) -> ForwardedEnvironment:
    """For a private Ray on this host: workers get this process's variables, as without Ray, and `cluster.env`."""
    return ForwardedEnvironment({**os.environ, **declared}, {})
