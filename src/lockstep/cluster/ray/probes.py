"""Starts the probes of a check on every node of a Ray cluster: a task there starts a process of its own."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lockstep.cluster.bundles import NodeFacts
from lockstep.cluster.ray.nodes import address_of_this_process
from lockstep.cluster.ray.session import close_session, open_session
from lockstep.config.cluster import RayCluster as Config


def run_probe(head: str, port: int, name: str, many: int, address: str, variable: str, token: str) -> str:
    """On a node: runs its probe until it ends; the last words of one that failed. Bounded by the probe, which leaves
    when the head is gone, and by Ray, which ends it with the task."""
    from lockstep.cluster.probes import last_words, probe_command
    from lockstep.watch import waits

    command = [*probe_command(head, port, name, many), "--address", address]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env={**os.environ, variable: token}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            code = waits.process(process, whom=name, why="its probe", timeout_s=1800.0, notice_after_s=None)
        finally:
            if process.poll() is None:
                process.terminate()
        return f"its probe ended with {code}: {last_words(output)}" if code else ""


class RayProbes:
    """One probe per node of the cluster that the config names.

    Args:
        nodes: that live, this process's first.
    """

    def __init__(self, config: Config, nodes: Sequence[NodeFacts], token_variable: str) -> None:
        self._config, self._nodes, self._variable = config, list(nodes), token_variable
        self._tasks: dict[str, Any] = {}
        self._ended: dict[str, str] = {}
        self.address = address_of_this_process(self._nodes, config)
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
