"""The nodes of a Ray cluster with their resources, and the probes of a check on every node."""

import contextlib
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lockstep.cluster.node_network import network_interfaces, reachable_address
from lockstep.cluster.placement.bundles import NodeResources
from lockstep.cluster.ray.ray_session import close_session, open_session, ray_call
from lockstep.config.cluster import RayClusterConfig as Config


def query_nodes(config: Config) -> list[NodeResources]:
    """The nodes of the cluster that the config names. Raises RayUnavailable."""
    open_session(config, 1, 0)
    try:
        return alive_nodes()
    finally:
        close_session()


def alive_nodes() -> list[NodeResources]:
    """The nodes that are alive, this process's first. Raises RayUnresponsive."""
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
    """The address at which the nodes reach this process, whose node is the first. Raises UnreachableAddress."""
    several = len(facts) > 1
    return reachable_address(facts[0].name, network_interfaces(), facts[0].address, config.interface, several).address


def is_node_alive(node_id: str) -> bool:
    """Whether Ray considers the node alive. Raises RayUnresponsive."""
    return any(row["NodeID"] == node_id and row["Alive"] for row in ray_call(ray.nodes, "which nodes live"))


def run_probe(head: str, port: int, name: str, many: int, address: str, variable: str, token: str) -> str:
    """A Ray task: runs a node's probe until it ends; the end of its output if it failed. Bounded by the probe, which
    exits when the head is gone, and by Ray, which kills it with the task."""
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
        nodes: the nodes that are alive, this process's first.
    """

    def __init__(self, config: Config, nodes: Sequence[NodeResources], token_variable: str) -> None:
        self._config, self._nodes, self._variable = config, list(nodes), token_variable
        self._tasks: dict[str, Any] = {}
        self._ended: dict[str, str] = {}
        self.address = controller_address(self._nodes, config)
        """This process's, at which the nodes reach it."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(node.name for node in self._nodes)

    @property
    def addresses(self) -> Mapping[str, str]:
        """The addresses of all nodes in Ray."""
        return {node.name: node.address for node in self._nodes}

    def start(self, head: str, port: int, token: str) -> None:
        """Starts all probes and returns immediately."""
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
                output = future.result(0) if error is None else next(iter(str(error).strip().splitlines()), "")
                if output:
                    self._ended[name] = output
        return dict(self._ended)

    def stop(self) -> None:
        """Cancels all probes. Idempotent."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(task, force=True)
        if tasks:
            close_session()
