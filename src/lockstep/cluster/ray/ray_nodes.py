"""The nodes of a Ray cluster: their resources, and the controller's view of one."""

import contextlib
import math
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.node_network import network_interfaces, reachable_address
from lockstep.cluster.placement.bundles import NodeResources
from lockstep.cluster.protocol import NodeInfo, WorkerSpec
from lockstep.cluster.ray.ray_session import close_session, open_session, ray_call
from lockstep.cluster.worker_environment import ForwardedEnvironment, worker_environment
from lockstep.config.cluster import RayClusterConfig as Config
from lockstep.watch.procfs import processes


class RayNode(ClusterNode):
    """With the actor that holds its agent.

    Args:
        keeper: the actor's handle, and `locate_files`, what it says of its node.
        given: what reaches workers of the controller's variables.
        gpus: the ids of the GPUs that a process has there, by its spec.
        here: whether it is the controller's host.
    """

    def __init__(
        self,
        facts: NodeResources,
        keeper: Any,
        found: Mapping[str, Any],
        given: ForwardedEnvironment,
        gpus: Callable[[WorkerSpec], tuple[str, ...]],
        here: bool,
    ) -> None:
        info = NodeInfo(facts.name, found["address"], Path(found["shared"]))
        super().__init__(info, Path(found["affairs"]), Path(found["logs"]))
        self.id, self.keeper, self.found, self.given = facts.id, keeper, found, given
        self.here = here and found["place"] == processes.pid_namespace()
        self.has_gpus, self._gpus = facts.gpus > 0, gpus
        self.refused_at = -math.inf
        """When another agent was asked for in vain, by the monotonic clock."""

    @property
    def why_lost(self) -> str:  # type: ignore[override]
        """Where nothing is heard of it."""
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

    def place(self) -> tuple[str, Path]:
        return self.found["python"], Path(self.found["cwd"])

    def used_s(self) -> float:
        if self.here or self.agent is None:
            return super().used_s()
        return self.agent.used_s

    def uses_cuda(self, device: str, environment: Mapping[str, str]) -> bool:
        return device != "cpu" and bool(environment.get("CUDA_VISIBLE_DEVICES", "" if self.has_gpus else None))


def private_ray_environment(declared: Mapping[str, str]) -> ForwardedEnvironment:
    """Of a Ray of this host alone: workers have this process's variables, as without Ray, and `cluster.env`."""
    return ForwardedEnvironment({**os.environ, **declared}, {})


def query_nodes(config: Config) -> list[NodeResources]:
    """Of the cluster that the config names. Raises RayUnavailable."""
    open_session(config, 1, 0)
    try:
        return alive_nodes()
    finally:
        close_session()


def alive_nodes() -> list[NodeResources]:
    """Those that live, this process's first. Raises RaySilent."""
    table: Sequence[dict[str, Any]]
    table, free = ray_call(lambda: (ray.nodes(), available_resources_per_node()), "its nodes, and what of them is free")
    here = ray.get_runtime_context().get_node_id()
    living = sorted((row for row in table if row["Alive"]), key=lambda row: row["NodeID"] != here)
    names = Counter(row["NodeManagerHostname"] for row in living)
    found = []
    for row in living:
        total, now = row["Resources"], free.get(row["NodeID"], {})
        host, address = row["NodeManagerHostname"], row["NodeManagerAddress"]
        found.append(
            NodeResources(
                row["NodeID"],
                host if names[host] == 1 else f"{host}-{address}",
                address,
                total.get("CPU", 0.0),
                total.get("GPU", 0.0),
                now.get("CPU", 0.0),
                now.get("GPU", 0.0),
                int(total.get("memory", 0)),
                head="node:__internal_head__" in total,
            )
        )
    return found


def controller_address(facts: Sequence[NodeResources], config: Config) -> str:
    """By which the nodes reach it, of which the first is its own. Raises UnreachableAddress."""
    several = len(facts) > 1
    return reachable_address(facts[0].name, network_interfaces(), facts[0].address, config.interface, several).address


def is_node_alive(node_id: str) -> bool:
    """Whether Ray thinks so. Raises RaySilent."""
    return any(row["NodeID"] == node_id and row["Alive"] for row in ray_call(ray.nodes, "which nodes live"))


def run_probe(head: str, port: int, name: str, many: int, address: str, variable: str, token: str) -> str:
    """On a node: runs its probe until it ends; the last words of one that failed. Bounded by the probe, which leaves
    when the head is gone, and by Ray, which ends it with the task."""
    from lockstep.base import waits
    from lockstep.cluster.local_cluster import probe_command, probe_output_tail

    command = [*probe_command(head, port, name, many), "--address", address]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env={**os.environ, variable: token}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            code = waits.process(process, waits_for=name, why="its probe", timeout_s=1800.0, notice_after_s=None)
        finally:
            if process.poll() is None:
                process.terminate()
        return f"its probe ended with {code}: {probe_output_tail(output)}" if code else ""


class RayProbes:
    """One probe per node of the cluster that the config names.

    Args:
        nodes: that live, this process's first.
    """

    def __init__(self, config: Config, nodes: Sequence[NodeResources], token_variable: str) -> None:
        self._config, self._nodes, self._variable = config, list(nodes), token_variable
        self._tasks: dict[str, Any] = {}
        self._ended: dict[str, str] = {}
        self.address = controller_address(self._nodes, config)
        """Of this process, by which the nodes reach it."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(node.name for node in self._nodes)

    @property
    def addresses(self) -> Mapping[str, str]:
        """Of all nodes, as Ray has them."""
        return {node.name: node.address for node in self._nodes}

    def start(self, head: str, port: int, token: str) -> None:
        """Returns at once."""
        open_session(self._config, 1, 0)
        for node in self._nodes:
            task = ray.remote(run_probe).options(
                num_cpus=0, max_retries=0, name=f"check-{node.name}",
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )  # fmt: skip
            self._tasks[node.name] = task.remote(
                head, port, node.name, len(self._nodes), node.address, self._variable, token
            )

    def failed(self) -> Mapping[str, str]:
        """By node, why its probe could not be started or has ended."""
        for name, task in list(self._tasks.items()):
            future = task.future()
            if name not in self._ended and future.done():
                error = future.exception(0)
                said = future.result(0) if error is None else next(iter(str(error).strip().splitlines()), "")
                if said:
                    self._ended[name] = said
        return dict(self._ended)

    def stop(self) -> None:
        """Idempotent."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(task, force=True)
        if tasks:
            close_session()
