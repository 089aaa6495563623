"""A node of a Ray cluster, as the controller has it."""

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.cluster.bundles import NodeFacts
from lockstep.cluster.environment import Forwarded, worker_environment
from lockstep.cluster.node import Node
from lockstep.cluster.protocol import NodeInfo, WorkerSpec
from lockstep.watch import procs


class RayNode(Node):
    """With the actor that holds its agent.

    Args:
        keeper: the actor's handle, and `found`, what it says of its node.
        given: what reaches workers of the controller's variables.
        gpus: the ids of the GPUs that a process has there, by its spec.
        here: whether it is the controller's host.
    """

    def __init__(
        self,
        facts: NodeFacts,
        keeper: Any,
        found: Mapping[str, Any],
        given: Forwarded,
        gpus: Callable[[WorkerSpec], tuple[str, ...]],
        here: bool,
    ) -> None:
        info = NodeInfo(facts.name, found["address"], Path(found["shared"]))
        super().__init__(info, Path(found["affairs"]), Path(found["logs"]))
        self.id, self.keeper, self.found, self.given = facts.id, keeper, found, given
        self.here = here and found["place"] == procs.place()
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


def own_environment(declared: Mapping[str, str]) -> Forwarded:
    """Of a Ray of this host alone: workers have this process's variables, as without Ray, and `cluster.env`."""
    return Forwarded({**os.environ, **declared}, {})
